"""Under ZeRO-1 on XLA ranks, an optimizer finds what it knows of single parameters; complex ones are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.strategies.test_freezing import batches, net
from tests.distributed.strategies.test_optimizer_state import (
    STRATEGIES,
    Net,
    Plain,
    edited,
    of_several_optimizers,
    stages,
)

STEPS = 2


class Decaying(torch.optim.SGD):
    """SGD with a rate for each parameter, by the parameter or its ``id``, and none for those of some names."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        listed = [p for group in self.param_groups for p in group["params"]]
        self.rates = {p: 0.5 + index / 8 for index, p in enumerate(listed)}
        self.offsets = {id(p): torch.full(p.shape, 0.01 * index) for index, p in enumerate(listed)}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                if p.grad is None or name.endswith("1.bias"):
                    continue
                p.add_(p.grad + self.offsets[id(p)].to(p.device), alpha=-group["lr"] * self.rates[p])


def prepared(make):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": ["zero1"], "backend": "xla"})
    with one_at_a_time():
        model = net()
        optimizer = make(model.named_parameters(), lr=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def train_on_rank():
    """The weights, and the names that torch's own optimizer inside has."""
    accelerator, model, optimizer = prepared(Decaying)
    rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    for x in batches(STEPS):
        accelerator.backward(model(x.chunk(size)[rank].to(accelerator.device)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.free_memory()
    accelerator, _, optimizer = prepared(torch.optim.SGD)
    names = [name for group in optimizer.optimizer.inner.param_groups for name in group["param_names"]]
    accelerator.free_memory()
    return weights, names


def test_an_optimizer_finds_names_and_what_it_keeps_by_parameter():
    model = net()
    optimizer = Decaying(model.named_parameters(), lr=0.1)
    for x in batches(STEPS):
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    every = {name for name, _ in model.named_parameters()}
    for weights, names in run_ranks(train_on_rank, 2, backend="xla", timeout=110):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
        assert {name for joined in names for name in joined.split(", ")} == every


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_edits_of_state_by_parameter_have_the_effect_of_one_process(strategy):
    expected = edited(None)
    for found in run_ranks(edited, 2, STRATEGIES[strategy], "xla", backend="xla", timeout=110):
        for edit, of_edit in found.items():  # fully sharded weights are given to the main process
            torch.testing.assert_close(of_edit, {n: expected[edit][n] for n in of_edit}, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_optimizer_takes_over_the_parameters_of_an_earlier_one(strategy):
    expected = stages(Plain(), Net()).state_dict()
    for found in run_ranks(of_several_optimizers, 2, stages, STRATEGIES[strategy], "xla", backend="xla", timeout=110):
        torch.testing.assert_close(found, {n: expected[n] for n in found}, rtol=1e-4, atol=1e-5)


class WithComplex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, dtype=torch.complex64)

    def forward(self, x):
        return self.second(self.first(x).to(torch.complex64)).abs().square().mean()


def prepare_complex():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": ["zero1"], "backend": "xla"})
    with one_at_a_time():
        model = WithComplex()
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_complex_parameters_are_refused_by_name():
    with pytest.raises(RanksError) as caught:
        run_ranks(prepare_complex, 2, backend="xla", timeout=110)
    error = caught.value.errors[0]
    assert type(error).__name__ == "UsageError"
    assert "'second." in str(error)
    assert "is complex64" in str(error)
    assert "view_as_real" in str(error)
