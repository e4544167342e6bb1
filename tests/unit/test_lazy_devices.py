"""What steps and models need on devices that compile: numbers that change as data, ties that survive a move."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.engine.hyperparameters import as_device_data
from neuron_accel.engine.parameters import ParameterMap
from neuron_accel.engine.placement import place


class Device:
    def __init__(self, *capabilities):
        self.capabilities, self.device = frozenset(capabilities), torch.device("cpu")


def parameters():
    return [nn.Parameter(torch.ones(3))]


def test_adam_gets_its_learning_rate_as_a_tensor_and_counts_on_the_device():
    optimizer = torch.optim.AdamW(parameters(), lr=0.25)
    with as_device_data(optimizer, Device("lazy")):
        group = optimizer.param_groups[0]
        assert isinstance(group["lr"], torch.Tensor)
        assert group["lr"].item() == 0.25
        assert group["capturable"] is True
    assert (group["lr"], group["capturable"]) == (0.25, False)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_numbers_that_would_be_constants_are_moved_by_nothing_that_shows(rate):
    optimizer = torch.optim.SGD(parameters(), lr=rate)
    with as_device_data(optimizer, Device("lazy")):
        moved = optimizer.param_groups[0]["lr"]
        assert moved != rate
        assert torch.tensor(1.0) * moved + 1 == torch.tensor(rate) + 1
    assert optimizer.param_groups[0]["lr"] == rate


def test_options_come_back_after_an_error():
    optimizer = torch.optim.Adam(parameters(), lr=0.5)
    with pytest.raises(RuntimeError), as_device_data(optimizer, Device("lazy")):
        raise RuntimeError
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_eager_devices_are_left_alone():
    optimizer = torch.optim.AdamW(parameters(), lr=0.0)
    with as_device_data(optimizer, Device("host-reads")):
        assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["capturable"]) == (0.0, False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head, self.norm = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.LayerNorm(3)
        self.head.weight = self.embedding.weight


def test_what_was_tied_stays_tied():
    model = Tied()
    records = ParameterMap(model)
    place(model, torch.device("meta"), records)
    assert model.head.weight is model.embedding.weight
    assert records["head.weight"].current is model.embedding.weight
    assert {p.device.type for p in model.parameters()} == {"meta"}
