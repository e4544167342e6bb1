"""What autograd saves of a weight is found again from the weight alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuron_accel.strategies.fully_sharded.lazy_units import origin_of

WAYS = {
    "the weight": lambda w: w,
    "t": lambda w: w.t(),
    "transpose": lambda w: w.transpose(-2, 1),
    "permute": lambda w: w.permute(1, -1, 0),
    "cast, then transposed": lambda w: w.to(torch.bfloat16).transpose(-1, -2),
    "transposed, then cast": lambda w: w.transpose(0, -1).to(torch.float64),
}


@pytest.mark.parametrize("way", WAYS)
def test_transposes_and_casts(way):
    weight = nn.Parameter(torch.arange(24.0).view((4, 6) if way == "t" else (2, 3, 4)))
    saved, steps = WAYS[way](weight), []
    assert saved is weight or origin_of(saved, steps) is weight
    value = weight.detach()
    for method, arguments in reversed(steps):
        value = getattr(value, method)(*arguments)
    assert value.dtype == saved.dtype
    assert torch.equal(value, saved.detach())


@pytest.mark.parametrize(
    "compute", [lambda w: w * 2, lambda w: (w + 1).t(), lambda w: w.detach()], ids=["scaled", "shifted", "detached"]
)
def test_what_was_computed_otherwise_is_kept(compute):
    assert origin_of(compute(nn.Parameter(torch.ones(2, 3))), []) is None
