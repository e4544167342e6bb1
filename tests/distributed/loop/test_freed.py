"""Without their last user an accelerator, its loaders and its optimizers are freed at once, and models by the garbage
collector."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from neuron_accel import NeuronAccelerator
from neuron_accel.testing import run_ranks


def train(plugins):
    """Weak references to what a short training has used, by name."""
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    adam = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, float)
    loader = DataLoader(torch.randn(16, 4), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(net, adam, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    used = {
        "accelerator": accelerator,
        "loader": loader,
        "gradient state": loader.gradient_state,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "model": net,
        "weight": net[0].weight,
        "inner optimizer": optimizer.optimizer,
    }
    return {name: weakref.ref(each) for name, each in used.items()}


def kept(plugins):
    train(plugins)  # what is imported and made once
    gc.collect()
    gc.disable()
    try:
        used = train(plugins)
        at_once = {name for name, reference in used.items() if reference() is not None}
        gc.collect()
        return at_once, {name for name, reference in used.items() if reference() is not None}
    finally:
        gc.enable()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["none", "zero1"])
def test_only_the_model_waits_for_the_garbage_collector(plugins, ranks):
    for at_once, after_collection in run_ranks(kept, ranks, plugins):
        assert at_once <= {"model", "weight", "inner optimizer"}
        assert not after_collection


def take_over(plugins):
    """A model whose first accelerator is gone is prepared by another."""
    net = nn.Linear(4, 1)
    first = torch.optim.AdamW(net.parameters(), lr=0.1)
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    gone = weakref.ref(accelerator)
    model, first = accelerator.prepare(net, first)
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    assert gone() is None
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model, second = accelerator.prepare(model, torch.optim.AdamW(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((2, 4), 1.0 + accelerator.process_index)).square().mean())
    second.step()
    with pytest.raises(Exception, match="Another accelerator has since prepared"):
        first.step()
    return net.weight.detach().clone()


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["none", "zero1"])
def test_a_model_whose_accelerator_is_gone_can_be_prepared_again(plugins):
    first, second = run_ranks(take_over, 2, plugins)
    assert torch.equal(first, second)
