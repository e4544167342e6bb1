"""Vision, speech, translation, images with text, diffusion: the loop of Accelerate's and diffusers' scripts with the
class swapped equals the one with Accelerate's class in one process."""

from __future__ import annotations

import functools

import pytest
import torch

from neuron_accel.errors import UnsupportedModelError
from neuron_accel.testing import run_ranks
from tests.distributed.beyond_text.tasks import TASKS, train

COMPOSITIONS = {"plain": [], "zero1": ["zero1"], "fully-sharded": ["fully_sharded"]}


@functools.cache
def stock(task):
    return run_ranks(train, 1, task, backend=None)[0]


def plugins(task, composition):
    blocks = TASKS[task].blocks
    named = [{"fully_sharded": {"modules": list(blocks)}}]
    return named if blocks and composition == "fully-sharded" else COMPOSITIONS[composition]


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("task", TASKS)
def test_the_loop_with_the_class_swapped(task, composition):
    losses, weights = stock(task)
    ranks = run_ranks(train, 2, task, plugins(task, composition))
    assert [found for found, _ in ranks] == [pytest.approx(losses, rel=1e-5)] * 2
    found = ranks[0][1]
    assert found.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5, msg=name)


def refused(task):
    found = []
    for given in (
        [{"model_parallelism": {"tensor_parallel_size": 2}}],
        *([["fully_sharded"]] if TASKS[task].blocks else []),
    ):
        with pytest.raises(UnsupportedModelError) as caught:
            train(task, given)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize("task", ["whisper", "dit"])
def test_what_has_no_plan_is_refused_before_it_trains(task):
    """Tensor parallelism of these models, and whole models of diffusers without a pattern for their blocks."""
    for errors in run_ranks(refused, 2, task):
        assert "No plan is known" in errors[0]
        assert all("name them by a pattern" in error for error in errors[1:])
