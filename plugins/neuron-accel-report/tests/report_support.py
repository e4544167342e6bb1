"""A tiny model and its data, and the command line."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import torch

VOCABULARY = 96
(SCRIPT,) = metadata.entry_points(group="console_scripts", name="neuron-accel")


def main(words: list[str]) -> int:
    """Runs ``neuron-accel`` in this process."""
    return SCRIPT.load()(words)


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            initializer_range=0.1,
        )
    )


def token_batches(count: int, *, size: int = 4, length: int = 12) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(7)
    ids = [torch.randint(VOCABULARY, (size, length), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each.clone()} for each in ids]
