"""The long test (tests/soak.py) in a few rounds, and that it finds what grows."""

from __future__ import annotations

import dataclasses

import pytest

from tests import soak
from tests.soak import Round

STEADY = Round(executions=0, copies=0, memory=10_000_000, descriptors=18, threads=6, groups=3, graphs=0)


@pytest.mark.timeout(120)
def test_restarts_with_saves_loads_and_evaluations_leave_nothing(tmp_path):
    starts = soak.soak(
        tmp_path, minutes=0, backend="gloo", ranks=2, rounds=7, memory=4 * 2**20, names=["zero1", "fully sharded"]
    )
    assert [start.faults for start in starts] == [[], []]
    assert [len(found) for start in starts for found in start.rounds] == [4] * 4
    assert starts[1].first_step > starts[0].first_step == 0


@pytest.mark.parametrize("name", ["memory", "descriptors", "threads", "groups", "graphs"])
def test_what_grows_is_named(name):
    rounds = [dataclasses.replace(STEADY, **{name: getattr(STEADY, name) + 20_000 * n}) for n in range(20)]
    (fault,) = soak.growth(rounds)
    assert fault.startswith(f"{name} grew from")


def test_what_grows_at_first_only_is_no_fault():
    rounds = [dataclasses.replace(STEADY, memory=STEADY.memory + 500_000 * min(n, 8)) for n in range(20)]
    assert soak.growth(rounds) == []


@pytest.mark.parametrize(("what", "allowance"), [("executions", "per_execution"), ("copies", "per_copy")])
def test_memory_may_grow_as_with_torch_xla_alone(what, allowance):
    alone = [dataclasses.replace(STEADY, memory=10_000_000 + 20_000 * n, **{what: 40 * n}) for n in range(20)]
    assert soak.growth_per(what, alone) == 500
    assert soak.growth(alone, memory=0, **{allowance: 500}) == []
    (fault,) = soak.growth(alone, memory=0, **{allowance: 400})
    assert fault.startswith("memory grew from")


def test_shared_memory_that_others_have_for_a_while_is_no_fault(tmp_path, monkeypatch):
    leftovers, there = soak.Leftovers(tmp_path), set()
    monkeypatch.setattr(leftovers, "_now", lambda: {*leftovers._before, *there})
    monkeypatch.setattr(soak.time, "monotonic", iter(range(0, 1000, 10)).__next__)
    there.add("/dev/shm/of-another-program")
    assert leftovers.found() == []
    there.clear()
    assert leftovers.found() == []
    there.add("/dev/shm/ours")
    assert leftovers.found() == []
    assert leftovers.found() == ["left behind: /dev/shm/ours"] == leftovers.found(last=True)


def test_a_file_that_is_left_is_named(tmp_path):
    leftovers = soak.Leftovers(tmp_path)
    (tmp_path / "part").touch()
    assert leftovers.found() == [f"left behind: {tmp_path / 'part'}"]


def test_a_repeated_step_with_another_loss_is_named():
    losses = soak.Losses()
    assert [*losses.check(1, 2.5), *losses.check(2, 2.25), *losses.check(1, 2.5)] == []
    assert losses.check(2, 2.26) == ["step 2 had loss 2.25, and 2.26 when it was repeated"]
    assert losses.repeated == 2


def test_checkpoints_beyond_those_that_are_kept_are_named(tmp_path):
    for name in ("checkpoint_1", "checkpoint_2", "checkpoint_3", "checkpoint_3.partial", "part"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    found = soak.checkpoints_left(tmp_path)
    assert found[0] == "in the folder of checkpoints: part"
    assert found[1].startswith("4 checkpoints instead of 2")
