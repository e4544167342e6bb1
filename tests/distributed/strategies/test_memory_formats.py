"""Weights in another order of memory, such as channels_last, train as in one process with every optimizer of torch."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from neuron_accel.testing import run_ranks

OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SGD fused": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
    "Adagrad fused": functools.partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3, fused=True),
}


def trained(plugins):
    """The weights after two steps by each optimizer."""
    from neuron_accel import NeuronAccelerator

    found = {}
    for name, make in OPTIMIZERS.items():
        accelerator = NeuronAccelerator(config={"plugins": plugins})
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
        model, optimizer = accelerator.prepare(model, make(model.parameters()))
        x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))
        for _ in range(2):
            mine = x.chunk(accelerator.data_parallel_size)[accelerator.data_parallel_rank]
            accelerator.backward(model(mine).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        weights = accelerator.get_state_dict(model)
        found[name] = {key: value.clone() for key, value in weights.items()}
        accelerator.free_memory()
    return found


@pytest.mark.parametrize("plugins", [[], ["zero1"], [{"zero1": {"partition": "parameters"}}]])
def test_channels_last(plugins):
    torch.testing.assert_close(run_ranks(trained, 2, plugins)[0], run_ranks(trained, 1, [])[0], rtol=1e-5, atol=1e-6)
