# SPDX-License-Identifier: Apache-2.0
"""Decoders of encoder-decoder models, used alone: learned or fixed positions, biases in all layers."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, Style, colwise, rowwise

_HEADS = "decoder_attention_heads"


def _styles(layer: str, heads: str) -> dict[str, Style]:
    return {
        f"{layer}.self_attn.q_proj": colwise(units=heads),
        f"{layer}.self_attn.k_proj": colwise(units=heads),
        f"{layer}.self_attn.v_proj": colwise(units=heads),
        f"{layer}.self_attn.out_proj": rowwise(units=heads),
        f"{layer}.fc1": colwise(),
        f"{layer}.fc2": rowwise(),
    }


BART = ArchitecturePlan(
    model_types=("bart", "bigbird_pegasus", "blenderbot-small", "marian", "mvp", "plbart"),
    blocks="decoder.layers.*",
    token_embedding="decoder.embed_tokens",
    final_norm="",
    regions=("decoder.layers.*.self_attn", "decoder.layers.*.fc1"),
    styles=_styles("decoder.layers.*", _HEADS),
    heads=_HEADS,
    per_rank={"decoder.layers.*.self_attn": {"num_heads": _HEADS, "embed_dim": _HEADS}},
)

MBART = replace(BART, model_types=("mbart", "pegasus", "blenderbot"), final_norm="decoder.layer_norm")

BIOGPT = replace(
    BART,
    model_types=("biogpt",),
    blocks="layers.*",
    token_embedding="embed_tokens",
    final_norm="layer_norm",
    regions=("layers.*.self_attn", "layers.*.fc1"),
    styles=_styles("layers.*", "num_attention_heads"),
    head="output_projection",
    heads="num_attention_heads",
    per_rank={"layers.*.self_attn": dict.fromkeys(("num_heads", "embed_dim"), "num_attention_heads")},
)

XGLM = replace(BIOGPT, model_types=("xglm",), head="lm_head")
