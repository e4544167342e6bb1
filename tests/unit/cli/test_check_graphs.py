"""``precompile --check``: parsing of the training command, errors, and the printed report."""

from __future__ import annotations

import pytest

from neuron_accel.cli.check_graphs import parse_command, show
from neuron_accel.cli.main import main
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron import find_instance
from neuron_accel.neuron.graph_report import check_recorded
from tests.unit.neuron.test_graph_rules import graph_bytes, record


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("neuron-accel launch --nproc-per-node 4 train.py --lr 1", ("train.py", ("--lr", "1"), False, 4)),
        ("/venv/bin/neuron-accel launch --nnodes 2 --nproc-per-node 8 -m pkg.train a", ("pkg.train", ("a",), True, 16)),
        ("torchrun --nproc_per_node=2 --nnodes 2 --rdzv-backend c10d train.py x", ("train.py", ("x",), False, 4)),
        ("torchrun --standalone --nproc-per-node 2 -m pkg", ("pkg", (), True, 2)),
        ("accelerate launch --num_machines 2 --num_processes 8 train.py", ("train.py", (), False, 8)),
        ("python train.py --nproc-per-node 3", ("train.py", ("--nproc-per-node", "3"), False, 1)),
    ],
)
def test_commands_of_launchers_are_understood(words, expected):
    found = parse_command(words.split())
    assert (found.target, found.arguments, found.module, found.ranks) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("./run.sh", "not a supported training command"),
        ("torchrun --nproc-per-node auto train.py", "number of ranks is not known: auto on each of 1 machines"),
        ("neuron-accel launch --nproc-per-node auto train.py", "number of ranks is not known"),
        ("torchrun --nproc-per-node 2", "contains no script"),
    ],
)
def test_others_are_refused_with_the_reason(words, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_command(words.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--instance", "trn1.32xlarge", "--dry-run", "--", "torchrun", "x.py"],
            "--instance has no effect without --check",
        ),
        (["--check", "--", "torchrun", "nothing.py"], "There is no script 'nothing.py'"),
        (["--check", "--steps", "-1", "--", "torchrun", "x.py"], "-1 steps"),
        (
            ["--check", "--instance", "trn1.32xlarge", "--", "torchrun", "--nproc-per-node", "5", "x.py"],
            "5 ranks cannot run",
        ),
    ],
)
def test_wrong_usage_is_answered_before_anything_runs(words, message, capsys):
    assert main(["precompile", *words]) == 2
    assert message in capsys.readouterr().err


def test_findings_are_listed_with_their_rank_graph_operation_and_line(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    record(tmp_path, {"a": graph_bytes(), "b": graph_bytes(constant=2)}, {0: "ab", 1: "ab"})
    text = show(check_recorded(tmp_path, instance=find_instance("trn1.2xlarge")))
    assert all(len(line) <= 80 for line in text.splitlines())
    lines = text.splitlines()
    assert lines[0] == "2 graphs of 2 ranks, checked for trn1.2xlarge"
    assert any(line.split() == ["1", "0-1", "1", "4", "1", "1", "0.0", "MiB"] for line in lines)
    assert "a core has 16 GiB" in text
    assert any(line.split()[:7] == ["1", "error", "constant", "1,", "2", "0-1", "c"] for line in lines)
    assert "/me/train.py:9" in text
    assert text.endswith("1 error, 0 warnings")


def test_without_findings_it_says_so(tmp_path):
    record(tmp_path, {"a": graph_bytes()}, {0: "aa", 1: "aa"})
    assert "no findings" in show(check_recorded(tmp_path))
