"""On XLA ranks: a loss in chunks trains like one process, in a graph without the logits of all tokens."""

from __future__ import annotations

import re

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import MODELS, token_batches
from tests.xla.hlo import barriers, dots

CHUNKED = {"chunked_loss": {"chunks": 4}}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize("plugins", [["zero1"], [TP2, "sequence_parallel", "zero1"]], ids=["zero1", "tp2-sp-zero1"])
def test_trains_like_one_process(plugins):
    training = Training(max_norm=0.5)
    assert_parallel_equivalence(
        MODELS["llama-tied"],
        token_batches(2),
        [*plugins, CHUNKED],
        ranks=2,
        training=training,
        backend="xla",
        timeout=110,
    )


IDS, LENGTH = 98, 24


def one_step(plugins):
    """Loss and gradients of one step, and its graph."""
    import torch_xla
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": plugins})
    with one_at_a_time():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=IDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
        )
        model = LlamaForCausalLM(config).train()
    model = accelerator.prepare_model(model)
    batch = {name: value.to(accelerator.device) for name, value in token_batches(1, length=LENGTH)[0].items()}
    loss = model(**batch).loss
    accelerator.backward(loss)
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss.detach(), *(parameter.grad for parameter in parameters)])
    accelerator.run.backend.step_boundary()
    found = [loss.detach().cpu(), *(parameter.grad.cpu() for parameter in parameters)]
    accelerator.end_training()
    return found, hlo


@pytest.mark.parametrize("strategies", [[], [TP2]], ids=["dp", "tp"])
def test_no_logits_of_all_tokens_are_in_the_graph(strategies):
    def step(plugins):
        return run_ranks(one_step, 2, plugins, backend="xla", timeout=110)[0]

    plain, full = step(strategies)
    found, chunked = step([*strategies, CHUNKED])
    tokens = token_batches(1, length=LENGTH)[0]["input_ids"].numel()
    width = IDS // 2 if strategies else IDS
    assert max(rows(full, width)) >= tokens
    assert max(rows(chunked, width)) <= max(tokens // 4, 16), "a chunk, or the weight"
    assert barriers(chunked) == 4
    assert dots(chunked) == dots(full) + 3 * 3 + 4, "forward, two gradients of each chunk, and its forward once more"
    for expected, value in zip(plain, found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def rows(hlo, width):
    """Numbers of rows of the tensors in a graph whose last dim is ``width``."""
    shapes = re.findall(rf"f32\[([\d,]+),{width}\]", hlo)
    return [torch.Size(map(int, shape.split(","))).numel() for shape in shapes]
