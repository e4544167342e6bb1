"""On XLA ranks: attention in blocks trains like one process, and its graph has no scores of the whole sequence."""

from __future__ import annotations

import re

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import MODELS, token_batches
from tests.xla.hlo import barriers, dots

FLASH = {"flash_attention": {"block_size": 5}}
CORE = {"activation_checkpointing": {"modules": "core_attention"}}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "zero1-core": (["zero1", CORE], 2),
    "tp2-sp-zero1": ([TP2, "sequence_parallel", "zero1", FLASH], 2),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    plugins, ranks = COMPOSITIONS[composition]
    assert_parallel_equivalence(
        MODELS["llama-tied"],
        token_batches(2),
        plugins,
        ranks=ranks,
        training=Training(max_norm=0.5),
        backend="xla",
        timeout=110,
    )


LENGTH, HEADS, BLOCK = 40, 2, 20


def one_step(plugins):
    """Gradients of one step of a model with dropout in its attention, and its graph."""
    import torch_xla
    from transformers import GPT2Config, GPT2LMHeadModel

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins})
    with one_at_a_time():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=32, n_positions=64, n_embd=16, n_layer=2, n_head=HEADS, resid_pdrop=0)
        model = GPT2LMHeadModel._from_config(config, attn_implementation="eager").train()
    model = accelerator.prepare_model(model)
    accelerator.run.backend.generator.seed(1)
    batch = {
        name: value.to(accelerator.device) for name, value in token_batches(1, length=LENGTH, vocabulary=32)[0].items()
    }
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    loss = model(**batch).loss
    accelerator.backward(loss)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss.detach(), *(parameter.grad for parameter in parameters)])
    accelerator.run.backend.step_boundary()
    found = [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in parameters)]
    accelerator.end_training()
    return found, hlo


def test_no_scores_of_the_whole_sequence_are_in_the_graph():
    plain, scores = run_ranks(one_step, 2, [], backend="xla", timeout=110)[0]
    core, recomputed = run_ranks(one_step, 2, [CORE], backend="xla", timeout=110)[0]
    found, blocks = run_ranks(one_step, 2, [{"flash_attention": {"block_size": BLOCK}}], backend="xla", timeout=110)[0]
    square = re.compile(rf"f32\[[\d,]*{LENGTH},{LENGTH}\]")
    assert square.search(scores)
    assert not square.search(blocks)
    assert re.search(rf"f32\[[\d,]*{BLOCK},{LENGTH}\]", blocks), "the last block sees every key"
    assert (barriers(recomputed), barriers(blocks)) == (2, 2 * LENGTH // BLOCK)
    assert dots(recomputed) == dots(scores) + 2, "the scores of each layer, once more"
    for expected, value in zip(plain, core, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(value).all() for value in found)
