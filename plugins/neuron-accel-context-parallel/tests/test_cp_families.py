"""Families of transformers: each is exact, or refused before it computes something else."""

from __future__ import annotations

import copy

import cp_models
import pytest
import torch
from neuron_accel_context_parallel import ContextParallelPlugin

from neuron_accel import NeuronAccelerator
from neuron_accel.errors import NeuronAccelError
from neuron_accel.testing import run_ranks

SIZES = {
    "vocab_size": cp_models.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "initializer_range": 0.1,
}
NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout"), 0.0)
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXACT = {
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": 7},
    "ctrl": NO_DROPOUT | {"dff": 48},
    "exaone4": {"sliding_window": 7, "sliding_window_pattern": 2},
    "gemma": {},
    "gemma2": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 7},
    "glm": {},
    "glm4": {},
    "gpt2": NO_DROPOUT,
    "gpt_neox": NO_DROPOUT,
    "granite": {},
    "helium": {},
    "llama": {},
    "mistral": {"sliding_window": 7},
    "mixtral": EXPERTS,
    "olmo": {},
    "olmo2": {},
    "olmoe": EXPERTS,
    "opt": NO_DROPOUT | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": NO_DROPOUT,
    "phi3": NO_DROPOUT | {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": NO_DROPOUT | {"residual_dropout": 0.0},
    "smollm3": {},
    "starcoder2": NO_DROPOUT | {"embedding_dropout": 0.0, "residual_dropout": 0.0, "sliding_window": 7},
}
REFUSED = {
    "bloom": {"n_head": 4, "n_layer": 2},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_oss": EXPERTS,
    "llama4_text": EXPERTS | {"attention_chunk_size": 8, "intermediate_size_mlp": 48},
    "mamba2": {"num_heads": 8, "expand": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
    "nemotron": {},
    "rwkv": {},
    "stablelm": NO_DROPOUT,
}
WITHOUT_PACKING = ("ctrl", "opt")
"""Families that do not look for packed documents in one process."""


def build(family: str, changes: dict) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | changes)
    implementation = "eager" if getattr(config, "attn_logit_softcapping", None) else None
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).float().train()


def calls(family: str) -> list[dict[str, torch.Tensor]]:
    makers = [cp_models.batches, cp_models.padded_and_ignored]
    return [make(1)[0] for make in (makers if family in WITHOUT_PACKING else [*makers, cp_models.packed])]


def largest_error(family: str, accelerator: NeuronAccelerator, model, whole) -> float:
    """Of losses and gradients, relative to the largest entry of each."""
    errors = []
    for batch in calls(family):
        whole.zero_grad(), model.zero_grad()
        expected, loss = whole(**batch).loss, model(**batch).loss
        expected.backward()
        accelerator.backward(loss)
        errors.append(float(abs(loss - expected) / abs(expected)))
        gradients = accelerator.get_gradients(model)
        for name, parameter in whole.named_parameters():
            if parameter.grad is None:
                continue
            scale = parameter.grad.abs().max().clamp(min=1e-4)  # a bias of keys has rounding only
            errors.append(float((gradients[name] - parameter.grad).abs().max() / scale))
    return max(errors)


def try_all(families: dict[str, dict]) -> dict[str, float | str]:
    results: dict[str, float | str] = {}
    accelerator = NeuronAccelerator(plugins=[ContextParallelPlugin(context_parallel_size=2)])
    for family, changes in families.items():
        model = build(family, changes)
        whole = copy.deepcopy(model)
        try:
            results[family] = largest_error(family, accelerator, accelerator.prepare(model), whole)
        except NeuronAccelError as error:
            results[family] = str(error)
        accelerator.free_memory()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_what_is_exact(part):
    families = dict(list(EXACT.items())[part::2])
    results = run_ranks(try_all, 2, families, timeout=110)[0]
    wrong = {name: result for name, result in results.items() if isinstance(result, str) or not result < 1e-3}
    assert not wrong


@pytest.mark.slow
def test_what_is_refused():
    results = run_ranks(try_all, 2, REFUSED, timeout=110)[0]
    assert not {name: result for name, result in results.items() if not isinstance(result, str)}
