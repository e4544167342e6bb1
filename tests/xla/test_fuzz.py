"""Random training programs on XLA ranks, against one process; more by ``nox -s fuzz -- --backend xla``."""

from __future__ import annotations

import pytest

from tests.fuzz.case import Case, draw
from tests.fuzz.judge import judge
from tests.fuzz.program import render


@pytest.mark.parametrize("seed", [2, 4, 6, 13])
def test_a_random_program_trains_like_one_process(seed):
    verdict = judge(draw(seed, backend="xla"), seconds=110)
    assert verdict.kind == "ok", f"{verdict.detail}\n\n{render(verdict.case)}"


@pytest.mark.parametrize(
    "case",
    [
        Case(backend="xla", optimizer="Adagrad", drop_last=True, samples=8, size=2),
        Case(backend="xla", composition="pp2", model="blocks", drop_last=True, samples=8, size=2),
        Case(backend="xla", optimizer="Adafactor", drop_last=True, samples=8, size=2),
        Case(backend="xla", optimizer="LBFGS", loop="closure", drop_last=True, samples=8, size=2),
        Case(backend="xla", model="mlp-batch", drop_last=True, samples=8, size=2),
        Case(
            backend="xla",
            composition="zero1 x 2",
            optimizer="ASGD",
            save_at=1,
            drop_last=True,
            samples=8,
            size=2,
            epochs=2,
        ),
    ],
    ids=[
        "state from the start",
        "loss inside a pipeline",
        "norms are read",
        "losses are read",
        "running statistics",
        "numbers that are loaded",
    ],
)
def test_what_seeds_have_found(case):
    verdict = judge(case, seconds=110)
    assert verdict.kind == "ok", f"{verdict.detail}\n\n{render(verdict.case)}"
