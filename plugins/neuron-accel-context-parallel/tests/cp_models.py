"""Tiny models and batches."""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY, LENGTH = 96, 22  # 22 is not divisible by 4, nor by 8
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "use_cache": False,  # with a cache, transformers does not look for packed documents
}


def llama(**changes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_SIZES | changes))


def grouped(**changes) -> nn.Module:
    """Four heads share two of keys and values, which have norms of their own."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_SIZES | {"num_key_value_heads": 2, "head_dim": 8, **changes}))


def windowed() -> nn.Module:
    """Every other layer sees seven tokens; scores are capped, which in one process only the eager attention can."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**_SIZES, num_key_value_heads=2, head_dim=8, sliding_window=7, attn_logit_softcapping=3.0)
    return Gemma2ForCausalLM._from_config(config, attn_implementation="eager")


def gpt2(**changes) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        **{"n_layer": 2, "attn_pdrop": 0.0, "initializer_range": 0.1, "bos_token_id": 1, "eos_token_id": 1, **changes},
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():  # biases begin at zero, where a wrong one would not show
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def tokens(seed: int = 7, size: int = 4, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (size, length), generator=torch.Generator().manual_seed(seed))


def batches(count: int, *, size: int = 4, length: int = LENGTH, alike: bool = False) -> list[dict[str, torch.Tensor]]:
    """Rows in which a different number of labels counts, so that means over ranks and over samples differ.

    Args:
        alike: as many labels count in every row, as data parallelism takes for granted; but not on every rank.
    """
    result = []
    for seed in range(count):
        ids = tokens(seed, size, length)
        labels = ids.clone()
        for row in range(size):
            labels[row, 3 + 2 * row : 3 + (2 * row + 5 if alike else 4 * row + seed)] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


def packed(count: int) -> list[dict[str, torch.Tensor]]:
    """Packed documents of any length, with positions that restart."""
    result = []
    for batch in batches(count):
        ends = torch.tensor([[5, 9, 22], [1, 21, 22], [11, 12, 22], [22, 22, 22]])
        index = torch.arange(LENGTH)
        begins = [[0, *row.tolist()] for row in ends]
        positions = torch.stack([index - max_start(row, index) for row in begins])
        result.append({**batch, "position_ids": positions})
    return result


def max_start(starts: list[int], index: torch.Tensor) -> torch.Tensor:
    """For each position the last start at or before it."""
    starts_tensor = torch.tensor(starts)
    return torch.stack([starts_tensor[starts_tensor <= i].max() for i in index])


def padded(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows with padding on the right, on the left, and with none; one row's padding is even trained on."""
    result = []
    for batch in batches(count):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, 17:], mask[1, :4], mask[2, 9:] = 0, 0, 0
        labels = batch["labels"].masked_fill((mask == 0) & (torch.arange(4) != 2)[:, None], -100)
        result.append({**batch, "labels": labels, "attention_mask": mask})
    return result


def padded_and_ignored(count: int) -> list[dict[str, torch.Tensor]]:
    """The same, and nothing is learnt from padding. What a query that sees nothing makes of it is not defined."""
    result = []
    for batch in padded(count):
        seen = batch["attention_mask"] == 1
        seen[:, 1:] &= seen[:, :-1].clone()  # a label is what the token before it predicts
        result.append({**batch, "labels": batch["labels"].masked_fill(~seen, -100)})
    return result
