# SPDX-License-Identifier: Apache-2.0
"""Decoders whose fused projection has query, key and value of each head in turn: GPT-NeoX, BLOOM, Falcon."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, colwise, own_queries, rowwise, shared

_HEADS = "num_attention_heads"

GPT_NEOX = ArchitecturePlan(
    model_types=("gpt_neox",),
    blocks="layers.*",
    token_embedding="embed_in",
    final_norm="final_layer_norm",
    regions=("layers.*.attention", "layers.*.mlp"),
    styles={
        "layers.*.attention.query_key_value": colwise(units=_HEADS),
        "layers.*.attention.dense": rowwise(units=_HEADS),
        "layers.*.mlp.dense_h_to_4h": colwise(),
        "layers.*.mlp.dense_4h_to_h": rowwise(),
    },
)

BLOOM = ArchitecturePlan(
    model_types=("bloom",),
    blocks="h.*",
    token_embedding="word_embeddings",
    final_norm="ln_f",
    regions=("h.*.self_attention", "h.*.mlp"),
    styles={
        "h.*.self_attention.query_key_value": colwise(units=_HEADS),
        "h.*.self_attention.dense": rowwise(units=_HEADS),
        "h.*.mlp.dense_h_to_4h": colwise(),
        "h.*.mlp.dense_4h_to_h": rowwise(),
    },
    per_rank={"h.*.self_attention": {"num_heads": _HEADS}},
    per_head={"h.*.self_attention": ("alibi",)},
    unsupported={"slow_but_exact": "it reads slices of the full weights"},
)

_BIGCODE_MULTI_QUERY = ArchitecturePlan(
    model_types=("gpt_bigcode",),
    blocks="h.*",
    token_embedding="wte",
    final_norm="ln_f",
    regions=("h.*.attn", "h.*.mlp"),
    styles={
        "h.*.attn.c_attn": own_queries(units=_HEADS),
        "h.*.attn.c_proj": rowwise(units=_HEADS),
        "h.*.mlp.c_fc": colwise(),
        "h.*.mlp.c_proj": rowwise(),
    },
    key_value_heads="",
    per_rank={"h.*.attn": dict.fromkeys(("num_heads", "embed_dim", "split_size", "num_key_value_groups"), _HEADS)},
    unsupported={"add_cross_attention": "its cross-attention has a second input that no region covers"},
)

GPT_BIGCODE = replace(
    _BIGCODE_MULTI_QUERY,
    styles={**_BIGCODE_MULTI_QUERY.styles, "h.*.attn.c_attn": colwise(units=_HEADS)},
    per_rank={"h.*.attn": dict.fromkeys(("num_heads", "kv_heads", "embed_dim", "split_size", "kv_dim"), _HEADS)},
    variants={"multi_query": _BIGCODE_MULTI_QUERY},
)

_FALCON_GROUPED = ArchitecturePlan(
    model_types=("falcon",),
    blocks="h.*",
    token_embedding="word_embeddings",
    final_norm="ln_f",
    regions=("h.*.self_attention", "h.*.mlp"),
    styles={
        "h.*.self_attention.query_key_value": colwise(units="num_kv_heads", fused=True),
        "h.*.self_attention.dense": rowwise(units=_HEADS),
        "h.*.mlp.dense_h_to_4h": colwise(),
        "h.*.mlp.dense_4h_to_h": rowwise(),
    },
    key_value_heads="num_kv_heads",
    per_rank={"h.*.self_attention": {"num_heads": _HEADS, "num_kv_heads": "num_kv_heads"}},
    unsupported={"alibi": "no model has it together with key/value heads that several heads share"},
)

_FALCON_MULTI_QUERY = replace(
    _FALCON_GROUPED,
    styles={**_FALCON_GROUPED.styles, "h.*.self_attention.query_key_value": own_queries(units=_HEADS)},
    key_value_heads="",
    per_rank={"h.*.self_attention": {"num_heads": _HEADS}},
)

_FALCON_MULTI_HEAD = replace(
    _FALCON_GROUPED,
    styles={**_FALCON_GROUPED.styles, "h.*.self_attention.query_key_value": colwise(units=_HEADS)},
    key_value_heads="",
    per_rank={"h.*.self_attention": {"num_heads": _HEADS, "num_kv_heads": _HEADS}},
    unsupported={},
)

_FALCON_ALIBI = replace(_FALCON_MULTI_HEAD, per_head={"h.*.self_attention": ("alibi", "attention_mask")})

FALCON = replace(
    _FALCON_MULTI_HEAD,
    variants={
        "new_decoder_architecture": _FALCON_GROUPED,
        "multi_query": _FALCON_MULTI_QUERY,
        "alibi": _FALCON_ALIBI,
    },
)

PERSIMMON = ArchitecturePlan(
    model_types=("persimmon",),
    blocks="layers.*",
    token_embedding="embed_tokens",
    final_norm="final_layernorm",
    regions=("layers.*.self_attn", "layers.*.mlp"),
    styles={
        "layers.*.self_attn.query_key_value": colwise(units=_HEADS),
        "layers.*.self_attn.dense": rowwise(units=_HEADS),
        "layers.*.self_attn.q_layernorm": shared(),
        "layers.*.self_attn.k_layernorm": shared(),
        "layers.*.mlp.dense_h_to_4h": colwise(),
        "layers.*.mlp.dense_4h_to_h": rowwise(),
    },
    per_rank={"layers.*.self_attn": {"num_heads": _HEADS}},
)
