"""Activations that one layer keeps for the backward pass on each of four ranks, counted through saved tensors."""

from __future__ import annotations

import pytest
import torch

from neuron_accel import ActivationCheckpointingPlugin
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


def _saved(family: str, layers: int, degree: int, sequence_parallel: bool, **options: bool) -> int:
    model = MODELS[family](layers)
    if degree > 1:
        run = make_run(degree=degree, sequence_parallel=sequence_parallel, **options)
        shard(model, run)
    return _kept(model)


def _kept(model: torch.nn.Module) -> int:
    """Bytes that autograd keeps of a step, each memory once; weights are there anyway."""
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


def _of_one_layer(family: str, degree: int, sequence_parallel: bool, **options: bool) -> float:
    """In units of the hidden states."""
    one, two = (_saved(family, layers, degree, sequence_parallel, **options) for layers in (1, 2))
    return (two - one) / HIDDEN_STATES


def _measure(family: str) -> dict[str, float]:
    return {
        "replicated": _of_one_layer(family, 4, False),
        "kept": _of_one_layer(family, 4, True, regather=False),
        "kept, overlapping": _of_one_layer(family, 4, True, overlap_gather=True, regather=False),
        "sequence": _of_one_layer(family, 4, True),
        "overlapping": _of_one_layer(family, 4, True, overlap_gather=True),
        "alone": _of_one_layer(family, 1, False),
    }


def _recomputed() -> dict[str, float]:
    """What a Llama layer keeps whose attention and feed-forward are recomputed by themselves, in units of the hidden
    states."""
    modules = ("model.layers.*.self_attn", "model.layers.*.mlp")
    cases = {
        "alone": {"degree": 1},
        "sequence": {"degree": 4, "sequence_parallel": True},
        "kept": {"degree": 4, "sequence_parallel": True, "regather": False},
    }
    found = {}
    for name, options in cases.items():
        kept = []
        for layers in (1, 2):
            model = MODELS["llama"](layers)
            shard(model, make_run(plugins=[ActivationCheckpointingPlugin(modules=modules)], **options))
            kept.append(_kept(model))
        found[name] = (kept[1] - kept[0]) / HIDDEN_STATES
    return found


def test_a_region_that_is_recomputed_by_itself_keeps_a_shard_of_its_input():
    for found in run_ranks(_recomputed, 4):
        assert found["sequence"] == found["alone"] / 4, "everything is sharded"
        assert found["kept"] == found["alone"] / 4 + 2 * 3 / 4, "two gathered inputs are kept"


# What a layer keeps of what is between regions: of each of two norms its input, its output, what it multiplies its
# weight with where that is another tensor, and a number or two for each token.
BETWEEN = {"gpt2": 4 + 4 / HIDDEN, "llama": 6 + 2 / HIDDEN}


@pytest.mark.parametrize("family", sorted(MODELS))
def test_activations_of_a_layer(family):
    for found in run_ranks(_measure, 4, family):
        between = BETWEEN[family]
        assert found["replicated"] == between + (found["alone"] - between) / 4
        assert found["sequence"] == found["overlapping"] == found["alone"] / 4, "everything is sharded"
        # everything but the inputs of attention and feed-forward, which are gathered once and kept
        assert found["kept"] == found["kept, overlapping"] == found["alone"] / 4 + 2 * 3 / 4
        assert found["kept"] < 0.81 * found["replicated"]


def _published() -> float:
    """What a block of GPT-2 keeps in bfloat16, with core attention that is recomputed, in units of s b h / t bytes."""
    from neuron_accel.models.attention import BlockwiseAttention

    kept = []
    for layers in (1, 2):
        sizes = {"n_embd": 64, "n_inner": 256, "n_head": HEADS, "n_layer": layers}
        model = gpt2(**sizes, activation_function="gelu", use_cache=False).bfloat16()
        run = make_run(degree=4, sequence_parallel=True)
        shard(model, run)
        BlockwiseAttention(run.backend).install(model, "the test")
        kept.append(_kept(model))
    return (kept[1] - kept[0]) / (BATCH * LENGTH * 64 / 4)


def test_a_block_keeps_what_is_published():
    """34 s b h / t bytes (Korthikanti et al. 2022, table 2: sequence parallel and selective recomputation), of which 2
    are masks of dropout, which this model does not have."""
    for found in run_ranks(_published, 4):
        assert found == pytest.approx(34 - 2, rel=0.05)
