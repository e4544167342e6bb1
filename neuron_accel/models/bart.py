# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder models like BART, and their decoders used alone: learned or fixed positions, biases in all layers."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, Style, colwise, rowwise

_HEADS, _ENCODER_HEADS = "decoder_attention_heads", "encoder_attention_heads"
NO_SEQUENCE = "its decoder attends to the output of its encoder, a sequence of another length"


def attention(name: str, heads: str, exit: str = "out_proj") -> dict[str, Style]:
    """The styles of the projections of an attention module."""
    into = {f"{name}.{leaf}": colwise(units=heads) for leaf in ("q_proj", "k_proj", "v_proj")}
    return into | {f"{name}.{exit}": rowwise(units=heads)}


def _styles(layer: str, heads: str) -> dict[str, Style]:
    return attention(f"{layer}.self_attn", heads) | {f"{layer}.fc1": colwise(), f"{layer}.fc2": rowwise()}


def _with_encoder(decoder: ArchitecturePlan, *tables: str) -> ArchitecturePlan:
    """The plan of a decoder together with its encoder, whose output it attends to. ``tables``: further token
    embeddings."""
    crossing = "decoder.layers.*.encoder_attn"
    both = replace(
        decoder,
        further_embeddings=tables,
        regions=(*decoder.regions, crossing, "encoder.layers.*.self_attn", "encoder.layers.*.fc1"),
        styles={**decoder.styles, **attention(crossing, _HEADS), **_styles("encoder.layers.*", _ENCODER_HEADS)},
        per_rank={
            **decoder.per_rank,
            crossing: {"num_heads": _HEADS, "embed_dim": _HEADS},
            "encoder.layers.*.self_attn": {"num_heads": _ENCODER_HEADS, "embed_dim": _ENCODER_HEADS},
        },
        region_inputs=("key_value_states",),
        attentions={"encoder_attentions": _ENCODER_HEADS, "decoder_attentions": _HEADS, "cross_attentions": _HEADS},
        sequence=NO_SEQUENCE,
    )
    return replace(decoder, variants={"is_encoder_decoder": both})


_DECODER = ArchitecturePlan(
    model_types=("bart",),
    blocks="decoder.layers.*",
    token_embedding="decoder.embed_tokens",
    final_norm="",
    regions=("decoder.layers.*.self_attn", "decoder.layers.*.fc1"),
    styles=_styles("decoder.layers.*", _HEADS),
    heads=_HEADS,
    per_rank={"decoder.layers.*.self_attn": {"num_heads": _HEADS, "embed_dim": _HEADS}},
)

_NORM_FIRST = replace(_DECODER, final_norm="decoder.layer_norm")
_TABLES = ("shared", "encoder.embed_tokens")

BART = replace(_with_encoder(_DECODER, *_TABLES), model_types=("bart", "blenderbot-small", "marian", "mvp", "plbart"))
BIGBIRD_PEGASUS = replace(
    _DECODER,
    model_types=("bigbird_pegasus",),
    unsupported={"is_encoder_decoder": "the attention of its encoder chooses blocks at random"},
)
MBART = replace(_with_encoder(_NORM_FIRST, *_TABLES), model_types=("mbart", "pegasus", "blenderbot", "m2m_100"))
SPEECH_TO_TEXT = replace(_with_encoder(_NORM_FIRST), model_types=("speech_to_text",))
"""Its encoder reads spectra, through convolutions."""
WHISPER = replace(_with_encoder(replace(_NORM_FIRST, head="proj_out")), model_types=("whisper",))

BIOGPT = replace(
    _DECODER,
    model_types=("biogpt",),
    blocks="layers.*",
    token_embedding="embed_tokens",
    final_norm="layer_norm",
    regions=("layers.*.self_attn", "layers.*.fc1"),
    styles=_styles("layers.*", "num_attention_heads"),
    head="output_projection",
    heads="num_attention_heads",
    per_rank={"layers.*.self_attn": dict.fromkeys(("num_heads", "embed_dim"), "num_attention_heads")},
)

XGLM = replace(BIOGPT, model_types=("xglm",), head="lm_head")
