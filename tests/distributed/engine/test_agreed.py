"""If work fails on one rank, none continues: each rank's own error is raised unchanged, the others name the rank."""

from __future__ import annotations

import pytest

from neuron_accel import NeuronAccelerator, NeuronAccelError
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError
from neuron_accel.testing import run_ranks


class _Own(Exception):
    """Cannot be pickled and rebuilt: it takes two arguments, and pickle has one."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


ERRORS = {"memory": MemoryError("no memory for a bucket"), "own": _Own("a", "b"), "ours": CheckpointError("A file.")}


def fail_on_rank_1(kind: str) -> tuple[bool, str, str]:
    accelerator = NeuronAccelerator()

    def work() -> int:
        if accelerator.process_index == 1:
            raise ERRORS[kind]
        return accelerator.process_index

    try:
        agreed(accelerator.run, work)
    except Exception as error:
        told = error is ERRORS[kind], type(error).__name__, str(error)
    assert agreed(accelerator.run, lambda: accelerator.process_index) == accelerator.process_index
    return told


@pytest.mark.parametrize(("kind", "name"), [("memory", "MemoryError"), ("own", "_Own")])
def test_an_error_keeps_its_class_and_the_others_name_the_rank(kind, name):
    other, own = run_ranks(fail_on_rank_1, 2, kind)
    assert own[:2] == (True, name)
    assert other[:2] == (False, NeuronAccelError.__name__)
    assert "Rank 1 failed" in other[2]
    assert name in other[2]


def test_an_error_of_this_package_is_the_same_on_every_rank():
    other, own = run_ranks(fail_on_rank_1, 2, "ours")
    assert own == (True, "CheckpointError", "A file.")
    assert other[1:] == own[1:]
