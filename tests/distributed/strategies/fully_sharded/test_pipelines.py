"""Fully sharded parameters in a pipeline: stages gather once for all micro-batches of a step, and reduce once."""

from __future__ import annotations

import functools

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, llama, token_batches
from tests.distributed.strategies.fully_sharded.values import has_values
from tests.distributed.strategies.pipeline.pipeline_support import pipeline

STAGE_2, STAGE_3 = {"fully_sharded": {}}, {"fully_sharded": {"reshard_after_forward": True}}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
COMPOSITIONS = {
    "1f1b-accumulates": ("llama", [pipeline(2, 4), STAGE_2], 2),
    "layer-norms": ("gpt2", [pipeline(2, 2), STAGE_2], 1),
    "layer-norms-resharded": ("gpt2-tied", [pipeline(2, 2), STAGE_3], 2),
    "zero-bubble-tied": ("gpt2-tied", [pipeline(2, 4, schedule="zero-bubble"), STAGE_2], 1),
    "reshards-and-recomputes": ("llama", [pipeline(2, 2), STAGE_3, "activation_checkpointing"], 2),
    "interleaved": ("llama", [pipeline(2, 2, **INTERLEAVED), STAGE_2], 1),
}
SLOW = {"interleaved"}


@pytest.mark.parametrize(
    "composition", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMPOSITIONS]
)
def test_trains_like_one_process(composition):
    model, plugins, accumulation = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=accumulation)
    model_fn = functools.partial(MODELS[model], blocks=4)
    assert_parallel_equivalence(model_fn, token_batches(2 * accumulation, size=8), plugins, ranks=4, training=training)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", [{"hybrid_shard_size": 2}, {"reshard_after_forward": 2}], ids=["hybrid", "near"])
def test_parameters_sharded_in_groups_of_replicas_of_a_stage(options):
    training = Training(max_norm=0.5, accumulation=2)
    model_fn, plugins = functools.partial(MODELS["llama"], blocks=4), [pipeline(2, 2), {"fully_sharded": options}]
    assert_parallel_equivalence(model_fn, token_batches(4, size=8), plugins, ranks=8, training=training)


def counts(plugins, microbatches, folder=None):
    """The gathers and reduce-scatters of a step, and of an evaluation; which weights have values between steps."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [pipeline(2, microbatches), *plugins]})
    torch.manual_seed(0)
    model = llama(blocks=4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    found = []
    for batch in token_batches(2, size=8):
        own = {name: value.chunk(size)[rank] for name, value in batch.items()}
        with accelerator.run.backend.record() as traffic:
            accelerator.backward(model(**own).loss)
            optimizer.step()
            optimizer.zero_grad()
    found += [traffic.count(op="all_gather"), traffic.count(op="reduce_scatter")]
    with accelerator.run.backend.record() as traffic, torch.no_grad():
        model(**own)
    found.append(traffic.count(op="all_gather"))
    empty = not any(map(has_values, model.parameters()))
    if folder is not None:
        accelerator.save_state(folder)
    weights = accelerator.get_state_dict(model)
    return tuple(found), empty, weights


def test_gathered_once_for_all_microbatches(tmp_path):
    of_four = run_ranks(counts, 4, [STAGE_2], 4, str(tmp_path / "c"))
    # two blocks, and what is in no block; all of these once in a step, and once to evaluate
    assert [(found, empty) for found, empty, _ in of_four] == [((3, 3, 3), True)] * 4
    of_two = run_ranks(counts, 4, [STAGE_3], 2)
    assert [found for found, _, _ in of_two] == [(9, 3, 5)] * 4, "each block in each pass of a micro-batch"
    for name, value in of_four[0][2].items():
        torch.testing.assert_close(of_two[0][2][name], value, rtol=1e-5, atol=1e-6, msg=name)


def uneven(plugins):
    """The replica of the first pipeline has a batch more than the other."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [pipeline(2, 2), *plugins]})
    torch.manual_seed(0)
    model = llama(blocks=4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch in token_batches(3, size=8)[: 3 - rank]:
            accelerator.backward(model(**{name: value.chunk(size)[rank] for name, value in batch.items()}).loss)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [STAGE_2, STAGE_3], ids=["stage 2", "stage 3"])
def test_uneven_inputs(plugin):
    expected, found = run_ranks(uneven, 4, ["zero1"])[0], run_ranks(uneven, 4, [plugin])[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8, msg=name)


def casted(plugins):
    """Losses and weights of training under autocast."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [pipeline(2, 2), *plugins]}, mixed_precision="bf16")
    torch.manual_seed(0)
    model = llama(blocks=4)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    losses = []
    for batch in token_batches(3, size=8):
        loss = model(**{name: value.chunk(size)[rank] for name, value in batch.items()}).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("plugin", [STAGE_2, STAGE_3], ids=["stage 2", "stage 3"])
def test_autocast_is_that_of_zero1(plugin):
    """All micro-batches run in one autocast context, whose cache of casted weights would join their backward passes."""
    (losses, expected), (own, found) = run_ranks(casted, 4, ["zero1"])[0], run_ranks(casted, 4, [plugin])[0]
    assert own == pytest.approx(losses, rel=1e-3)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=2e-4, msg=name)


# ---- further families ------------------------------------------------------------------------------------------------
def bloom():
    """The first operation of a block is a layer norm, whose gradients are computed at once."""
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.1))


def olmo2():
    """The first operations of a block are linear layers."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return Olmo2ForCausalLM(Olmo2Config(**sizes, num_hidden_layers=2, initializer_range=0.1))


@pytest.mark.parametrize(("model_fn", "plugin"), [(bloom, STAGE_2), (olmo2, STAGE_3)])
def test_blocks_whose_first_parameters_arrive_with_the_gradient_of_the_input(model_fn, plugin):
    training = Training(max_norm=0.5)
    assert_parallel_equivalence(model_fn, token_batches(2), [pipeline(2, 2), plugin], ranks=4, training=training)
