"""Parameters that have no values at the moment."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from neuron_accel.engine.shards.released import release, restore
from neuron_accel.errors import UsageError


@pytest.fixture
def weight():
    parameter = nn.Parameter(torch.ones(4, 2))
    parameter.grad = torch.ones(4, 2)
    parameter.data = torch.full((), float("nan")).expand(4, 2)
    release([parameter])
    return parameter


def test_it_is_a_parameter_of_its_shape_and_gradient(weight):
    assert isinstance(weight, nn.Parameter)
    assert weight.is_leaf
    assert (weight.shape, weight.dtype, weight.numel(), len(weight)) == ((4, 2), torch.float32, 8, 4)
    assert "Parameter containing" in repr(weight)
    assert {weight: 1}[weight] == 1
    assert type(weight.grad) is torch.Tensor
    assert torch.nn.utils.clip_grad_norm_([weight], 1.0).item() == pytest.approx(8**0.5)
    weight.requires_grad_(False)
    assert not weight.requires_grad
    weight.requires_grad = True
    weight.grad = None
    torch.optim.AdamW([weight]).step()
    restore([weight])
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("name", ["to", "type_as", "expand_as", "view_as", "reshape_as"])
def test_another_tensor_takes_its_shape_or_dtype(weight, name):
    other = torch.zeros(4, 2, dtype=torch.float64 if name in ("to", "type_as") else torch.float32)
    result = getattr(other, name)(weight)
    assert type(result) is torch.Tensor
    assert result.sum() == 0
    assert weight.to(torch.float32) is weight
    assert torch.zeros_like(weight).sum() == 0


def test_its_gradient_is_read_without_torch_function(weight, monkeypatch):
    called = []
    monkeypatch.setattr(type(weight), "__torch_function__", lambda *args, **kwargs: called.append(args))
    assert weight.grad.sum() == 8
    weight.grad = None
    assert weight.requires_grad
    assert not called


@pytest.mark.parametrize(
    "use",
    [
        lambda w: w + 1,
        lambda w: w.T,
        lambda w: w.data.clone(),
        lambda w: w.to(torch.float64),
        lambda w: nn.Parameter(w.data).sum(),
        lambda w: copy.deepcopy(w).sum(),
        lambda w: torch.save(w, io.BytesIO()),
        lambda w: torch.nn.utils.parameters_to_vector([w]),
        lambda w: torch.nn.init.normal_(w),
        lambda w: w.tolist(),
        lambda w: torch.optim.SGD([w], lr=0.1).step(),
        lambda w: torch.compile(lambda x: x * 2, backend="eager")(w),
    ],
    ids=["sum", "T", "data", "to", "new", "deepcopy", "save", "vector", "init", "list", "optimizer", "compiled"],
)
def test_its_values_are_not_used(weight, use):
    with pytest.raises((UsageError, torch._dynamo.exc.TorchDynamoException), match=r"shape \(4, 2\) is used outside"):
        use(weight)
