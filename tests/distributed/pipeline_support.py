"""Models of four blocks, and other things that the tests of pipelines share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from tests.distributed.models import HIDDEN, INITIALIZER_RANGE, VOCABULARY

BLOCKS = 4
STEPS = 5


def pipeline(stages: int, microbatches: int, **options: Any) -> dict[str, dict[str, Any]]:
    """The plugin, as a configuration names it."""
    return {
        "model_parallelism": {"pipeline_parallel_size": stages, "num_microbatches": microbatches, **options},
    }


def llama(*, tied: bool = False, blocks: int = BLOCKS) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=INITIALIZER_RANGE,
    )
    return LlamaForCausalLM(config)


def gpt2(*, tied: bool = True, blocks: int = BLOCKS) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=HIDDEN,
        n_layer=blocks,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=tied,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
    )
    return with_biases(GPT2LMHeadModel(config))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=INITIALIZER_RANGE,
    )
    return MixtralForCausalLM(config)


def gpt_neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=BLOCKS,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
    )
    return with_biases(GPTNeoXForCausalLM(config))


def with_biases(model: nn.Module) -> nn.Module:
    """Biases begin at zero, where a wrong one would not show."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


FAMILIES = {
    "llama": functools.partial(llama),
    "gpt2-tied": functools.partial(gpt2),
    "mixtral": functools.partial(mixtral),
    "gpt-neox": functools.partial(gpt_neox),
}
