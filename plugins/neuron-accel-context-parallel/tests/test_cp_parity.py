"""Training on divided sequences is training on whole ones: five steps; losses, norms, gradients and weights."""

from __future__ import annotations

import cp_models
import pytest
import torch
from neuron_accel_context_parallel import ContextParallelPlugin
from torch.nn import functional as F

from neuron_accel import (
    FullyShardedPlugin,
    ModelParallelismPlugin,
    NeuronAccelerator,
    SequenceParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.testing import Training, assert_parallel_equivalence, run_ranks

CP2, CP4 = ContextParallelPlugin(context_parallel_size=2), ContextParallelPlugin(context_parallel_size=4)
TP2 = ModelParallelismPlugin(tensor_parallel_size=2)
PP2 = ModelParallelismPlugin(pipeline_parallel_size=2, num_microbatches=2)
STEPS = Training(max_norm=0.5)

DIVISIONS = {
    "cp2": ([CP2], 2),
    "cp4": ([CP4], 4),
    "cp2-tp2": ([CP2, TP2], 4),
}
COMPOSITIONS = {
    "cp2-dp2-zero1": ([CP2, Zero1Plugin()], 4),
    "cp2-tp2-sp": ([CP2, TP2, SequenceParallelPlugin()], 4),
    "cp2-pp2": ([CP2, PP2], 4),
}
FAMILIES = {"llama": cp_models.llama, "grouped": cp_models.grouped, "gpt2": cp_models.gpt2}


def check(model, division, data, training=STEPS):
    plugins, ranks = {**DIVISIONS, **COMPOSITIONS}[division]
    assert_parallel_equivalence(model, data, plugins, ranks=ranks, training=training)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_sequences_train_like_whole_ones(family, division):
    check(FAMILIES[family], division, cp_models.batches(5))


@pytest.mark.slow  # the conformance kit composes, too, for fewer steps
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_composes(composition):
    check(cp_models.grouped, composition, cp_models.batches(5, alike=True))


def test_parameters_sharded_over_data_and_context_ranks():
    plugins = [CP2, FullyShardedPlugin()]
    training = Training(max_norm=0.5, accumulation=2)
    data = cp_models.batches(4, alike=True)
    assert_parallel_equivalence(cp_models.grouped, data, plugins, ranks=4, training=training)
    for kept, axes, full in run_ranks(shards, 4, plugins):
        assert axes == {("dp", "cp")}
        assert full / 4 <= kept < full / 4 + 100


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{"hybrid_shard_size": 2}, {"reshard_after_forward": 2}], ids=["hybrid", "near"])
def test_parameters_sharded_in_groups_of_data_and_context_ranks(options):
    plugins = [CP2, FullyShardedPlugin(**options)]
    training = Training(max_norm=0.5, accumulation=2)
    data = cp_models.batches(4, alike=True)
    assert_parallel_equivalence(cp_models.grouped, data, plugins, ranks=8, training=training)


def shards(plugins):
    """Elements of the weights that this rank keeps, axes over which ranks keep the others, and all elements."""
    accelerator = NeuronAccelerator(plugins=plugins)
    model = cp_models.grouped()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weights = [record.weights for record in accelerator.run.models[0].parameters]
    kept = sum(shard.tensor.numel() for shard in weights)
    return kept, {shard.axes for shard in weights}, sum(p.numel() for p in model.parameters())


SLOW = pytest.mark.slow


@pytest.mark.parametrize("division", [pytest.param("cp2", marks=SLOW), pytest.param("cp4", marks=SLOW), "cp2-tp2"])
def test_documents_packed_into_rows_do_not_see_each_other(division):
    check(cp_models.grouped, division, cp_models.packed(5))


LENGTHS = [[5, 9, 8], [1, 12]]
"""Of the documents of each step: they begin and end on another rank than the chunks of a sequence."""


def without_padding(by):
    """Losses and weights of rows of documents, which positions or lengths delimit; ``by`` is None in one process, where
    each is called by itself."""
    accelerator = NeuronAccelerator(plugins=[CP2] if by else [])
    torch.manual_seed(0)
    model = cp_models.grouped()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for step, lengths in enumerate(LENGTHS):
        ids = cp_models.tokens(step, 1, sum(lengths))
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        labels = ids.masked_fill(positions == 0, -100)
        if by is None:
            each = [(model(part).logits[0, :-1], part[0, 1:]) for part in ids.split(lengths, 1) if part.shape[1] > 1]
            loss = F.cross_entropy(*(torch.cat(parts) for parts in zip(*each, strict=True)))
        else:
            ends = F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
            told = {
                "positions": {"position_ids": positions},
                "lengths": {f"cu_seq_lens_{x}": ends for x in "qk"} | {f"max_length_{x}": max(lengths) for x in "qk"},
            }
            loss = model(ids, labels=labels, **told[by]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("by", ["positions", "lengths"])
def test_batches_without_padding_train_as_the_documents_do(by):
    losses, weights = run_ranks(without_padding, 1, None)[0]
    for found, state in run_ranks(without_padding, 2, by):
        assert found == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6, msg=name)


def test_padding_is_not_seen():
    check(cp_models.llama, "cp4", cp_models.padded(5))


def test_packed_in_a_pipeline():
    check(cp_models.llama, "cp2-pp2", cp_models.packed(5))


@pytest.mark.parametrize("data", [pytest.param(cp_models.batches, marks=SLOW), cp_models.padded_and_ignored])
def test_sliding_windows_and_capped_scores(data):
    check(cp_models.windowed, "cp4", data(5))


def test_accumulation_and_recomputed_activations():
    training = Training(max_norm=0.5, accumulation=2, prepare_model=recompute)
    check(cp_models.llama, "cp2-tp2", cp_models.batches(4), training)


def recompute(model) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
