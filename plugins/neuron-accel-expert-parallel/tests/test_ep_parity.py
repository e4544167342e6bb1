"""Training with experts on several ranks is training in one process: losses, norms, gradients and weights."""

from __future__ import annotations

import functools

import ep_models
import pytest
import torch
from neuron_accel_expert_parallel import ExpertParallelPlugin

from neuron_accel import Zero1Plugin
from neuron_accel.testing import Training, assert_parallel_equivalence

EP2 = ExpertParallelPlugin(expert_parallel_size=2)
STEPS = Training(max_norm=0.5)
REST = sorted(ep_models.FAMILIES.keys() - {"mixtral", "qwen2_moe"})  # test_ep_use has a step of each


SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", *(pytest.param(f, marks=SLOW) for f in REST)])
def test_trains_like_one_process(family):
    model = functools.partial(ep_models.build, family)
    assert_parallel_equivalence(model, ep_models.batches(3), [EP2], training=STEPS)


def test_beside_data_parallel_ranks_and_zero1():
    training = Training(max_norm=0.5, accumulation=2)
    assert_parallel_equivalence(
        ep_models.mixtral, ep_models.batches(4), [EP2, Zero1Plugin()], ranks=4, training=training
    )


def test_four_ranks_hold_one_expert_each():
    plugin = ExpertParallelPlugin(expert_parallel_size=4)
    assert_parallel_equivalence(ep_models.mixtral, ep_models.batches(3), [plugin], training=STEPS)


@pytest.mark.parametrize("data", [pytest.param(ep_models.batches, marks=SLOW), ep_models.padded])
def test_the_load_balancing_loss_is_that_of_all_tokens(data):
    assert_parallel_equivalence(ep_models.balanced, data(3), [EP2], ranks=4, training=STEPS)


def sgd(parameters):
    """Momentum and decay: what a parameter without a gradient is spared."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("favourite", [0, pytest.param(3, marks=SLOW)])
def test_all_tokens_go_to_one_expert(favourite):
    plugin = ExpertParallelPlugin(expert_parallel_size=2, experts=("moe",))
    model = functools.partial(ep_models.OneForAll, favourite)
    assert_parallel_equivalence(model, ep_models.vectors(3), [plugin], training=Training(optimizer=sgd))
