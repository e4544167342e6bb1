# SPDX-License-Identifier: Apache-2.0
"""BERT and similar models as decoders: post-norm, learned positions, a head of several layers."""

from __future__ import annotations

from dataclasses import replace

from neuron_accel.models.plan import ArchitecturePlan, colwise, rowwise

_HEADS = "num_attention_heads"

BERT = ArchitecturePlan(
    model_types=("bert", "ernie", "rembert", "roformer"),
    blocks="encoder.layer.*",
    token_embedding="embeddings.word_embeddings",
    final_norm="",
    regions=("encoder.layer.*.attention.self", "encoder.layer.*.intermediate"),
    styles={
        "encoder.layer.*.attention.self.query": colwise(units=_HEADS),
        "encoder.layer.*.attention.self.key": colwise(units=_HEADS),
        "encoder.layer.*.attention.self.value": colwise(units=_HEADS),
        "encoder.layer.*.attention.output.dense": rowwise(units=_HEADS),
        "encoder.layer.*.intermediate.dense": colwise(),
        "encoder.layer.*.output.dense": rowwise(),
    },
    head="cls.predictions.decoder",
    per_rank={"encoder.layer.*.attention.self": {"num_attention_heads": _HEADS, "all_head_size": _HEADS}},
    unsupported={"add_cross_attention": "its cross-attention has a second input that no region covers"},
)

ROBERTA = replace(
    BERT,
    model_types=("roberta", "camembert", "xlm-roberta", "data2vec-text", "bert-generation"),
    head="lm_head.decoder",
)

ELECTRA = replace(BERT, model_types=("electra",), head="generator_lm_head")

NORM_FIRST = replace(
    BERT,
    model_types=("megatron-bert",),
    final_norm="encoder.ln",
    regions=("encoder.layer.*.attention.self", "encoder.layer.*.intermediate"),
)
"""Pre-norm, with a final norm after the blocks."""

ROBERTA_NORM_FIRST = replace(
    ROBERTA,
    model_types=("roberta-prelayernorm",),
    final_norm="LayerNorm",
    regions=("encoder.layer.*.attention.self", "encoder.layer.*.intermediate.dense"),
)

XLM_ROBERTA_XL = replace(
    ROBERTA,
    model_types=("xlm-roberta-xl",),
    final_norm="encoder.LayerNorm",
)

MODERNBERT = ArchitecturePlan(
    model_types=("modernbert-decoder",),
    blocks="layers.*",
    token_embedding="embeddings.tok_embeddings",
    final_norm="final_norm",
    regions=("layers.*.attn", "layers.*.mlp"),
    styles={
        "layers.*.attn.q_proj": colwise(units=_HEADS),
        "layers.*.attn.k_proj": colwise(units=_HEADS),
        "layers.*.attn.v_proj": colwise(units=_HEADS),
        "layers.*.attn.Wo": rowwise(units=_HEADS),
        "layers.*.mlp.Wi": colwise(blocks=2),
        "layers.*.mlp.Wo": rowwise(),
    },
    head="decoder",
    per_rank={"layers.*.attn": {"num_heads": _HEADS, "all_head_size": _HEADS}},
)
