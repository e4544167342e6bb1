# SPDX-License-Identifier: Apache-2.0
"""Splitting a batch into micro-batches, and the weight of each micro-batch in the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from neuron_accel.errors import UsageError

IGNORED = -100
"""The label that is ignored in the loss, the default of transformers and torch."""


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, dict) or hasattr(value, "items"):
        for _, item in value.items():
            yield from tensors(item)


def convert(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Returns the same nested value with ``change`` applied to every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [convert(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "items"):
        return {key: convert(item, change) for key, item in value.items()}
    return value


def batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the size of the batch, which is the size of the first dim of the first tensor with dims.

    Raises:
        UsageError: if there is no tensor.
    """
    for tensor in (*tensors(args), *tensors(kwargs)):
        if tensor.dim():
            return tensor.shape[0]
    raise UsageError("The model was called without a tensor.", why="a pipeline splits a batch into micro-batches")


def split(args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Returns the arguments of each micro-batch: equal slices along the first dim.

    A tensor without dims, or whose first dim has size 1, is passed to every micro-batch.

    Raises:
        UsageError: if the batch is not divisible by ``count``, or a tensor can be neither split nor used by all
            micro-batches.
    """
    size = batch_size(args, kwargs)
    if size % count:
        legal = [n for n in range(1, size + 1) if size % n == 0]
        nearest = min(legal, key=lambda n: (abs(n - count), n))
        raise UsageError(
            f"A batch of {size} samples cannot be split into {count} micro-batches.",
            where="num_microbatches",
            why="all micro-batches have the same shape",
            fix=f"use {nearest} micro-batches, a batch size that {count} divides, or drop_last=True in the loader",
        )

    def part(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def of(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and tensor.shape[0] == size:
                return tensor if count == 1 else tensor.chunk(count)[index]
            if tensor.dim() == 0 or tensor.shape[0] == 1 or count == 1:
                return tensor
            raise UsageError(
                f"A tensor of shape {tuple(tensor.shape)} cannot be split into micro-batches.",
                why=f"its first dim is neither that of the batch, {size}, nor 1",
                fix="give it a first dim of the batch's size, or use num_microbatches=1",
            )

        return of

    return [(convert(args, part(i)), convert(kwargs, part(i))) for i in range(count)]


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Returns shapes and dtypes of all tensors, which determine the shapes of activations."""
    return tuple((tuple(t.shape), t.dtype) for t in (*tensors(args), *tensors(kwargs)))


class LossWeights:
    """The weight of each micro-batch's loss in the loss of the batch.

    A transformers model for causal language modelling averages over target tokens, which are the labels except the
    first of each row. Any other model with integer labels averages over the labels that are not -100, and a model
    without integer labels over samples. A loss that was divided by ``num_items_in_batch`` is already a sum.

    Args:
        model: the model that is called.
        forward: the model's own forward.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        self._signature = inspect.signature(forward)
        standard = hasattr(type(model), "loss_function")
        self._shifted = standard and getattr(model, "loss_type", None) in (None, "ForCausalLM")

    def of(self, calls: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[torch.Tensor | float]:
        """Returns the weight of each micro-batch, as a 0-dim float32 tensor on the device of the labels, or a
        number."""
        given = [self._arguments(*call) for call in calls]
        if given[0].get("num_items_in_batch") is not None:
            return [1.0] * len(calls)
        counts = [count for arguments in given if (count := self._count(arguments)) is not None]
        if len(counts) < len(calls):
            return [1.0 / len(calls)] * len(calls)
        total = torch.stack(counts).sum()
        return [count / total for count in counts]

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = dict(self._signature.bind_partial(*args, **kwargs).arguments)
        for parameter in self._signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name, {})
        return arguments

    def _count(self, arguments: dict[str, Any]) -> torch.Tensor | None:
        labels = arguments.get("labels")
        if self._shifted and isinstance(arguments.get("shift_labels"), torch.Tensor):
            labels = arguments["shift_labels"]
        elif self._shifted and isinstance(labels, torch.Tensor):
            labels = labels[..., 1:]
        if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.is_complex():
            return None
        return (labels != IGNORED).sum().float()
