"""Whatever way a loop writes to gradients, the step sees it, as in one process."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

from neuron_accel.testing import run_ranks

HALF = torch.tensor(0.5)

EDITS = {
    "nothing": lambda g: None,
    "read": lambda g: g.sum(),
    "data": lambda g: g.data.mul_(0.5),
    "data of rows": lambda g: g.data[:2].zero_(),
    "clamped data": lambda g: g.data.clamp_(-1e-3, 1e-3),
    "assigned rows": lambda g: g.__setitem__(slice(2), 0),
    "rows": lambda g: g[:2].zero_(),
    "last row": lambda g: g[-1].fill_(0.25),
    "detached": lambda g: g.detach().mul_(0.5),
    "view": lambda g: g.view(-1).mul_(0.5),
    "view of a view": lambda g: g.detach().view(-1)[1:3].add_(1.0),
    "column": lambda g: g.select(-1, 0).zero_(),
    "transposed": lambda g: g.t()[0].zero_(),
    "narrow": lambda g: g.narrow(0, 1, 1).copy_(g.narrow(0, 0, 1)),
    "parts": lambda g: g.chunk(2)[0].mul_(2),
    "unbound": lambda g: g.unbind(0)[0].mul_(2),
    "numpy": lambda g: g.numpy().__setitem__(0, 0),
    "in place": lambda g: g.mul_(0.5),
    "sign": lambda g: g.sign_(),
    "copied": lambda g: g.copy_(g * HALF),
    "masked": lambda g: g.masked_fill_(g > 0, 0),
    "boolean index": lambda g: g.__setitem__(g > 0, 0),
    "index": lambda g: g.index_fill_(0, torch.tensor([0]), 0.0),
    "foreach": lambda g: torch._foreach_mul_([g], 0.5),
    "foreach of views": lambda g: torch._foreach_mul_([g.data, g[:1]], 0.5),
    "out": lambda g: torch.mul(g, HALF, out=g),
    "out of a view": lambda g: torch.mul(g, HALF, out=g.detach()),
    "assigned data": lambda g: setattr(g, "data", g.data * 0.5),
    "set": lambda g: g.set_(g * 0.5),
    "read, then rows": lambda g: (g.norm(), g[:2].zero_()),
}
COMPOSITIONS = {
    "data_parallel": [],
    "zero1": [{"zero1": {"bucket_cap_mb": 1e-6}}],
    "zero1, parameters": [{"zero1": {"partition": "parameters", "bucket_cap_mb": 1e-6}}],
    "fully_sharded": [{"fully_sharded": {"modules": "layers.*"}}],
}


class Layers(nn.Module):
    """A layer for each edit, in a bucket of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5) for _ in EDITS)

    def forward(self, x):
        return sum(layer(x).square().float().mean() for layer in self.layers)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5))


def batches(accelerator, count):
    generator = torch.Generator().manual_seed(5)
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator).chunk(size)[rank].to(accelerator.device)


def prepared(plugins, model, **options):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, **options)
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))


def full_weights(accelerator, model):
    """The weights, on every rank."""
    weights = [value.clone() for value in accelerator.get_state_dict(model).values()]
    return accelerator.run.backend.broadcast_object(weights, accelerator.run.world)


def edited(plugins):
    """For each dtype, the weights after two steps, and gradients that were read after the edits and after the step."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        accelerator, model, optimizer = prepared(plugins, Layers().to(dtype))
        seen = []
        for x in batches(accelerator, 2):
            accelerator.backward(model(x.to(dtype)))
            for (name, edit), layer in zip(EDITS.items(), model.layers, strict=True):
                if name != "numpy" or dtype is torch.float32:  # numpy has no bf16
                    edit(layer.weight.grad)
            seen += [layer.weight.grad.clone() for layer in model.layers]
            optimizer.step()
            seen += [layer.weight.grad.clone() for layer in model.layers]
            optimizer.zero_grad()
        found[dtype] = dict(enumerate(seen)), dict(enumerate(full_weights(accelerator, model)))
        accelerator.free_memory()
    return found


@functools.cache
def plain(loop):
    return run_ranks(loop, 1, [])[0]


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_every_way_to_edit_a_gradient_counts(name):
    for found in run_ranks(edited, 2, COMPOSITIONS[name]):
        torch.testing.assert_close(found[torch.float32], plain(edited)[torch.float32], rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found[torch.bfloat16], plain(edited)[torch.bfloat16], rtol=2e-2, atol=2e-2)


def edited_between_micro_batches(plugins):
    """Edits reduced gradients, then those with a gradient of this rank alone on top, then reduced ones again."""
    accelerator, model, optimizer = prepared(plugins, net())
    reads = []
    for step, x in enumerate(batches(accelerator, 6)):
        with accelerator.no_sync(model) if step % 3 == 1 else contextlib.nullcontext():
            accelerator.backward(model(x).square().mean())
        model[0].weight.grad[:2] = 0
        model[0].weight.grad.data.clamp_(-0.1, 0.1)
        model[2].weight.grad.mul_(0.5)
        if step % 3 != 1:
            reads.append(model[0].weight.grad.clone())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return reads, full_weights(accelerator, model)


BETWEEN = {**COMPOSITIONS, "fully_sharded": [{"fully_sharded": {"modules": ["0", "2"]}}]}


@pytest.mark.parametrize("name", BETWEEN)
def test_edits_between_micro_batches_count(name):
    for found in run_ranks(edited_between_micro_batches, 2, BETWEEN[name]):
        torch.testing.assert_close(found, plain(edited_between_micro_batches), rtol=1e-5, atol=1e-7)
