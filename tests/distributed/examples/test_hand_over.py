"""The example that hands weights to a server: it gets what one process has, and no rank holds more than a layer."""

from __future__ import annotations

import runpy
import weakref
from collections import Counter

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuron_accel.testing import run_ranks
from tests.distributed.examples.test_examples import EXAMPLES
from tests.distributed.models import MODELS
from tests.guests import is_installed

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
            self.weights[name] = tensor.detach().numpy().copy()  # not counted by Allocations

    def _freed(self, size):
        self.live -= size


class Allocations(TorchDispatchMode):
    """The most bytes that this rank has at once beside those at the beginning: of tensors that it makes, those of
    collectives included, and of parameters whose memory grows."""

    def __init__(self, parameters):
        super().__init__()
        self.most, self._made = 0, {}
        self._parameters = list(parameters)
        self._before = self._kept()

    def _kept(self):
        storages = [parameter.untyped_storage() for parameter in self._parameters]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _is_tensor(tensor)}
        made = func(*args, **kwargs or {})
        self._made = {key: kept for key, kept in self._made.items() if not kept[0].expired()}
        for storage in (tensor.untyped_storage() for tensor in tree_leaves(made) if _is_tensor(tensor)):
            if storage._cdata not in known:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        now = sum(size for _, size in self._made.values()) + self._kept() - self._before
        self.most = max(self.most, now)
        return made


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


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
    server, stream, made = Server(), stream_weights(accelerator, model), Allocations(model.parameters())
    with made:
        if accelerator.is_main_process:
            server.load_weights(stream)
        else:
            assert not list(stream)
    weights = {name: torch.from_numpy(value) for name, value in server.weights.items()}
    return weights, server.most, made.most, accelerator.get_state_dict(model)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_server_gets_the_weights(composition):
    plugins, ranks, lora = COMPOSITIONS[composition]
    expected = build(lora)
    expected = dict((expected.merge_and_unload() if lora else expected).named_parameters())
    (weights, most, at_once, after), *others = run_ranks(hands_over, ranks, plugins, lora)
    assert not any(given for given, *_ in others)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=1e-6, atol=1e-6, msg=name)
    largest = max(value.nbytes for value in expected.values())
    assert most <= 2 * largest  # the next one is made while the last is still known to the loop
    assert after  # the model goes on
    layers = Counter()
    for name, value in expected.items():
        layers[name.partition(".layers.")[2].partition(".")[0]] += value.nbytes
    bound = max(layers.values()) + 2 * largest  # a layer, and of it one weight with its copy for the server
    assert bound < sum(layers.values())
    assert max(at_once, *(bytes_of_rank for _, _, bytes_of_rank, _ in others)) <= bound


def mixture():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "moe_intermediate_size": 8, "head_dim": 8, "vocab_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))


def hands_over_experts():
    from neuron_accel import NeuronAccelerator

    stream_weights = runpy.run_path(str(SCRIPT))["stream_weights"]
    accelerator = NeuronAccelerator(config={"plugins": [{"expert_parallel": {"expert_parallel_size": 2}}]})
    model = mixture()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    return {name: value.clone() for name, value in stream_weights(accelerator, model)}


def test_a_server_gets_experts_under_their_published_names(tmp_path):
    if not is_installed("neuron-accel-expert-parallel"):
        pytest.skip("neuron-accel-expert-parallel is not installed")
    from safetensors.torch import load_file

    mixture().save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    weights, nothing = run_ranks(hands_over_experts, 2)
    assert not nothing
    assert weights.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(weights[name], value)] == []
