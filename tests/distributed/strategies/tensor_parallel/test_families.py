"""Families of transformers divided by transformers' own plans, against themselves in one process."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from neuron_accel.engine.sharding.product_hooks import register_product_hook
from neuron_accel.errors import LayoutError
from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import (
    batch,
    compare_step,
    make_run,
    shard,
)
from tests.sweeps.tiny import tiny_model

DIVERSE = (
    "cohere", "exaone4", "gemma2", "gemma3_text", "glm4", "granite", "olmo2", "phi", "phi3", "starcoder2",
    "mixtral", "qwen2_moe", "qwen3_next", "bloom", "gpt_neox", "bert", "bart", "codegen", "falcon", "mpt", "lfm2",
    "apertus", "granite_swa", "deepseek_v2", "gpt_oss", "opt", "gpt_neo", "granitemoehybrid", "afmoe",
    "qwen3_5_text", "kimi_linear", "deepseek_v32", "llama4_text", "longcat_flash",
    "diffllama",
)  # fmt: skip
WITHOUT_SEQUENCE = ("gemma4_text",)

_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_TWELVE = {"hidden_size": 96, "num_attention_heads": 12, "head_dim": 8}

VARIANTS = {
    "bigcode, multi-query": ("gpt_bigcode", {"multi_query": True}),
    "bigcode, multi-query, five heads": ("gpt_bigcode", {"multi_query": True, "n_embd": 40, "n_head": 5}),
    "falcon, multi-query": ("falcon", {"new_decoder_architecture": False, "multi_query": True, "bias": True}),
    "falcon, many heads": ("falcon", {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None}),
    "falcon, ALiBi": (
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None, "alibi": True},
    ),
    "olmo hybrid, values wider than keys": ("olmo_hybrid", {"linear_value_head_dim": 16}),
    "phi3, twelve heads that six share": ("phi3", {**_TWELVE, "num_key_value_heads": 6}),
    "olmo2, twelve heads that six share": ("olmo2", {**_TWELVE, "num_key_value_heads": 6}),
    "olmo2, six heads": ("olmo2", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6}),
    "falcon, biases": ("falcon", {"bias": True}),
    "codegen, groups of six heads": (
        "codegen",
        {"n_embd": 96, "hidden_size": 96, "n_head": 24, "num_attention_heads": 24, "rotary_dim": 4},
    ),
    "diffllama, six pairs": ("diffllama", {**_TWELVE, "num_key_value_heads": 12}),
    "diffllama, six pairs that two pairs read": (
        "diffllama",
        {**_TWELVE, "num_attention_heads": 24, "head_dim": 4, "num_key_value_heads": 12},
    ),
    "diffllama, two pairs that four pairs read": (
        "diffllama",
        {"hidden_size": 64, "num_attention_heads": 16, "head_dim": 4, "num_key_value_heads": 4},
    ),
    **{f"{name}, balanced": (name, _BALANCED) for name in ("mixtral", "gpt_oss", "granitemoehybrid")},
    "bitnet, features padded": ("bitnet", {"intermediate_size": 45, **_TWELVE, "num_key_value_heads": 6}),
}

UNEVEN = (
    "phi3", "phi3, twelve heads that six share", "olmo2", "olmo2, twelve heads that six share", "olmo2, six heads",
    "olmoe", "falcon", "falcon, biases", "bitnet", "bitnet, features padded",
    "codegen, groups of six heads", "diffllama, six pairs", "diffllama, six pairs that two pairs read",
    "diffllama, two pairs that four pairs read",
)  # fmt: skip
"""Models whose heads or features are not divisible by four, or that have two key/value heads."""


SEQ2SEQ = "sequences to sequences"


def _families(names: list[str], degree: int, options: dict[str, Any]) -> dict[str, Any]:
    """Losses and the largest difference of gradients of one step; what it raised if it did."""
    results = {}
    for name in names:
        model_type, sizes = VARIANTS.get(name, (name, {}))
        try:
            results[name] = compare_step(tiny_model(model_type, **sizes), batch(7), degree=degree, **options)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    return results


def _check(results: list[dict[str, Any]]) -> None:
    for result in results:
        for name, found in result.items():
            assert isinstance(found, dict), (name, found)
            assert found["loss"] == pytest.approx(found["expected"], rel=1e-5), (name, found)
            assert found["error"] < 1e-4, (name, found)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_loss_and_gradients(sequence_parallel: bool) -> None:
    options = {"sequence_parallel": sequence_parallel}
    even = [name for name in VARIANTS if name not in UNEVEN]
    families = [*DIVERSE, *even, *(() if sequence_parallel else WITHOUT_SEQUENCE)]
    _check(run_ranks(_families, 2, families, 2, options, timeout=150))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fused_heads_and_norms_over_all_heads_that_do_not_divide(sequence_parallel: bool) -> None:
    """Each rank computes whole heads with the key/value heads that they read, which neighbouring ranks share."""
    options = {"sequence_parallel": sequence_parallel}
    _check(run_ranks(_families, 4, list(UNEVEN), 4, options, timeout=100))


def _attentions(name: str) -> float:
    """How far attention weights of all heads, in the order of the model, are from those of one process."""
    model_type, sizes = VARIANTS.get(name, (name, {}))
    model = tiny_model(model_type, **sizes, attn_implementation="eager").eval()
    inputs = batch(7)["input_ids"]
    expected = model(inputs, output_attentions=True).attentions
    shard(model, make_run(degree=int(os.environ["WORLD_SIZE"])))
    actual = model(inputs, output_attentions=True).attentions
    return max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("codegen", 2), ("diffllama", 2), ("codegen, groups of six heads", 4), ("diffllama, six pairs", 4)],
)
def test_attention_weights_are_in_the_order_of_the_model(name: str, ranks: int) -> None:
    assert max(run_ranks(_attentions, ranks, name)) < 1e-5  # heads in another order differ by 1e-2 and more


def _attentions_of_both() -> float:
    """As above, of encoder, decoder and what one reads of the other; heads that are padded have biases, too."""
    model = tiny_model("t5", SEQ2SEQ, num_heads=6, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    given = {name: torch.randint(3, 101, (2, 7), generator=generator) for name in ("input_ids", "decoder_input_ids")}
    fields = ("encoder_attentions", "decoder_attentions", "cross_attentions")
    expected = model(**given, output_attentions=True)
    shard(model, make_run(degree=4))
    actual = model(**given, output_attentions=True)
    pairs = [pair for name in fields for pair in zip(actual[name], expected[name], strict=True)]
    assert len(pairs) == 6
    return max(float((a - b).abs().max()) for a, b in [*pairs, (actual.logits, expected.logits)])


def test_attention_weights_of_encoder_and_decoder() -> None:
    assert max(run_ranks(_attentions_of_both, 4)) < 1e-4


def _refused(name: str, heads: int) -> str:
    try:
        shard(tiny_model(name, num_attention_heads=heads, num_key_value_heads=heads), make_run(degree=4))
    except LayoutError as error:
        return str(error)
    return "sharded"


@pytest.mark.parametrize(
    ("name", "heads", "groups"), [("codegen", 8, "4 groups of 2"), ("diffllama", 4, "2 groups of 2")]
)
def test_fewer_heads_in_a_group_than_ranks_are_refused(name: str, heads: int, groups: str) -> None:
    for error in run_ranks(_refused, 4, name, heads):
        assert f"lays heads out in {groups}, of each of which every rank computes some" in error
        assert "choose tensor_parallel_size from: 1, 2" in error


def _hooked() -> bool:
    """Whether what a hook adds to all features of a projection arrives at those of this rank."""
    model = tiny_model("phi3").eval()
    shard(model, make_run(degree=4))
    projection = model.model.layers[0].self_attn.qkv_proj
    x, added = torch.randn(2, 3, 32), torch.arange(projection.weight.shape[0], dtype=torch.float32)
    before = projection(x)
    handle = register_product_hook(projection, lambda layer, args, product: product + added)
    own = (projection(x) - before)[0, 0].round().int().tolist()
    handle.remove()
    index = int(os.environ["RANK"])
    query, group = list(range(8 * index, 8 * index + 8)), 8 * (index // 2)
    expected = [*query, *range(32 + group, 40 + group), *range(48 + group, 56 + group)]
    return own == expected and torch.equal(projection(x), before)


def test_a_hook_on_a_replicated_projection_receives_all_features() -> None:
    assert all(run_ranks(_hooked, 4))
