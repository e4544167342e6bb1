"""Vision, speech, translation, images with text, diffusion: the loop of Accelerate's and diffusers' scripts with the
class swapped equals the one with Accelerate's class in one process."""

from __future__ import annotations

import functools

import pytest
import torch

from neuron_accel.errors import UnsupportedModelError
from neuron_accel.testing import run_ranks
from tests.distributed.beyond_text.tasks import TASKS, train

TP2 = [{"model_parallelism": {"tensor_parallel_size": 2}}]
COMPOSITIONS = {"plain": [], "zero1": ["zero1"], "fully-sharded": ["fully_sharded"], "tp2": TP2}
CASES = [(task, name) for task in TASKS for name in COMPOSITIONS if name != "tp2" or task not in ("unet", "dit")]


@functools.cache
def stock(task):
    return run_ranks(train, 1, task, backend=None)[0]


def plugins(task, composition):
    blocks = TASKS[task].blocks
    named = [{"fully_sharded": {"modules": list(blocks)}}]
    return named if blocks and composition == "fully-sharded" else COMPOSITIONS[composition]


@pytest.mark.parametrize(("task", "composition"), CASES)
def test_the_loop_with_the_class_swapped(task, composition):
    losses, weights = stock(task)
    ranks = run_ranks(train, 2, task, plugins(task, composition))
    assert [found for found, _ in ranks] == [pytest.approx(losses, rel=1e-5)] * 2
    for kind, expected in weights.items():
        found = ranks[0][1][kind]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5, msg=f"{kind}: {name}")


def refused(task):
    found = []
    for given in (TP2, ["fully_sharded"]):
        with pytest.raises(UnsupportedModelError) as caught:
            train(task, given)
        found.append(str(caught.value))
    return found


def test_what_has_no_plan_is_refused_before_it_trains():
    """Models of diffusers: tensor parallelism, and fully sharded without a pattern for their blocks."""
    for no_plan, no_blocks in run_ranks(refused, 2, "dit"):
        assert "No plan is known" in no_plan
        assert "name them by a pattern" in no_blocks
