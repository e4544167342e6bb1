"""On devices that compile graphs: numbers that change are tensors, and tied parameters stay tied when a model is
moved."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from neuron_accel.engine.optim.lazy_hyperparameters import as_device_data
from neuron_accel.engine.runtime.tensors import place
from neuron_accel.engine.sharding.parameters import ParameterMap


class Device:
    device = torch.device("cpu")

    def number(self, value):
        return torch.tensor(value)


def parameters():
    return [nn.Parameter(torch.ones(3))]


def stepped(options, count, gradient, *, lazy):
    """Returns the parameters and step counters after one step of an AdamW that has taken ``count`` steps before."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.tensor([0.5, -2.0])), nn.Parameter(torch.ones(1))], **options)
    given = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in given:
        parameter.grad = torch.full_like(parameter, gradient)
        moments = {name: torch.full_like(parameter, 0.01) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(count)), **moments}
    with as_device_data(optimizer, Device()) if lazy else nullcontext():
        optimizer.step()
    return [p.detach() for p in given], [float(optimizer.state[p]["step"]) for p in given]


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.5), (0.9, 0.9)])
@pytest.mark.parametrize("count", [0, 1, 48, 49, 50, 700, 40_000, 1_000_000])
@pytest.mark.parametrize("rate", [0.0, 1.0, 1e-3])
def test_adam_on_the_host_steps_as_it_does(rate, count, betas):
    options = {"lr": rate, "betas": betas, "weight_decay": 0.1}
    mine, counters = stepped(options, count, 0.5, lazy=True)
    plain, reference = stepped(options, count, 0.5, lazy=False)
    assert counters == reference == [count + 1.0] * 2
    for value, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


def test_no_number_of_adam_is_one_that_a_graph_would_have_as_a_constant():
    optimizer = torch.optim.AdamW([{"params": parameters()}, {"params": parameters()}], lr=0.0, weight_decay=0.01)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[parameter] = {"step": torch.tensor(50_000.0)}
    with as_device_data(optimizer, Device()):
        assert len({group["lr"] for group in optimizer.param_groups} | {0.0}) == 3
        assert {group["weight_decay"] for group in optimizer.param_groups} == {0}
        (count,) = {float(state["step"]) for state in optimizer.state.values()}
        assert torch.tensor((1 - 0.999 ** (count + 1)) ** 0.5, dtype=torch.float32) != 1.0
    assert {float(state["step"]) for state in optimizer.state.values()} == {50_000.0}
    assert {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups} == {(0.0, 0.01)}


class OwnAdam(torch.optim.AdamW):
    pass


def unequal(optimizer):
    for count, parameter in enumerate(optimizer.param_groups[0]["params"]):
        optimizer.state[parameter] = {"step": torch.tensor(float(count))}


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (OwnAdam, lambda optimizer: None),
        (torch.optim.AdamW, unequal),
        (torch.optim.AdamW, lambda optimizer: optimizer.param_groups[0].update(betas=(0.99, 0.9))),
        (torch.optim.AdamW, lambda optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.25))),
        (torch.optim.Adam, lambda optimizer: optimizer.param_groups[0].update(capturable=True)),
    ],
    ids=["subclass", "unequal counters", "betas", "rate is a tensor", "capturable"],
)
def test_other_adams_get_the_learning_rate_as_a_tensor_and_count_on_the_device(make, change):
    optimizer = make([*parameters(), *parameters()], lr=0.25)
    change(optimizer)
    group = optimizer.param_groups[0]
    before = (group["lr"], group["capturable"])
    with as_device_data(optimizer, Device()):
        assert isinstance(group["lr"], torch.Tensor)
        assert group["lr"].item() == 0.25
        assert group["capturable"] is True
    assert (group["lr"], group["capturable"]) == before


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_numbers_that_would_be_constants_are_moved_by_nothing_that_shows(rate):
    optimizer = torch.optim.SGD(parameters(), lr=rate)
    with as_device_data(optimizer, Device()):
        moved = optimizer.param_groups[0]["lr"]
        assert moved != rate
        assert torch.tensor(1.0) * moved + 1 == torch.tensor(rate) + 1
    assert optimizer.param_groups[0]["lr"] == rate


def test_options_come_back_after_an_error():
    optimizer = torch.optim.Adam(parameters(), lr=0.5)
    with pytest.raises(RuntimeError), as_device_data(optimizer, Device()):
        raise RuntimeError
    assert optimizer.param_groups[0]["lr"] == 0.5


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.norm = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.LayerNorm(3)
        self.head.weight = self.embedding.weight


def test_tied_parameters_stay_tied():
    model = Tied()
    records = ParameterMap(model)
    place(model, torch.device("meta"), records)
    assert model.head.weight is model.embedding.weight
    assert records["head.weight"].current is model.embedding.weight
    assert {p.device.type for p in model.parameters()} == {"meta"}
