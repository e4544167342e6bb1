"""GPT-Neo: queries, keys and values apart, without biases; in turn all positions and a window of them."""

from __future__ import annotations

from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

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
