"""What a loop does around the parameters of a model has the effect that it has in one process."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from neuron_accel.testing import run_ranks

COMPOSITIONS = {
    "data_parallel": [],
    "zero1": [{"zero1": {"bucket_cap_mb": 1e-4}}],
    "fully_sharded": [{"fully_sharded": {"modules": "0"}}],
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5))


def batches(accelerator, count):
    generator = torch.Generator().manual_seed(5)
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    for _ in range(count):
        yield torch.randn(8, 6, generator=generator).chunk(size)[rank].to(accelerator.device)


def cached_gradients(accelerator):
    """GradCache: a hook of a backward pass runs the passes of the micro-batches, each of which uses every weight."""
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))

    def inner(parts, gradient):
        with torch.enable_grad():
            for part in parts:
                (model(part).square().mean() / len(parts) * gradient).backward()

    for leaf in (True, False):
        for x in batches(accelerator, 1):
            loss = torch.zeros((), requires_grad=True)
            loss.register_hook(functools.partial(inner, x.split(2)))
            accelerator.backward(loss if leaf else loss * 1.0)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


FORMS = {"cached gradients": cached_gradients}


def loops(plugins):
    from neuron_accel import NeuronAccelerator

    return {name: form(NeuronAccelerator(config={"plugins": plugins})) for name, form in FORMS.items()}


@functools.cache
def alone():
    return run_ranks(loops, 1, [])[0]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_loops_train_as_in_one_process(composition):
    found = run_ranks(loops, 2, COMPOSITIONS[composition])[0]
    for name, weights in alone().items():
        for key, value in weights.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
