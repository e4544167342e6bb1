"""What a rank keeps for the backward pass, and what it sends, counted."""

from __future__ import annotations

import cp_models
import pytest
import torch
from neuron_accel_context_parallel import ContextParallelPlugin

from neuron_accel import NeuronAccelerator
from neuron_accel.testing import run_ranks

LENGTH, LAYERS, SIZE = 512, 2, 2
KEPT = ("cp 1", "cp 2", "cp 4")


def model() -> torch.nn.Module:
    return cp_models.llama(max_position_embeddings=LENGTH, num_key_value_heads=2)


def kept_bytes(degree: int) -> tuple[int, int, dict[str, int]]:
    """Bytes that autograd keeps of a training forward, beside parameters; the largest of one tensor; bytes sent."""
    plugins = [ContextParallelPlugin(context_parallel_size=degree)] if degree > 1 else []
    accelerator = NeuronAccelerator(plugins=plugins)
    torch.manual_seed(0)
    prepared = accelerator.prepare(model().train())
    ids = cp_models.tokens(size=SIZE, length=LENGTH)
    parameters = {p.untyped_storage().data_ptr() for p in prepared.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    backend = accelerator.run.backend
    with backend.record() as forward, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = prepared(input_ids=ids, labels=ids).loss
    with backend.record() as backward:
        loss.backward()
    sent = {"forward": forward.sent(op="permute"), "backward": backward.sent(op="permute")}
    return sum(kept.values()), max(kept.values()), sent


@pytest.fixture(scope="module")
def kept() -> dict[int, tuple[int, int, dict[str, int]]]:
    return {degree: run_ranks(kept_bytes, degree, degree)[0] for degree in (1, 2, 4)}


@pytest.mark.parametrize("degree", [2, 4])
def test_what_is_kept_falls_as_one_over_the_degree(kept, degree):
    whole, share = kept[1][0], kept[degree][0]
    assert share * degree == pytest.approx(whole, rel=0.05)
    assert kept[degree][1] * degree <= kept[1][1] * 1.01


@pytest.mark.parametrize("degree", [2, 4])
def test_no_more_is_sent_than_keys_values_and_their_gradients(kept, degree):
    pair = LAYERS * SIZE * 2 * (LENGTH // degree) * 16 * 4  # two heads of keys and values of 8 features, fp32
    assert kept[degree][2] == {"forward": (degree - 1) * pair, "backward": (2 * degree - 1) * pair}
