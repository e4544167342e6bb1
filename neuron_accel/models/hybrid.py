# SPDX-License-Identifier: Apache-2.0
"""Decoders with state-space or convolutional layers, which are replicated, or with mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.llama import LFM2, LLAMA, QWEN3, ROUTER_LOGITS
from neuron_accel.models.plan import colwise, experts, partial, rowwise, shared

_ATTENTION = {name: style for name, style in LLAMA.styles.items() if ".self_attn." in name}
_FEED_FORWARD = {
    "layers.*.feed_forward.gate_proj": colwise(),
    "layers.*.feed_forward.up_proj": colwise(),
    "layers.*.feed_forward.down_proj": rowwise(),
}

BAMBA = replace(
    LLAMA,
    model_types=("bamba", "falcon_h1"),
    final_norm="final_layernorm",
    regions=("layers.*.self_attn", "layers.*.feed_forward"),
    styles=_ATTENTION | _FEED_FORWARD,
)

JAMBA = replace(
    BAMBA,
    model_types=("jamba",),
    styles={
        **_ATTENTION,
        **_FEED_FORWARD,
        "layers.*.feed_forward.router": shared(),
        "layers.*.feed_forward.experts": experts(),
    },
    region_outputs=ROUTER_LOGITS,
)

LFM2_MOE = replace(
    LFM2,
    model_types=("lfm2_moe",),
    styles={
        **LFM2.styles,
        "layers.*.feed_forward.gate": shared(),
        "layers.*.feed_forward.experts": experts(),
    },
)

_GRANITE_WITH_EXPERTS = replace(
    LLAMA,
    model_types=("granitemoehybrid",),
    regions=("layers.*.self_attn", "layers.*.shared_mlp", "layers.*.block_sparse_moe"),
    styles={
        **_ATTENTION,
        "layers.*.shared_mlp.input_linear": colwise(blocks=2),
        "layers.*.shared_mlp.output_linear": rowwise(),
        "layers.*.block_sparse_moe.router": shared(),
        "layers.*.block_sparse_moe.experts": experts(),
    },
    region_outputs=ROUTER_LOGITS,
)

GRANITE_HYBRID = replace(
    _GRANITE_WITH_EXPERTS,
    regions=("layers.*.self_attn", "layers.*.shared_mlp"),
    styles={name: style for name, style in _GRANITE_WITH_EXPERTS.styles.items() if ".block_sparse_moe." not in name},
    variants={"num_local_experts": _GRANITE_WITH_EXPERTS},
)

AFMOE = replace(
    QWEN3,
    model_types=("afmoe",),
    styles={
        **QWEN3.styles,
        "layers.*.self_attn.gate_proj": colwise(units="num_attention_heads"),
        "layers.*.mlp.expert_bias": shared(),
        "layers.*.mlp.router.gate": shared(),
        "layers.*.mlp.shared_experts.gate_proj": colwise(),
        "layers.*.mlp.shared_experts.up_proj": colwise(),
        "layers.*.mlp.shared_experts.down_proj": partial(),
        "layers.*.mlp.experts": experts(),
    },
)
