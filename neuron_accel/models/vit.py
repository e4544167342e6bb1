# SPDX-License-Identifier: Apache-2.0
"""Encoders of images and of speech: blocks like those of ViT and Wav2Vec2, without a vocabulary."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.bart import attention
from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

_HEADS = "num_attention_heads"

VIT = ArchitecturePlan(
    model_types=("vit", "deit", "ijepa", "vit_msn"),
    blocks="layers.*",
    token_embedding="",
    final_norm="layernorm",
    regions=("layers.*.attention", "layers.*.mlp"),
    styles={
        **attention("layers.*.attention", _HEADS, "o_proj"),
        "layers.*.mlp.fc1": colwise(),
        "layers.*.mlp.fc2": rowwise(),
    },
    per_rank={"layers.*.attention": {"num_attention_heads": _HEADS}},
)

_DINOV2 = replace(
    VIT,
    model_types=("dinov2", "dinov2_with_registers"),
    blocks="encoder.layer.*",
    regions=("encoder.layer.*.attention", "encoder.layer.*.mlp"),
    styles={
        **attention("encoder.layer.*.attention", _HEADS, "o_proj"),
        "encoder.layer.*.mlp.fc1": colwise(),
        "encoder.layer.*.mlp.fc2": rowwise(),
    },
    per_rank={"encoder.layer.*.attention": {"num_attention_heads": _HEADS}},
)
_GATED = replace(
    _DINOV2,
    styles={
        **attention("encoder.layer.*.attention", _HEADS, "o_proj"),
        **{f"encoder.layer.*.mlp.{leaf}": colwise() for leaf in ("gate_proj", "up_proj")},
        "encoder.layer.*.mlp.down_proj": rowwise(),
    },
)
DINOV2 = replace(_DINOV2, variants={"use_swiglu_ffn": _GATED})

WAV2VEC2 = ArchitecturePlan(
    model_types=("wav2vec2", "hubert", "data2vec-audio", "unispeech", "unispeech-sat", "sew"),
    blocks="encoder.layers.*",
    token_embedding="",
    final_norm="",
    regions=("encoder.layers.*.attention", "encoder.layers.*.feed_forward"),
    styles={
        **attention("encoder.layers.*.attention", _HEADS),
        "encoder.layers.*.feed_forward.intermediate_dense": colwise(),
        "encoder.layers.*.feed_forward.output_dense": rowwise(),
    },
    per_rank={"encoder.layers.*.attention": {"num_heads": _HEADS, "embed_dim": _HEADS}},
)
