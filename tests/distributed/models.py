"""Tiny models and data that several tests train."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import GPT2Config, LlamaConfig

VOCABULARY, HIDDEN, LAYERS = 96, 32, 2
# Adam divides a gradient by its own size: an entry whose gradient is hardly more than rounding becomes noise. Weights
# of this size have none of those.
INITIALIZER_RANGE = 0.1


def llama_config(**options: Any) -> LlamaConfig:
    """The configuration of a tiny Llama.

    Args:
        options: in place of what is given here.
    """
    from transformers import LlamaConfig

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN * 3 // 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": INITIALIZER_RANGE,
    }
    return LlamaConfig(**sizes | options)


def gpt2_config(**options: Any) -> GPT2Config:
    """The same of a tiny GPT-2, without dropout."""
    from transformers import GPT2Config

    sizes = {
        "vocab_size": VOCABULARY,
        "n_positions": 64,
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": INITIALIZER_RANGE,
    }
    return GPT2Config(**sizes | options)


def llama(*, tied: bool = False, kv_heads: int = 4, vocabulary: int = VOCABULARY, blocks: int = LAYERS) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(
        llama_config(
            vocab_size=vocabulary, num_hidden_layers=blocks, num_key_value_heads=kv_heads, tie_word_embeddings=tied
        )
    )


def gpt2(*, tied: bool = True, vocabulary: int = VOCABULARY, blocks: int = LAYERS, **options: Any) -> nn.Module:
    from transformers import GPT2LMHeadModel

    config = gpt2_config(vocab_size=vocabulary, n_layer=blocks, tie_word_embeddings=tied, **options)
    return with_biases(GPT2LMHeadModel(config))


def with_biases(model: nn.Module) -> nn.Module:
    """Biases begin at zero, where a wrong one would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


MODELS = {
    "llama": functools.partial(llama),
    "llama-tied": functools.partial(llama, tied=True),
    "gpt2": functools.partial(gpt2, tied=False),
    "gpt2-tied": functools.partial(gpt2),
}


def token_batches(count: int, *, size: int = 4, length: int = 12, vocabulary: int = VOCABULARY) -> list[dict]:
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(count):
        ids = torch.randint(vocabulary, (size, length), generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches
