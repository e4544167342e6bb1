"""GPT-2: learned positions, query, key and value fused in one projection, weights stored as [in, out]."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

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
