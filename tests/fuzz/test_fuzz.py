"""The fuzzer finds what is wrong and takes it apart; and thirty of its cases train like one process."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fuzz.__main__ import main
from tests.fuzz.case import (
    COMPOSITIONS,
    EDITS,
    LOADERS,
    OPTIMIZERS,
    OWN,
    SCHEDULERS,
    TEXT,
    WRAPPERS,
    WRITES,
    Case,
    draw,
    simpler,
)
from tests.fuzz.judge import Verdict, check_file, judge
from tests.fuzz.program import render
from tests.fuzz.report import summary
from tests.fuzz.shrink import shrink

SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_trains_like_one_process(seed):
    verdict = judge(draw(seed))
    assert verdict.kind in ("ok", "vague", "refused"), f"{verdict.detail}\n\n{render(verdict.case)}"


# ---- drawing ---------------------------------------------------------------------------------------------------------
def test_a_seed_is_a_case_and_a_case_a_program():
    for backend in ("gloo", "xla"):
        for seed in range(300):
            case = draw(seed, backend=backend)
            assert case == draw(seed, backend=backend)
            assert eval(case.describe(), {"Case": Case}) == case
            compile(render(case), "program", "exec")


def test_everything_there_is_gets_drawn():
    cases = [draw(seed) for seed in range(4000)]
    assert {case.composition for case in cases} == set(COMPOSITIONS)
    assert {case.optimizer for case in cases} == {*OPTIMIZERS, "LBFGS"}
    assert {case.scheduler for case in cases} == {*SCHEDULERS, ""}
    assert {case.loader for case in cases} == set(LOADERS)
    assert {case.model for case in cases} == {*OWN, *TEXT, "complex"}
    assert {case.edit_by for case in cases} == {"", *EDITS}
    assert {case.write_by for case in cases} == {"", *WRITES}
    assert {case.wraps for case in cases} == {"", *WRAPPERS}
    assert {case.kv_heads for case in cases} == {0, 1, 2, 4}
    on_xla = [draw(seed, backend="xla") for seed in range(2000)]
    assert {case.edit_by for case in on_xla} == {"", *EDITS} - {"numpy"}
    assert {case.write_by for case in on_xla} == {"", *WRITES} - {"numpy"}
    assert {case.wraps for case in on_xla} == {"", *WRAPPERS}
    assert {case.clip_by for case in on_xla} == {"", "torch", "hand"}
    assert {case.second for case in on_xla} == {False, True}
    assert not [case for case in cases if case.wraps.startswith("sam") and "drop" in case.edits + case.edit_by]
    for field in dataclasses.fields(Case):
        if field.name not in ("seed", "backend", "fault"):
            assert len({getattr(case, field.name) for case in cases}) > 1, f"{field.name} is always the same"


# ---- judging ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fault", "kind", "sort"),
    [
        ("ScalesGradients", "failed", "mismatch"),
        ("Trips", "failed", "error KeyError"),
        ("Waits", "failed", "hang"),
        ("Refuses", "refused", "refused PlanError"),
    ],
)
def test_a_fault_is_called_by_its_name(fault, kind, sort):
    verdict = judge(Case(fault=f"tests.fuzz.faults:{fault}", samples=8), seconds=3 if fault == "Waits" else 60)
    assert (verdict.kind, verdict.sort) == (kind, sort), verdict.detail


def test_a_program_that_one_process_cannot_run_is_the_fuzzers_own_fault():
    verdict = judge(Case(composition="one", model="mlp-batch", size=1, samples=1))
    assert verdict.kind == "invalid"
    assert "more than 1 value per channel" in verdict.detail


# ---- taking apart ----------------------------------------------------------------------------------------------------
def test_a_planted_fault_is_shrunk_to_a_small_program_that_runs(tmp_path, capsys):
    case = Case(
        composition="one",
        fault="tests.fuzz.faults:ScalesGradients",
        model="mlp-layer",
        clip="norm",
        scheduler="StepLR",
        samples=8,
    )
    smallest = shrink(judge(case))
    assert smallest.sort == "mismatch"
    assert smallest.case == Case(composition="one", fault=case.fault, samples=1, size=1)
    program = render(smallest.case)
    assert len(program.partition("def train")[2].splitlines()) < 30
    script = tmp_path / "program.py"
    script.write_text(program)
    check_file(str(script))
    assert "failed after" in (told := capsys.readouterr().out)
    assert "not like one process" in told


def test_shrinking_keeps_what_a_failure_needs_and_its_kind():
    def judged(case, seconds):
        wrong = case.accumulation > 1 and case.clip == "norm"
        other = case.samples < 10  # another failure, which is not the one that was looked for
        return Verdict(case, "failed" if wrong or other else "ok", sort="mismatch" if wrong else "error X")

    case = draw(5)
    case = dataclasses.replace(case, accumulation=3, clip="norm", dropout=True, frozen=("first",), samples=24)
    smallest = shrink(judged(case, 1.0), judged=judged)
    assert smallest.case.accumulation == 3
    assert smallest.case.clip == "norm"
    assert smallest.sort == "mismatch"
    assert not smallest.case.dropout
    assert not smallest.case.frozen
    assert smallest.case not in simpler(smallest.case)


def test_the_summary_counts_by_composition_and_reason():
    refused = Verdict(Case(), "refused", "PlanError: no")
    text = summary(
        [refused, refused, Verdict(Case(composition="tp2"), "ok"), Verdict(Case(seed=7), "failed", "x", "hang")]
    )
    assert "    2  PlanError: no" in text
    assert "7  hang: Case(seed=7)" in text
    (row,) = (line for line in text.splitlines() if line.startswith("dp2"))
    assert row.split() == ["dp2", "-", "-", "2", "1", "-"]


def test_a_program_can_be_printed(capsys):
    assert main(["--seed", "3", "--print"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith('"""Case(seed=3')
    assert "def train(accelerator, record):" in printed
