"""Families of transformers divided by transformers' own plans, against themselves in one process."""

from __future__ import annotations

from typing import Any

import pytest

from neuron_accel.testing.ranks import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import batch, compare_step
from tests.sweeps.tiny import tiny_model

DIVERSE = (
    "cohere", "exaone4", "gemma2", "gemma3_text", "glm4", "granite", "olmo2", "phi", "phi3", "starcoder2",
    "mixtral", "qwen2_moe", "qwen3_next", "bloom", "gpt_neox", "bert", "bart", "codegen", "falcon", "mpt", "lfm2",
    "apertus", "granite_swa", "deepseek_v2", "gpt_oss", "opt", "gpt_neo", "granitemoehybrid", "afmoe",
    "qwen3_5_text", "kimi_linear", "deepseek_v32", "llama4_text", "longcat_flash",
)  # fmt: skip
WITHOUT_SEQUENCE = ("gemma4_text",)

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
}


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
    families = [*DIVERSE, *VARIANTS, *(() if sequence_parallel else WITHOUT_SEQUENCE)]
    _check(run_ranks(_families, 2, families, 2, options, timeout=150))
