"""What a loop writes to gradients and weights between our calls counts on XLA ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time

GRADIENTS = {
    "data": lambda g: g.data.mul_(0.5),
    "clamped data": lambda g: g.data.clamp_(-1e-2, 1e-2),
    "assigned rows": lambda g: g.__setitem__(slice(2), 0),
    "view": lambda g: g.view(-1)[:3].mul_(0.5),
    "detached": lambda g: g.detach().mul_(0.5),
    "in place": lambda g: g.mul_(0.5),
    "nothing": lambda g: None,
}
no_grad = torch.no_grad()
WEIGHTS = {
    "nothing": lambda w: None,
    "init": lambda w: nn.init.constant_(w, 0.25),
    "zero": no_grad(lambda w: w.zero_()),
    "rows": no_grad(lambda w: w.__setitem__(slice(2), 0)),
    "data": lambda w: w.data[:2].fill_(0.5),
    "detached": lambda w: w.detach().mul_(0.5),
    "view": no_grad(lambda w: w.view(-1)[:3].zero_()),
    "average": no_grad(lambda w: w.copy_(torch.ones_like(w).lerp(w, 0.5))),
    "assigned": lambda w: setattr(w, "data", w.data * 0.5),
}


class Layers(nn.Module):
    """A layer for each way to write."""

    def __init__(self, ways, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 5, dtype=dtype) for _ in ways)

    def forward(self, x):
        return sum(layer(x.to(layer.weight.dtype)).square().float().mean() for layer in self.layers)


def batches(count):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 6, generator=generator) for _ in range(count)]


def train(model, optimizer, backward, steps, share, *, edit=None, write=None):
    for x in batches(steps):
        backward(model(share(x)))
        for way, layer in zip(edit or (), model.layers, strict=False):
            edit[way](layer.weight.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=edit is None)  # zeroed in place, gradients have aliases of the step before
        for way, layer in zip(write or (), model.layers, strict=False):
            write[way](layer.weight)


def on_ranks(plugins, dtype, kind):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins, "backend": "xla"})
    with one_at_a_time():
        model = Layers(KINDS[kind], dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank

    def share(x):
        return x.chunk(size)[rank].to(accelerator.device)

    train(model, optimizer, accelerator.backward, 2, share, **{kind: KINDS[kind]})
    return [value.cpu() for value in accelerator.get_state_dict(model).values()]


KINDS = {"edit": GRADIENTS, "write": WEIGHTS}
PLUGINS = {"data_parallel": [], "zero1": ["zero1"], "fully_sharded": [{"fully_sharded": {"modules": "layers.*"}}]}
CASES = [("data_parallel", "edit"), ("zero1", "edit"), ("fully_sharded", "edit"), ("zero1", "write")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_it_counts_as_in_one_process(name, kind):
    model = Layers(KINDS[kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    train(model, optimizer, torch.Tensor.backward, 2, lambda x: x, **{kind: KINDS[kind]})
    found = run_ranks(on_ranks, 2, PLUGINS[name], torch.float32, kind, backend="xla", timeout=110)[0]
    for way, value, expected in zip(KINDS[kind], found[::2], list(model.state_dict().values())[::2], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6, msg=lambda m, way=way: f"{way}: {m}")


def with_masters():
    """bf16 weights, of which a row is set before each step, and how many graphs each step has compiled."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": ["zero1"], "backend": "xla"})
    with one_at_a_time():
        model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    graphs = []
    for step in range(8):
        before = accelerator.run.backend.compilations
        accelerator.backward(model(torch.ones(1, 4, dtype=torch.bfloat16, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if step < 5:
            model.weight.data[0] = 0.5
        graphs.append(accelerator.run.backend.compilations - before)
    return accelerator.get_state_dict(model)["weight"].cpu(), graphs


def test_master_weights_keep_their_digits_and_steps_their_graph():
    weight, graphs = run_ranks(with_masters, 2, backend="xla", timeout=110)[0]
    torch.testing.assert_close(weight[0], torch.full((4,), 0.5 - 3e-3).bfloat16())
    torch.testing.assert_close(weight[1:], torch.full((3, 4), 1 - 8e-3).bfloat16())
    assert not any(graphs[3:6])
