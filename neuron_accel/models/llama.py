# SPDX-License-Identifier: Apache-2.0
"""Decoders like Llama: rotary positions, grouped key/value heads, gated feed-forward."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, colwise, experts, rowwise, sharded, shared, spanning

ROUTER_LOGITS = ("router_logits",)
"""What mixtures of experts compute beside their output; load-balancing losses are computed from it."""

LLAMA = ArchitecturePlan(
    model_types=("llama", "mistral", "qwen2", "emu3_text_model"),
    blocks="layers.*",
    token_embedding="embed_tokens",
    final_norm="norm",
    regions=("layers.*.self_attn", "layers.*.mlp"),
    styles={
        "layers.*.self_attn.q_proj": colwise(units="num_attention_heads"),
        "layers.*.self_attn.k_proj": colwise(units="num_key_value_heads"),
        "layers.*.self_attn.v_proj": colwise(units="num_key_value_heads"),
        "layers.*.self_attn.o_proj": rowwise(units="num_attention_heads"),
        "layers.*.mlp.gate_proj": colwise(units="intermediate_size"),
        "layers.*.mlp.up_proj": colwise(units="intermediate_size"),
        "layers.*.mlp.down_proj": rowwise(units="intermediate_size"),
    },
)

QWEN3 = replace(
    LLAMA,
    model_types=("qwen3", "qwen3_vl_text"),
    # Norms over the features of a head, with weights shared by all heads.
    styles={**LLAMA.styles, "layers.*.self_attn.q_norm": shared(), "layers.*.self_attn.k_norm": shared()},
)

STABLELM = replace(
    LLAMA,
    model_types=("stablelm",),
    per_rank={"layers.*.self_attn": {"num_heads": "num_attention_heads", "num_key_value_heads": "num_key_value_heads"}},
    unsupported={"qk_layernorm": "it keeps one norm for each head in a list"},
)

HUNYUAN = replace(
    LLAMA,
    model_types=("hunyuan_v1_dense", "hunyuan_vl_text"),
    styles={
        **LLAMA.styles,
        "layers.*.self_attn.query_layernorm": shared(),
        "layers.*.self_attn.key_layernorm": shared(),
    },
)

LFM2 = replace(
    LLAMA,
    model_types=("lfm2",),
    final_norm="embedding_norm",
    # its other layers, convolutions, are replicated
    regions=("layers.*.self_attn", "layers.*.feed_forward"),
    styles={
        "layers.*.self_attn.q_proj": colwise(units="num_attention_heads"),
        "layers.*.self_attn.k_proj": colwise(units="num_key_value_heads"),
        "layers.*.self_attn.v_proj": colwise(units="num_key_value_heads"),
        "layers.*.self_attn.out_proj": rowwise(units="num_attention_heads"),
        "layers.*.self_attn.q_layernorm": shared(),
        "layers.*.self_attn.k_layernorm": shared(),
        "layers.*.feed_forward.w1": colwise(),
        "layers.*.feed_forward.w3": colwise(),
        "layers.*.feed_forward.w2": rowwise(),
    },
)

BITNET = replace(
    LLAMA,
    model_types=("bitnet",),
    styles={
        **LLAMA.styles,
        "layers.*.self_attn.attn_sub_norm": spanning(units="num_attention_heads"),
        "layers.*.mlp.ffn_sub_norm": spanning(units="intermediate_size"),
    },
)

DIFFLLAMA = replace(
    LLAMA,
    model_types=("diffllama",),
    styles={
        **LLAMA.styles,
        # Two halves, whose heads are subtracted in pairs.
        "layers.*.self_attn.q_proj": colwise(units="num_attention_heads", blocks=2, groups=2),
        "layers.*.self_attn.k_proj": colwise(units="num_key_value_heads", blocks=2, groups=2),
        "layers.*.self_attn.v_proj": colwise(units="num_key_value_heads", blocks=2, groups=2),
        # Pairs of heads, each with the features of two heads.
        "layers.*.self_attn.o_proj": rowwise(units="num_attention_heads", groups=2),
        **{f"layers.*.self_attn.lambda_{name}": shared() for name in ("q1", "k1", "q2", "k2")},
    },
)

GPT_OSS = replace(
    LLAMA,
    model_types=("gpt_oss",),
    styles={
        **{name: style for name, style in LLAMA.styles.items() if ".self_attn." in name},
        "layers.*.self_attn.sinks": sharded(units="num_attention_heads"),
        "layers.*.mlp.router": shared(),
        "layers.*.mlp.experts": experts(),
    },
    region_outputs=ROUTER_LOGITS,
)
