"""Families of transformers with a plan for pipelines train a step in two stages as in one process.

One after the other on the same two ranks, because there are many.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.models import VOCABULARY, token_batches
from tests.distributed.strategies.pipeline.pipeline_support import pipeline

TINY = {
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "sliding_window"), 8),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
"""Options of configurations, where they have them, with which models are small and draw nothing."""

# fmt: off
FAMILIES = [
    "afmoe", "arcee", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox", "granite", "helium", "llama", "ministral",
    "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
    "seed_oss", "smollm3", "starcoder2", "vaultgemma",
]
# fmt: on


def tiny(model_type):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    cls = CONFIG_MAPPING[model_type]
    default = cls()
    options = {f.name: TINY[f.name] for f in dataclasses.fields(cls) if f.name in TINY}
    if getattr(default, "sliding_window", None) is None:
        options.pop("sliding_window", None)
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(default, name, None)
        if kinds:
            options[name] = sorted(kinds[:8])[::2]  # some of each kind
    model = AutoModelForCausalLM.from_config(cls(**options))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model.train()


def train_alone_and_in_two_stages(model_types):
    from neuron_accel import NeuronAccelerator

    result = {}
    for model_type in model_types:
        torch.manual_seed(0)
        model = tiny(model_type)
        alone = copy.deepcopy(model)
        accelerator = NeuronAccelerator(config={"plugins": [pipeline(2, 2)]})
        model = accelerator.prepare(model)
        (batch,) = token_batches(1, size=4)
        expected, found = alone(**batch).loss, model(**batch).loss
        expected.backward()
        accelerator.backward(found)
        gradients = accelerator.get_gradients(model)
        theirs = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        errors = [
            float((gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-6))
            for name, gradient in theirs.items()
        ]
        result[model_type] = (found.item(), expected.item(), max(errors), gradients.keys() == theirs.keys())
        accelerator.free_memory()
    return result


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model_types", [FAMILIES[i::4] for i in range(4)], ids=range(4))
def test_families_train_in_two_stages(model_types):
    for found in run_ranks(train_alone_and_in_two_stages, 2, model_types, timeout=360):
        assert list(found) == model_types
        for model_type, (loss, expected, error, same_names) in found.items():
            assert loss == pytest.approx(expected, rel=1e-5), model_type
            assert error < 2e-3, model_type
            assert same_names, model_type
