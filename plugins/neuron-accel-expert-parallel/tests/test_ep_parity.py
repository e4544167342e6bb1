"""Training with experts on several ranks is training in one process: losses, norms, gradients and weights."""

from __future__ import annotations

import functools

import ep_models
import pytest
import torch
from neuron_accel_expert_parallel import ExpertParallelPlugin

from neuron_accel import (
    ActivationCheckpointingPlugin,
    FullyShardedPlugin,
    NeuronAccelerator,
    SequenceParallelPlugin,
    TensorParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.testing import Training, assert_parallel_equivalence, run_ranks

EP2 = ExpertParallelPlugin(expert_parallel_size=2)
TP2 = TensorParallelPlugin(tensor_parallel_size=2)
STEPS = Training(max_norm=0.5)
LAYOUTS = {
    "ep2": ([EP2], 2),
    "ep2-tp2": ([EP2, TP2], 4),
    "ep2-dp2-zero1": ([EP2, Zero1Plugin()], 4),
    "ep4": ([ExpertParallelPlugin(expert_parallel_size=4)], 4),
}
SLOW = pytest.mark.slow
FAST = {("mixtral", "ep2"), ("mixtral", "ep4"), ("qwen2_moe", "ep2-tp2"), ("llama4_text", "ep2-tp2")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in FAST else SLOW, id=f"{family}-{layout}")
        for family in ep_models.FAMILIES
        for layout in LAYOUTS
    ],
)
def test_trains_like_one_process(family, layout):
    plugins, ranks = LAYOUTS[layout]
    model = functools.partial(ep_models.build, family)
    assert_parallel_equivalence(model, ep_models.batches(3), plugins, ranks=ranks, training=STEPS)


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ([FullyShardedPlugin()], 4),
        pytest.param([FullyShardedPlugin()], 2, marks=SLOW),  # experts are then on one rank each, and not gathered
        pytest.param([FullyShardedPlugin(reshard_after_forward=False)], 4, marks=SLOW),
        pytest.param([FullyShardedPlugin(persistence_threshold=100, use_grad_acc_hook=True)], 4, marks=SLOW),
        pytest.param([FullyShardedPlugin(), ActivationCheckpointingPlugin()], 4, marks=SLOW),
        pytest.param([FullyShardedPlugin(), TP2], 8, marks=SLOW),
        pytest.param([FullyShardedPlugin(hybrid_shard_size=2)], 8, marks=SLOW),
        pytest.param([FullyShardedPlugin(reshard_after_forward=2)], 8, marks=SLOW),
    ],
    ids=["stage3", "stage3-dp1", "stage2", "keeps-small", "recomputes", "tp2", "hybrid", "resharded-in-groups"],
)
def test_beside_fully_sharded_parameters(others, ranks):
    training = Training(max_norm=0.5, accumulation=2)
    data = ep_models.batches(4, size=max(4, ranks))
    assert_parallel_equivalence(ep_models.mixtral, data, [EP2, *others], ranks=ranks, training=training)


def test_beside_data_parallel_ranks_and_zero1():
    training = Training(max_norm=0.5, accumulation=2)
    assert_parallel_equivalence(
        ep_models.mixtral, ep_models.batches(4), [EP2, Zero1Plugin()], ranks=4, training=training
    )


@pytest.mark.parametrize(
    ("data", "others"),
    [
        pytest.param(ep_models.batches, [], marks=SLOW),
        (ep_models.padded, []),
        pytest.param(ep_models.padded, [TP2], marks=SLOW),
        (ep_models.padded, [TP2, SequenceParallelPlugin()]),
    ],
    ids=["plain", "padded", "padded-tp2", "padded-sequence"],
)
def test_the_load_balancing_loss_is_that_of_all_tokens(data, others):
    assert_parallel_equivalence(ep_models.balanced, data(3), [EP2, *others], ranks=4, training=STEPS)


def sgd(parameters):
    """Momentum and decay: what a parameter without a gradient is spared."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("favourite", [0, pytest.param(3, marks=SLOW)])
def test_all_tokens_go_to_one_expert(favourite):
    plugin = ExpertParallelPlugin(expert_parallel_size=2, experts=("moe",))
    model = functools.partial(ep_models.OneForAll, favourite)
    assert_parallel_equivalence(model, ep_models.vectors(3), [plugin], training=Training(optimizer=sgd))


# ---- documents in a row ----------------------------------------------------------------------------------------------
def test_packed_documents_train_as_the_documents_do():
    model = ep_models.qwen3
    data, reference = ep_models.packed(2), ep_models.one_by_one
    assert_parallel_equivalence(model, data, [EP2], ranks=2, training=STEPS, reference=reference)


def without_padding(expert_parallel):
    """Losses and weights of rows of documents: one for each rank, or in one process each document by itself."""
    accelerator = NeuronAccelerator(plugins=[EP2] if expert_parallel else [])
    torch.manual_seed(0)
    model = ep_models.qwen3()
    model = model if expert_parallel else ep_models.one_by_one(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for rows in ep_models.without_padding(2):
        mine = [rows[accelerator.data_parallel_rank]] if expert_parallel else rows
        found = [model(**row).loss if expert_parallel else model(**row) for row in mine]
        loss = sum(found) / len(found)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_batches_without_padding_train_as_the_documents_do():
    """Ranks have other numbers of documents and of tokens."""
    losses, weights = run_ranks(without_padding, 1, False)[0]
    for found, state in run_ranks(without_padding, 2, True):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6, msg=name)
