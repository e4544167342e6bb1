"""Tiny models and data that several tests train."""

from __future__ import annotations

import functools

import torch
from torch import nn

VOCABULARY, HIDDEN, LAYERS = 96, 32, 2
# Adam divides a gradient by its own size: an entry whose gradient is hardly more than rounding becomes noise. Weights
# of this size have none of those.
INITIALIZER_RANGE = 0.1


def llama(*, tied: bool = False, kv_heads: int = 4, vocabulary: int = VOCABULARY) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=INITIALIZER_RANGE,
    )
    return LlamaForCausalLM(config)


def gpt2(*, tied: bool = True, vocabulary: int = VOCABULARY) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        initializer_range=INITIALIZER_RANGE,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # biases begin at zero, where a wrong one would not show
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
