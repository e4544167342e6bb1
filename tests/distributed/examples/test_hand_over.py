"""The example that hands weights to a server: it gets what one process has, and no rank holds more than a layer."""

from __future__ import annotations

import runpy
import weakref

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.examples.test_examples import EXAMPLES
from tests.distributed.models import MODELS

SCRIPT = EXAMPLES / "post_training" / "hand_over.py"
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "zero1": (["zero1"], 2, False),
    "tp2": ([TP2], 2, False),
    "pp2": ([{"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}], 2, False),
    "fully-sharded": (["fully_sharded"], 2, False),
    "tp2-fully-sharded": ([TP2, "fully_sharded"], 4, False),
    "zero1-lora": (["zero1"], 2, True),
    "fully-sharded-lora": (["fully_sharded"], 2, True),
}


class Server:
    """What vLLM's models have, with a count of the bytes that it was given and that somebody still holds."""

    def __init__(self):
        self.weights, self.live, self.most = {}, 0, 0

    def load_weights(self, weights):
        for name, tensor in weights:
            size = tensor.nbytes
            self.live += size
            self.most = max(self.most, self.live)
            weakref.finalize(tensor, self._freed, size)
            assert name not in self.weights
            self.weights[name] = tensor.clone()

    def _freed(self, size):
        self.live -= size


def build(lora):
    torch.manual_seed(0)
    model = MODELS["llama"]()
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False))


def hands_over(plugins, lora):
    from neuron_accel import NeuronAccelerator

    stream_weights = runpy.run_path(str(SCRIPT))["stream_weights"]
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = build(lora)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    server, stream = Server(), stream_weights(accelerator, model)
    if accelerator.is_main_process:
        server.load_weights(stream)
    else:
        assert not list(stream)
    return server.weights, server.most, accelerator.get_state_dict(model)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_server_gets_the_weights(composition):
    plugins, ranks, lora = COMPOSITIONS[composition]
    expected = build(lora)
    expected = dict((expected.merge_and_unload() if lora else expected).named_parameters())
    (weights, most, after), *others = run_ranks(hands_over, ranks, plugins, lora)
    assert not any(given for given, _, _ in others)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-6, atol=1e-6, msg=name)
    largest = max(value.nbytes for value in expected.values())
    assert most <= 2 * largest  # the next one is made while the last is still known to the loop
    assert after  # the model goes on
