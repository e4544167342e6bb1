"""How gradients are collected into a bucket."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from neuron_accel.engine.optim.buckets import Bucket, FlatGradients
from neuron_accel.errors import UsageError


def flat_gradients(*shapes, flags=False):
    parameters = tuple(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    records = tuple(SimpleNamespace(fqn=f"weight{index}") for index, _ in enumerate(parameters))
    bucket = Bucket(records=records, parameters=parameters, dtype=torch.float32, partial_axes=(), reduction_axes=())
    return FlatGradients(bucket, flags=flags), parameters


def test_gradients_are_scaled_and_released_and_missing_ones_are_zeros():
    memory, (first, second) = flat_gradients(2, (2, 2), flags=True)
    second.grad = torch.full((2, 2), 3.0)
    flat, used = memory.collect(0.5)
    assert flat.tolist() == [0.0, 0.0, *[1.5] * 4, 0.0, 1.0]
    assert used == [False, True]
    assert first.grad is None
    assert second.grad is None


def test_a_gradient_that_comes_after_another_in_one_pass_is_added():
    memory, (weight,) = flat_gradients(2)
    for value in (1.0, 4.0):
        weight.grad = torch.full((2,), value)
        memory.take(0, 0.5)
    assert memory.collect(0.5)[0].tolist() == [2.5, 2.5]
    weight.grad = torch.ones(2)
    assert memory.collect(0.5)[0].tolist() == [0.5, 0.5], "of the next pass alone"


def test_a_gradient_that_a_loop_keeps_takes_part_once():
    """Autograd then accumulates the gradient of the next backward pass into the same memory."""
    memory, (weight,) = flat_gradients(2)
    weight.grad = torch.ones(2)
    flat, _ = memory.collect(1.0)
    (weight.grad,) = memory.parts(flat)
    weight.grad += 3.0
    assert memory.collect(0.5)[0].tolist() == [2.0, 2.0]


def test_a_sparse_gradient_is_refused_by_name():
    memory, (_, weight) = flat_gradients(1, (3, 1))
    weight.grad = torch.sparse_coo_tensor([[0]], [[1.0]], (3, 1))
    with pytest.raises(UsageError, match="'weight1' is sparse"):
        memory.take(1, 1.0)


def test_gradients_have_the_strides_of_their_parameters():
    """torch's fused optimizers read a gradient in the order of its parameter's memory."""
    memory, (first, image, gaps) = flat_gradients(2, (2, 3, 4, 4), (2, 2))
    image.data = image.data.to(memory_format=torch.channels_last)
    gaps.data = torch.zeros(2, 4)[:, ::2]
    for parameter in (first, image, gaps):
        parameter.grad = torch.arange(float(parameter.numel())).view(parameter.shape)
    expected = [parameter.grad for parameter in (first, image, gaps)]
    flat, _ = memory.collect(1.0)
    for reduced in (flat, flat.clone()):
        parts = memory.parts(reduced)
        assert [part.stride() for part in parts] == [(1,), image.stride(), (2, 1)]
        for part, value in zip(parts, expected, strict=True):
            torch.testing.assert_close(part, value)
