"""MPT: no positions but a bias on attention that is different for each head, query, key and value side by side."""

from __future__ import annotations

from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

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
