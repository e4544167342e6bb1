"""Hooks of the user where sequence parallelism shards what they see."""

from __future__ import annotations

import functools

import torch

from neuron_accel.errors import UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.models import llama

SHARDED = ["model.layers.0", "model.layers.1.mlp", "model.layers.0.input_layernorm", "model.layers.1.self_attn.o_proj"]
KINDS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
INPUTS = {"input_ids": torch.arange(16)[None]}


def looks(seen: list[int], module, args, output=None) -> None:
    value = args if output is None else output
    while isinstance(value, tuple):
        value = value[0]
    seen.append(value.shape[1])


def refusal(model) -> str:
    try:
        model(**INPUTS)
    except UsageError as error:
        return str(error)
    return ""


def hooks_on_rank():
    from neuron_accel import NeuronAccelerator, SequenceParallelPlugin, TensorParallelPlugin

    def start(**options):
        return NeuronAccelerator(
            plugins=[TensorParallelPlugin(tensor_parallel_size=2), SequenceParallelPlugin(**options)]
        )

    found = {}
    for when in ("before", "after"):
        model = llama()
        hook = functools.partial(looks, [])
        if when == "before":
            handle = model.model.norm.register_forward_hook(hook)
        model = start().prepare(model)
        if when == "after":
            found["none"] = refusal(model)
            handle = model.model.norm.register_forward_hook(hook)
        found[when] = refusal(model)
        handle.remove()
        found["removed"] = refusal(model)
    for name in SHARDED:
        for kind in KINDS if name == SHARDED[0] else KINDS[:1]:
            handle = getattr(model.get_submodule(name), kind)(hook)
            found[name, kind] = refusal(model)
            handle.remove()
    full, shards = [], []
    for inside in ("model", "lm_head", "model.layers.0.self_attn.q_proj", "model.embed_tokens"):
        model.get_submodule(inside).register_forward_pre_hook(lambda *_: None)
    model.lm_head.register_forward_pre_hook(functools.partial(looks, full))
    found["elsewhere"] = refusal(model)
    model = start(hooks_on_shards=True).prepare(llama())
    model.model.layers[0].register_forward_hook(functools.partial(looks, shards))
    found["allowed"] = refusal(model)
    return found, full, shards


def test_a_hook_that_would_see_a_shard_of_the_sequence_is_refused_unless_it_asks_for_it():
    for found, full, shards in run_ranks(hooks_on_rank, 2):
        for name in ("none", "removed", "elsewhere", "allowed"):
            assert found.pop(name) == ""
        assert len(found) == 2 + len(SHARDED) + len(KINDS) - 1
        for key, text in found.items():
            name = key[0] if isinstance(key, tuple) else "model.norm"
            assert f"A hook on '{name}' would be called with a shard of the sequence." in text
            assert "hooks_on_shards=True" in text
        assert (full, shards) == ([16], [8])
