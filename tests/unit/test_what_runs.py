"""The table of what runs where is read back as it was written, and says no more than what tests ran."""

from __future__ import annotations

import json

import pytest

from neuron_accel import ModelParallelismPlugin, Zero1Plugin
from tests.what_runs import main, merge, more_than, on_page, parse, strategies_in, table

RECORD = {"zero1": {"gloo": [2, 4], "xla": [2]}, "Trainer": {"gloo": [1, 2]}}


def test_a_table_is_read_back():
    record = parse(table(RECORD))
    assert {row: kinds for row, kinds in record.items() if kinds} == RECORD
    assert record["pipeline_parallel"] == {}


def test_records_of_several_runs_are_merged():
    assert merge([RECORD, {"zero1": {"xla": [8]}}])["zero1"] == {"gloo": [2, 4], "xla": [2, 8]}


def test_a_claim_without_a_run_is_found(tmp_path, capsys):
    assert more_than(RECORD, {"zero1": {"gloo": [2]}}, ["gloo"]) == [
        "ZeRO-1 on 4 ranks of CPU, gloo",
        "Trainer on 1 ranks of CPU, gloo",
        "Trainer on 2 ranks of CPU, gloo",
    ]
    assert more_than(RECORD, {}, ["gloo"]) == [], "skipped on this machine"
    little = tmp_path / "runs.json"
    little.write_text(json.dumps({"zero1": {"gloo": [2]}}))
    assert main([str(little), "--check"]) == 1
    assert "no test ran that" in capsys.readouterr().err


def test_the_page_has_a_table():
    assert on_page()["tensor_parallel"]["gloo"]


@pytest.mark.parametrize(
    ("arguments", "names", "size"),
    [
        (
            ([{"plugins": ["zero1", {"model_parallelism": {"tensor_parallel_size": 2}}]}],),
            {"zero1", "tensor_parallel"},
            2,
        ),
        (
            ([ModelParallelismPlugin(tensor_parallel_size=2, pipeline_parallel_size=2), Zero1Plugin()],),
            {"zero1", "tensor_parallel", "pipeline_parallel"},
            4,
        ),
        (("a", 1, {"b": [None]}), set(), 1),
        (({"plugins": ["no such plugin"]},), set(), 1),
    ],
)
def test_strategies_are_found_among_arguments(arguments, names, size):
    assert strategies_in(arguments) == (names, size)
