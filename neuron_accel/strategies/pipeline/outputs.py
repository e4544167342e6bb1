# SPDX-License-Identifier: Apache-2.0
"""Outputs of a pipelined model: those of the last stage for its micro-batches, merged and sent to every rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.contract import Group, Run

TENSOR, MAPPING, TUPLE = 0, 1, 2
"""Kinds of outputs: a tensor, an output with names, a tuple."""


class PipelineOutput(OrderedDict):
    """Outputs by name, as attributes and by position, like those of transformers; entries that are None are left out.

    An attribute and the entry of its name are the same: assigning either changes both.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f"outputs are assigned by name, not by {key!r}")
        if value is None:
            self.pop(key, None)
        else:
            super().__setitem__(key, value)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


def kind_of(output: Any) -> int:
    if isinstance(output, torch.Tensor):
        return TENSOR
    return TUPLE if isinstance(output, (tuple, list)) else MAPPING


def expected_kind(model: nn.Module) -> int:
    """Returns the kind of output that ``model`` returns, by its configuration; a tensor for models without one."""
    config = getattr(model, "config", None)
    if config is None:
        return TENSOR
    return MAPPING if getattr(config, "return_dict", True) else TUPLE


def loss_of(output: Any) -> torch.Tensor:
    """Returns the loss in a model's output: the output itself, its ``loss``, or its first entry.

    Raises:
        UsageError: if there is none.
    """
    loss: Any
    if isinstance(output, torch.Tensor):
        loss = output
    elif isinstance(output, (tuple, list)):
        loss = output[0] if output else None
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise UsageError(
            "The model returned no loss.",
            where="the last stage of the pipeline",
            why="in training the backward pass runs inside the model's call, so the loss has to be computed there",
            fix="pass labels, or return the loss from forward; to predict, call model.eval()",
        )
    return loss.reshape(())


def of_loss(kind: int, loss: torch.Tensor) -> Any:
    """Returns an output of that kind that consists of a loss only."""
    return {TENSOR: loss, TUPLE: (loss,)}.get(kind) if kind != MAPPING else PipelineOutput(loss=loss)


def merge_outputs(outputs: Sequence[Any], weights: Sequence[torch.Tensor | float]) -> tuple[int, list[tuple[str, Any]]]:
    """Merges the outputs for micro-batches into the output for the batch: tensors with dims are concatenated, 0-dim
    tensors are averaged with ``weights``, other values are left out. Returns the kind of the output, and its names and
    tensors."""
    kind = kind_of(outputs[0])
    if kind == TENSOR:
        rows = [[("", output)] for output in outputs]
    elif kind == TUPLE:
        rows = [[(str(i), value) for i, value in enumerate(output)] for output in outputs]
    else:
        rows = [list(_items(output)) for output in outputs]
    merged = []
    for column in zip(*rows, strict=True):
        name, values = column[0][0], [value for _, value in column]
        if all(isinstance(value, torch.Tensor) for value in values):
            merged.append((name, _merge(values, weights)))
    return kind, merged


def _items(output: Any) -> Any:
    return output.items() if hasattr(output, "items") else vars(output).items()


def _merge(values: list[torch.Tensor], weights: Sequence[torch.Tensor | float]) -> torch.Tensor:
    if values[0].dim():
        return torch.cat(values) if len(values) > 1 else values[0]
    # The mean loss of a micro-batch without targets is NaN; its weight is 0.
    parts = [_weighted(value, weight) for value, weight in zip(values, weights, strict=True)]
    return torch.stack(parts).sum().to(values[0].dtype)


def _weighted(value: torch.Tensor, weight: torch.Tensor | float) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, 0.0, value * weight)
    return value * weight if weight else torch.zeros_like(value)


def broadcast_outputs(
    kind: int, fields: list[tuple[str, torch.Tensor]] | None, run: Run, group: Group, *, only_loss: bool
) -> Any:
    """Broadcasts the output from the last rank of a pipeline to all its ranks. Collective.

    Args:
        kind: kind of the output; used on the last rank only.
        fields: names and tensors on the last rank, None on the others.
        only_loss: leaves out everything but 0-dim tensors.
    """
    last = group.size - 1
    described = None
    if fields is not None:
        fields = [(name, value) for name, value in fields if not only_loss or value.dim() == 0]
        described = (kind, [(name, tuple(value.shape), value.dtype) for name, value in fields])
    kind, forms = run.backend.broadcast_object(described, group, last)
    values = [value for _, value in fields] if fields is not None else [None] * len(forms)
    result = []
    for (name, shape, dtype), value in zip(forms, values, strict=True):
        if value is None:
            value = torch.empty(shape, dtype=dtype, device=run.device)
        result.append((name, run.backend.broadcast(value.contiguous(), group, last)))
    if kind == TENSOR:
        return result[0][1]
    return tuple(value for _, value in result) if kind == TUPLE else PipelineOutput(result)
