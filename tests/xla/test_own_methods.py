"""Methods of a user's optimizer beside `step`, on ranks of torch_xla."""

from __future__ import annotations

import gc

import torch
from torch import nn

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.optimizers import Delegating


def on_device(device):
    """Addresses of the tensors on a device that Python knows."""
    return {id(value) for value in gc.get_objects() if issubclass(type(value), torch.Tensor) and value.device == device}


def shows_averages():
    """How many tensors on the device only the garbage collector frees after the call of a method."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": ["zero1"], "backend": "xla"})
    with one_at_a_time():
        model = nn.Linear(4, 4)
    rate = torch.tensor(0.1, device=accelerator.device)  # so that it and the counter of steps are on the device
    model, optimizer = accelerator.prepare(model, Delegating(torch.optim.Adam(model.parameters(), lr=rate)))
    for _ in range(2):
        accelerator.backward(model(torch.ones(3, 4, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    gc.disable()
    optimizer.optimizer.eval()
    before = on_device(accelerator.device)
    gc.collect()
    return len(before - on_device(accelerator.device))


def test_a_method_leaves_nothing_on_the_device():
    """Ranks collect garbage at different times, and what is not collected is a part of the graph."""
    assert run_ranks(shows_averages, 1, backend="xla", timeout=110) == [0]
