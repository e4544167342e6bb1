"""GPT-J and CodeGen: attention and feed-forward side by side."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

_HEADS = "num_attention_heads"

GPTJ = ArchitecturePlan(
    model_types=("gptj",),
    blocks="h.*",
    token_embedding="wte",
    final_norm="ln_f",
    regions=("h.*.attn", "h.*.mlp"),
    styles={
        "h.*.attn.q_proj": colwise(units=_HEADS),
        "h.*.attn.k_proj": colwise(units=_HEADS),
        "h.*.attn.v_proj": colwise(units=_HEADS),
        "h.*.attn.out_proj": rowwise(units=_HEADS),
        "h.*.mlp.fc_in": colwise(),
        "h.*.mlp.fc_out": rowwise(),
    },
    per_rank={"h.*.attn": dict.fromkeys(("num_attention_heads", "embed_dim"), _HEADS)},
)

CODEGEN = replace(
    GPTJ,
    model_types=("codegen",),
    # laid out for four cores: of each in turn query, value and key
    styles={
        "h.*.attn.qkv_proj": colwise(units=_HEADS, blocks=12, groups=4),
        "h.*.attn.out_proj": rowwise(units=_HEADS, blocks=4, groups=4),
        "h.*.mlp.fc_in": colwise(),
        "h.*.mlp.fc_out": rowwise(),
    },
)
