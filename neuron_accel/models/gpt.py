# SPDX-License-Identifier: Apache-2.0
"""GPT-2 and its relatives: GPT-Neo, GPT-J, CodeGen, MPT, OPT."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

# ---- GPT-2: learned positions, query, key and value fused in one projection, weights stored as [in, out] -------------
GPT2 = ArchitecturePlan(
    model_types=("gpt2",),
    blocks="h.*",
    token_embedding="wte",
    final_norm="ln_f",
    regions=("h.*.attn", "h.*.mlp"),
    styles={
        "h.*.attn.c_attn": colwise(units="num_attention_heads", blocks=3),
        "h.*.attn.c_proj": rowwise(units="num_attention_heads"),
        "h.*.mlp.c_fc": colwise(units="n_inner"),
        "h.*.mlp.c_proj": rowwise(units="n_inner"),
    },
    per_rank={"h.*.attn": dict.fromkeys(("split_size", "embed_dim", "num_heads"), "num_attention_heads")},
    unsupported={"add_cross_attention": "its cross-attention has a second input that no region covers"},
)

OPENAI_GPT = replace(
    GPT2,
    model_types=("openai-gpt",),
    token_embedding="tokens_embed",
    final_norm="",
    styles={**GPT2.styles, "h.*.mlp.c_fc": colwise(), "h.*.mlp.c_proj": rowwise()},
    per_rank={"h.*.attn": dict.fromkeys(("split_size", "n_head"), "num_attention_heads")},
    unsupported={},
)


# ---- GPT-Neo: separate projections without biases; alternating global and local attention ----------------------------
GPT_NEO = ArchitecturePlan(
    model_types=("gpt_neo",),
    blocks="h.*",
    token_embedding="wte",
    final_norm="ln_f",
    regions=("h.*.attn", "h.*.mlp"),
    styles={
        "h.*.attn.attention.q_proj": colwise(units="num_heads"),
        "h.*.attn.attention.k_proj": colwise(units="num_heads"),
        "h.*.attn.attention.v_proj": colwise(units="num_heads"),
        "h.*.attn.attention.out_proj": rowwise(units="num_heads"),
        "h.*.mlp.c_fc": colwise(),
        "h.*.mlp.c_proj": rowwise(),
    },
    heads="num_heads",
    per_rank={"h.*.attn.attention": {"num_heads": "num_heads"}},
)


# ---- GPT-J and CodeGen: attention and feed-forward in parallel -------------------------------------------------------
_GPTJ_HEADS = "num_attention_heads"

GPTJ = ArchitecturePlan(
    model_types=("gptj",),
    blocks="h.*",
    token_embedding="wte",
    final_norm="ln_f",
    regions=("h.*.attn", "h.*.mlp"),
    styles={
        "h.*.attn.q_proj": colwise(units=_GPTJ_HEADS),
        "h.*.attn.k_proj": colwise(units=_GPTJ_HEADS),
        "h.*.attn.v_proj": colwise(units=_GPTJ_HEADS),
        "h.*.attn.out_proj": rowwise(units=_GPTJ_HEADS),
        "h.*.mlp.fc_in": colwise(),
        "h.*.mlp.fc_out": rowwise(),
    },
    per_rank={"h.*.attn": dict.fromkeys(("num_attention_heads", "embed_dim"), _GPTJ_HEADS)},
)

CODEGEN = replace(
    GPTJ,
    model_types=("codegen",),
    # Four groups, each of query, value and key.
    styles={
        "h.*.attn.qkv_proj": colwise(units=_GPTJ_HEADS, blocks=12, groups=4),
        "h.*.attn.out_proj": rowwise(units=_GPTJ_HEADS, blocks=4, groups=4),
        "h.*.mlp.fc_in": colwise(),
        "h.*.mlp.fc_out": rowwise(),
    },
)


# ---- MPT: ALiBi instead of positions; query, key and value fused in one projection -----------------------------------
MPT = ArchitecturePlan(
    model_types=("mpt",),
    blocks="blocks.*",
    token_embedding="wte",
    final_norm="norm_f",
    regions=("blocks.*.attn", "blocks.*.ffn"),
    styles={
        "blocks.*.attn.Wqkv": colwise(units="n_heads", blocks=3),
        "blocks.*.attn.out_proj": rowwise(units="n_heads"),
        "blocks.*.ffn.up_proj": colwise(),
        "blocks.*.ffn.down_proj": rowwise(),
    },
    heads="n_heads",
    per_rank={"blocks.*.attn": {"n_heads": "n_heads"}},
    per_head={"blocks.*.attn": ("position_bias",)},
)


# ---- OPT: biases in all layers, feed-forward layers on [tokens, hidden] that are not a separate module ---------------
_OPT_HEADS = "num_attention_heads"

OPT = ArchitecturePlan(
    model_types=("opt",),
    blocks="decoder.layers.*",
    token_embedding="decoder.embed_tokens",
    final_norm="decoder.final_layer_norm",
    regions=("decoder.layers.*.self_attn", "decoder.layers.*.fc1"),
    styles={
        "decoder.layers.*.self_attn.q_proj": colwise(units=_OPT_HEADS),
        "decoder.layers.*.self_attn.k_proj": colwise(units=_OPT_HEADS),
        "decoder.layers.*.self_attn.v_proj": colwise(units=_OPT_HEADS),
        "decoder.layers.*.self_attn.out_proj": rowwise(units=_OPT_HEADS),
        "decoder.layers.*.fc1": colwise(),
        "decoder.layers.*.fc2": rowwise(),
    },
    per_rank={"decoder.layers.*.self_attn": {"num_heads": _OPT_HEADS, "embed_dim": _OPT_HEADS}},
)
