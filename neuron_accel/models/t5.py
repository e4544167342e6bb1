# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder models like T5: biases of relative positions, one for each head, instead of positions."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.bart import NO_SEQUENCE
from neuron_accel.models.plan import ArchitecturePlan, Style, colwise, rowwise, sharded

_HEADS = "num_heads"
_LAYER = "*.block.*.layer.*"
_ATTENTION = (f"{_LAYER}.SelfAttention", f"{_LAYER}.EncDecAttention")
_MLP = f"{_LAYER}.DenseReluDense"


def _styles(*entries: str) -> dict[str, Style]:
    return {
        **{f"{name}.{leaf}": colwise(units=_HEADS) for name in _ATTENTION for leaf in "qkv"},
        **{f"{name}.o": rowwise(units=_HEADS) for name in _ATTENTION},
        # [buckets, heads]
        f"{_ATTENTION[0]}.relative_attention_bias": sharded(units=_HEADS, dim=1),
        **{f"{_MLP}.{entry}": colwise() for entry in entries},
        f"{_MLP}.wo": rowwise(),
    }


_PLAIN = ArchitecturePlan(
    model_types=("t5", "mt5", "umt5"),
    blocks="decoder.block.*",
    token_embedding="shared",
    further_embeddings=("encoder.embed_tokens", "decoder.embed_tokens"),
    final_norm="decoder.final_layer_norm",
    regions=(*_ATTENTION, _MLP),
    styles=_styles("wi"),
    heads=_HEADS,
    per_rank={name: {"n_heads": _HEADS, "inner_dim": _HEADS} for name in _ATTENTION},
    region_inputs=("key_value_states", "encoder_hidden_states"),  # the second is UMT5's name of it
    attentions=dict.fromkeys(("encoder_attentions", "decoder_attentions", "cross_attentions"), _HEADS),
    sequence=NO_SEQUENCE,
)

T5 = replace(_PLAIN, variants={"is_gated_act": replace(_PLAIN, styles=_styles("wi_0", "wi_1"))})
