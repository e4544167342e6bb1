"""Loops like those of Accelerate's examples have the same results with NeuronAccelerator as with Accelerator."""

from __future__ import annotations

import pytest

from neuron_accel.testing import run_ranks
from tests.conformance import loops

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}


def run_loops(plugins, family, folder):
    """The results of every loop, by name; with Accelerate's class if ``plugins`` is None."""
    from neuron_accel import NeuronAccelerator  # settles the device before Accelerate is imported

    from accelerate import Accelerator  # isort: skip

    def make(**options):
        if plugins is None:
            return Accelerator(cpu=True, **options)
        return NeuronAccelerator(cpu=True, config={"plugins": plugins}, **options)

    found = {
        "checkpoints": loops.with_checkpoints(make, family, folder, interrupted=False),
        "resumed": loops.with_checkpoints(make, family, folder, interrupted=True),
        **{loop.__name__: loop(make, family, folder) for loop in loops.LOOPS},
    }
    for name, enabled in (("local sgd", True), ("together", False)):
        found[name] = loops.with_local_sgd(make, family, enabled)
    return found | {"tracking": loops.with_tracking(make, family, folder)}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """What Accelerate's own class does, by model and number of ranks."""
    known = {}

    def run(family, ranks):
        if (family, ranks) not in known:
            folder = str(tmp_path_factory.mktemp("stock"))
            known[family, ranks] = run_ranks(run_loops, ranks, None, family, folder, timeout=100)[0]
        return known[family, ranks]

    return run


def assert_same(found, expected, place=""):
    """Whether results are equal up to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for name, value in expected.items():
            assert_same(found[name], value, f"{place} {name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{place}: {found} instead of {expected}"
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place} {i}")
    else:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4), place


@pytest.mark.parametrize(
    ("plugins", "family", "peers"),
    [([], "bert", 2), (["zero1"], "bert", 2), ([TP2, "zero1"], "llama", 1)],
    ids=["plain", "zero1", "tp2"],
)
def test_loops_of_examples(plugins, family, peers, stock, tmp_path):
    expected = dict(stock(family, peers))
    if plugins:  # none can step alone under ZeRO-1, nor differ where all ranks hold one model
        expected["local sgd"] = expected["together"]
    found = run_ranks(run_loops, 2, plugins, family, str(tmp_path), timeout=100)[0]
    assert_same(found, expected)
    # and an interrupted run is the one that was not
    assert_same(found["resumed"], found["checkpoints"])
    assert found["checkpoints"][1][0][1] == list(range(11))  # every held-out sample once
