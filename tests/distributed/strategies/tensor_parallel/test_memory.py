"""Activations that one layer keeps for the backward pass on each of four ranks, counted through saved tensors."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import gpt2, llama, make_run, shard

BATCH, LENGTH, HIDDEN, INNER, HEADS = 2, 16, 32, 64, 4
HIDDEN_STATES = BATCH * LENGTH * HIDDEN * 4
"""Bytes of one layer's hidden states."""

MODELS = {
    "llama": lambda layers: llama(
        hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        num_hidden_layers=layers, attn_implementation="sdpa",
    ),
    "gpt2": lambda layers: gpt2(
        n_embd=HIDDEN, n_inner=INNER, n_head=HEADS, n_layer=layers, attn_implementation="sdpa"
    ),
}  # fmt: skip


def _saved(family: str, layers: int, degree: int, sequence_parallel: bool, overlap_gather: bool) -> int:
    """Bytes that autograd keeps, each memory once; weights are there anyway."""
    model = MODELS[family](layers)
    if degree > 1:
        run = make_run(degree=degree, sequence_parallel=sequence_parallel, overlap_gather=overlap_gather)
        shard(model, run)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(0, 101, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return total


def _of_one_layer(family: str, degree: int, sequence_parallel: bool, overlap_gather: bool = False) -> float:
    """In units of the hidden states."""
    one, two = (_saved(family, layers, degree, sequence_parallel, overlap_gather) for layers in (1, 2))
    return (two - one) / HIDDEN_STATES


def _measure(family: str) -> dict[str, float]:
    return {
        "replicated": _of_one_layer(family, 4, False),
        "sequence": _of_one_layer(family, 4, True),
        "overlapping": _of_one_layer(family, 4, True, overlap_gather=True),
        "alone": _of_one_layer(family, 1, False),
    }


# What a layer keeps of what is between regions: of each of two norms its input, its output, what it multiplies its
# weight with where that is another tensor, and a number or two for each token.
BETWEEN = {"gpt2": 4 + 4 / HIDDEN, "llama": 6 + 2 / HIDDEN}


@pytest.mark.parametrize("family", sorted(MODELS))
def test_activations_of_a_layer(family):
    for found in run_ranks(_measure, 4, family):
        between = BETWEEN[family]
        assert found["replicated"] == between + (found["alone"] - between) / 4
        # everything is sharded but the inputs of attention and feed-forward, which are gathered once and kept
        assert found["sequence"] == found["alone"] / 4 + 2 * 3 / 4
        assert found["overlapping"] == found["sequence"]
        assert found["sequence"] < 0.81 * found["replicated"]
