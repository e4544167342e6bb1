"""The model, optimizer and schedule, for the sharded run and the one-process run that it is compared with."""

from __future__ import annotations

import math

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WARMUP = 0.1
"""Fraction of the run over which the learning rate rises."""
FLOOR = 0.1
"""Fraction of the peak learning rate that is left at the end."""
MAX_NORM = 1.0
"""The global norm to which gradients are clipped."""
INITIALIZER_RANGE = 0.05
"""Standard deviation of the first weights: about one over the square root of the width, for a model this narrow."""


def llama_config(
    *, vocab_size: int, hidden_size: int, layers: int, heads: int, key_value_heads: int, positions: int, end: int
) -> LlamaConfig:
    """A small Llama; ``end`` is the token between documents."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=round(hidden_size * 8 / 3 / 64) * 64 or 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        max_position_embeddings=positions,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )


def build_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """The model with the initial weights for ``seed``."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def build_optimizer(model: torch.nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices, but not for norms."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def learning_rate_at(step: float, steps: int) -> float:
    """Fraction of the peak learning rate: a linear rise, then a cosine to the floor."""
    progress = step / steps
    if progress < WARMUP:
        return (step + 1) / (WARMUP * steps + 1)
    fall = min((progress - WARMUP) / (1 - WARMUP), 1.0)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * fall))
