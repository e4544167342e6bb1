"""OPT: biases everywhere, a feed-forward that is no module of its own and sees a list of tokens."""

from __future__ import annotations

from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

_HEADS = "num_attention_heads"

OPT = ArchitecturePlan(
    model_types=("opt",),
    blocks="decoder.layers.*",
    token_embedding="decoder.embed_tokens",
    final_norm="decoder.final_layer_norm",
    regions=("decoder.layers.*.self_attn", "decoder.layers.*.fc1"),
    styles={
        "decoder.layers.*.self_attn.q_proj": colwise(units=_HEADS),
        "decoder.layers.*.self_attn.k_proj": colwise(units=_HEADS),
        "decoder.layers.*.self_attn.v_proj": colwise(units=_HEADS),
        "decoder.layers.*.self_attn.out_proj": rowwise(units=_HEADS),
        "decoder.layers.*.fc1": colwise(),
        "decoder.layers.*.fc2": rowwise(),
    },
    per_rank={"decoder.layers.*.self_attn": {"num_heads": _HEADS, "embed_dim": _HEADS}},
)
