"""The forward of a module that is wrapped, of its copies, and of what is read from a pickle."""

from __future__ import annotations

import copy
import inspect
import pickle

import torch
from torch import nn

from neuron_accel.contract import wrap_forward


def add(number):
    def call(module, forward, *args, **kwargs):
        return forward(*args, **kwargs) + number

    return call


def test_copies_compute_with_their_own_weights_through_every_wrapper():
    layer, x = nn.Linear(2, 2), torch.ones(2)
    plain = layer(x)
    restore = [wrap_forward(layer, add(1)), wrap_forward(layer, add(2))]
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    assert torch.equal(copied(x), torch.full((2,), 3.0))
    assert torch.equal(layer(x), plain + 1 + 2)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), plain)
    assert inspect.signature(layer.forward) == inspect.signature(nn.Linear(2, 2).forward)
    for undo in reversed(restore):
        undo()
    assert torch.equal(layer(x), plain)
    assert "forward" not in vars(layer)


def test_a_forward_that_is_not_of_the_module_stays_what_it_is():
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    layer.forward = other.forward
    undo = wrap_forward(layer, add(1))
    assert torch.equal(copy.deepcopy(layer)(torch.ones(2)), other(torch.ones(2)) + 1)
    undo()
    assert layer.forward == other.forward
