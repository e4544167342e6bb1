"""Gradients of several optimizers or models travel in one order, whatever each rank's samples use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.testing import run_ranks


def train_on_rank(plugins, apart):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    first, rare, last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
    models = [nn.Sequential(first, rare), last] if apart else [nn.ModuleList([first, rare, last])]
    weights = [p for model in models for p in model.parameters() if p.ndim > 1]
    biases = [p for model in models for p in model.parameters() if p.ndim == 1]
    # The wider ones first: what arrives last in the backward pass is theirs.
    optimizers = [torch.optim.SGD(weights, lr=0.1), torch.optim.SGD(biases, lr=0.1)]
    prepared = accelerator.prepare(*models, *optimizers)
    models, optimizers = prepared[: len(models)], prepared[len(models) :]
    ones = torch.ones(2, 4)
    for _ in range(3):
        hidden = first(ones)
        if accelerator.process_index == 0:  # the others' samples do without
            hidden = hidden + rare(hidden)
        accelerator.backward(last(hidden).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.wait_for_everyone()
    return [p.detach().clone() for model in models for p in model.parameters()]


@pytest.mark.parametrize("apart", [False, True], ids=["one model", "two models"])
@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["dp2", "zero1"])
def test_ranks_that_use_other_parameters_agree(plugins, apart):
    one, other = run_ranks(train_on_rank, 2, plugins, apart, timeout=30)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
