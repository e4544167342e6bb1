"""Tiny mixtures of experts, and batches."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn

VOCABULARY, LENGTH, EXPERTS = 96, 10, 4
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_DEEPSEEK = {
    "n_group": 2,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_routed_experts": EXPERTS,
}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_LINEAR = {
    "shared_expert_intermediate_size": 16,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES = {
    "deepseek_v2": _DEEPSEEK | _LATENT | {"head_dim": 8, "num_key_value_heads": 4, "topk_method": "greedy"},
    "deepseek_v3": _DEEPSEEK | _LATENT | {"head_dim": 8, "num_key_value_heads": 4},
    "glm4_moe": _DEEPSEEK,
    "gpt_oss": {"sliding_window": 7},
    "granitemoe": {},
    "llama4_text": {
        "intermediate_size_mlp": 16,
        "interleave_moe_layer_step": 1,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
    },
    "mixtral": {},
    "olmoe": {},
    "qwen2_moe": {"shared_expert_intermediate_size": 16},
    "qwen3_moe": {"norm_topk_prob": True},
}

MORE = {
    "afmoe": {"num_dense_layers": 1, "num_shared_experts": 1},
    "dots1": _DEEPSEEK,
    "ernie4_5_moe": {"moe_num_experts": EXPERTS, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 1},
    "exaone_moe": _DEEPSEEK | {"num_shared_experts": 1},
    "flex_olmo": {},
    "glm4_moe_lite": _DEEPSEEK | _LATENT | {"num_key_value_heads": 4},
    "granitemoeshared": {"shared_intermediate_size": 16},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "jamba": {"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    "minimax": {},
    "minimax_m2": {},
    "phimoe": {},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "solar_open": _DEEPSEEK,
}


def build(family: str = "mixtral", **changes) -> nn.Module:
    """A tiny model of a family; biases and routers, which transformers starts at zero, are drawn."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **_SIZES | (FAMILIES | MORE)[family] | changes)
    model = AutoModelForCausalLM.from_config(config).float().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "gate.weight", "router.weight")):
                parameter.normal_(std=0.3)
    return model


mixtral, qwen2, qwen3, olmoe = (
    functools.partial(build, family) for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
)
balanced = functools.partial(build, "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
tied = functools.partial(build, "mixtral", tie_word_embeddings=True)


class OneForAll(nn.Module):
    """A model of one's own whose tokens all go to one expert; momentum and decay would show a missing gradient."""

    def __init__(self, favourite: int = 0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.moe = Mixture()
        self.favourite = favourite

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        chosen = torch.full((len(x), 1), self.favourite)
        hidden = hidden + self.moe(hidden, chosen, torch.sigmoid(hidden[:, :1]))
        return nn.functional.cross_entropy(self.last(hidden), labels)


class Mixture(nn.Module):
    """Experts of one's own: a loop over those that have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 6, 7) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 7, 6) / 3)

    def forward(self, tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(tokens)
        for expert in experts.unique().tolist():
            row, place = (experts == expert).nonzero(as_tuple=True)
            out = torch.tanh(tokens[row] @ self.up[expert]) @ self.down[expert]
            result = result.index_add(0, row, out * weights[row, place, None])
        return result


def batches(count: int, *, size: int = 4, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, VOCABULARY, (count, size, length), generator=generator)
    return [{"input_ids": each, "labels": each} for each in ids]


def padded(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows with other numbers of padding, but equally many labels."""
    result = []
    for batch in batches(count):
        mask, labels = torch.ones_like(batch["input_ids"]), batch["labels"].clone()
        mask[0, :4], mask[1, :1], mask[2, :3] = 0, 0, 0
        labels[:, :5] = -100
        result.append({"input_ids": batch["input_ids"], "labels": labels, "attention_mask": mask})
    return result


def packed(count: int) -> list[dict[str, torch.Tensor]]:
    """Rows of two documents each, with positions that restart; the first token of a document is not predicted."""
    result = []
    for batch in batches(count):
        positions, labels = torch.arange(LENGTH).repeat(4, 1), batch["labels"].clone()
        for row, begin in enumerate((3, 6, 1, 8)):
            positions[row, begin:] -= begin
            labels[row, begin] = -100
        result.append({"input_ids": batch["input_ids"], "labels": labels, "position_ids": positions})
    return result


def without_padding(count: int) -> list[list[dict[str, torch.Tensor]]]:
    """For each step the rows of two ranks: documents one after the other, more of them on the second rank, whose
    further tokens are not predicted."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(count):
        rows = []
        for lengths, ignored in (((3, 8), 0), ((4, 7, 6), 6)):
            ids = torch.randint(3, VOCABULARY, (1, sum(lengths)), generator=generator)
            positions = torch.cat([torch.arange(n) for n in lengths])[None]
            labels = ids.masked_fill(positions == 0, -100)
            labels[:, len(labels[0]) - ignored :] = -100
            rows.append({"input_ids": ids, "labels": labels, "position_ids": positions})
        result.append(rows)
    return result


def one_by_one(model: nn.Module) -> nn.Module:
    """The model, which is called for each document by itself, and returns the mean over the tokens of all."""
    forward = model.forward

    def each(input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        losses = []
        for ids, wanted, positions in zip(input_ids, labels, position_ids, strict=True):
            starts = [*positions.eq(0).nonzero().flatten().tolist(), len(ids)]
            for begin, end in itertools.pairwise(starts):
                logits = forward(ids[None, begin:end]).logits[0, :-1]
                losses.append(nn.functional.cross_entropy(logits, wanted[begin + 1 : end], reduction="none"))
        counts = (labels[:, 1:] != -100).sum()
        return torch.cat(losses).sum() / counts

    model.forward = each
    return model


def vectors(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(8, 6, generator=generator),
            "labels": torch.randint(5, (8,), generator=generator),
        }
        for _ in range(count)
    ]
