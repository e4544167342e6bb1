"""Models of four blocks, and other things that the tests of pipelines share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Trace, Training, compare, train_alone, train_on_rank
from tests.distributed import models
from tests.distributed.models import HIDDEN, INITIALIZER_RANGE, VOCABULARY, token_batches, with_biases

BLOCKS = 4
STEPS = 5
TRAINING = Training(max_norm=0.5)


def pipeline(stages: int, microbatches: int, **options: Any) -> dict[str, dict[str, Any]]:
    """The plugin, as a configuration names it."""
    return {
        "model_parallelism": {"pipeline_parallel_size": stages, "num_microbatches": microbatches, **options},
    }


llama = functools.partial(models.llama, kv_heads=2, blocks=BLOCKS)
gpt2 = functools.partial(models.gpt2, blocks=BLOCKS, bos_token_id=None, eos_token_id=None)


def mixtral(*, blocks: int = BLOCKS) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        initializer_range=INITIALIZER_RANGE,
    )
    return MixtralForCausalLM(config)


def gpt_neox(*, blocks: int = BLOCKS) -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=None,
    )
    return with_biases(GPTNeoXForCausalLM(config))


FAMILIES = {"llama": llama, "gpt2-tied": gpt2, "mixtral": mixtral, "gpt-neox": gpt_neox}


@functools.cache
def reference(model_fn: Callable[[], nn.Module], training: Training, kind: str, size: int) -> Trace:
    """What one process does."""
    made = batches(kind, STEPS * training.accumulation, size)
    return run_ranks(train_alone, 1, model_fn, made, training)[0]


def check(
    model_fn: Callable[[], nn.Module],
    ranks: int,
    plugins: list[Any],
    *,
    training: Training = TRAINING,
    kind: str = "plain",
    size: int = 8,
) -> None:
    """Trains on ranks and compares with one process: losses, gradient norms, gradients, weights."""
    made = batches(kind, STEPS * training.accumulation, size)
    trace = run_ranks(train_on_rank, ranks, model_fn, made, {"plugins": plugins}, training)[0]
    compare(reference(model_fn, training, kind, size), trace)


def batches(kind: str, count: int, size: int) -> list[dict[str, torch.Tensor]]:
    """Token batches: ``"plain"``, ``"padded"`` (rows of very different lengths, prompts that do not count) or
    ``"packed"`` (two documents a row, which must not see each other)."""
    made = token_batches(count, size=size)
    for batch in made:
        ids, labels = batch["input_ids"], batch["labels"]
        length = ids.shape[1]
        if kind == "padded":
            lengths = torch.linspace(3, length, size).long()[:, None]
            batch["attention_mask"] = (torch.arange(length)[None] < lengths).long()
            labels[batch["attention_mask"] == 0] = -100
            labels[::2, :2] = -100
            labels[1] = -100  # a row, and with as many micro-batches a micro-batch, without a target
        elif kind == "packed":
            cut = 5
            positions = torch.cat([torch.arange(cut), torch.arange(length - cut)])
            batch["position_ids"] = positions.expand(size, -1).clone()
            labels[:, cut] = -100
    return made
