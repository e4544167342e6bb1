# SPDX-License-Identifier: Apache-2.0
"""Losses of a Trainer with a pipeline, whose last stage computes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from neuron_accel.errors import UnsupportedModelError, UsageError

IGNORED = -100
"""The label that losses ignore."""


def loss_inside(model: nn.Module, compute_loss: Callable[..., Any] | None, label_smoother: Any) -> None:
    """Makes a model of transformers compute the loss that a Trainer would compute from its logits.

    Args:
        model: the model, before it is prepared.
        compute_loss: the Trainer's ``compute_loss_func``: (outputs, labels, num_items_in_batch=None) -> loss, or None.
        label_smoother: the Trainer's label smoother, or None.

    Raises:
        UnsupportedModelError: if the model's loss cannot be replaced.
    """
    if compute_loss is None and label_smoother is None:
        return
    if not hasattr(type(model), "loss_function"):
        raise UnsupportedModelError(
            f"The loss of {type(model).__name__} cannot be replaced.",
            why="in a pipeline the last stage computes the loss, and this model has no `loss_function` of transformers",
            fix="compute the loss in the model's forward, or train without a pipeline",
        )
    shifted = getattr(model, "loss_type", None) in (None, "ForCausalLM")

    def loss(
        logits: torch.Tensor, labels: torch.Tensor, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> torch.Tensor:
        outputs = {"logits": logits}
        if compute_loss is not None:
            return compute_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        return label_smoother(outputs, labels, shift_labels=shifted, num_items_in_batch=num_items_in_batch)

    model.loss_function = loss  # type: ignore[assignment]  # a property with a setter


def padded_batch(inputs: Any, microbatches: int, label_names: list[str]) -> Any:
    """Pads a batch to a multiple of ``microbatches`` samples, with copies of the last sample whose labels are ignored.

    Args:
        inputs: tensors by name, of shape ``[batch, ...]``.
        microbatches: number of micro-batches into which the batch is split.
        label_names: the names of labels.

    Raises:
        UsageError: if the batch is not a mapping, or has to be padded and has no integer labels.
    """
    if not isinstance(inputs, Mapping):
        raise UsageError(
            f"A batch is a {type(inputs).__name__}; in a pipeline it has to be a mapping of names to tensors.",
            why="the stages are given the arguments of the model's forward by name",
            fix="return a dict from the data collator, or train without a pipeline",
        )
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim()}
    size = max((len(value) for value in tensors.values()), default=0)
    missing = -size % microbatches
    if not missing:
        return inputs
    labels = [name for name in label_names if name in tensors and not tensors[name].is_floating_point()]
    if not labels:
        raise UsageError(
            f"A batch of {size} samples cannot be split into {microbatches} micro-batches.",
            why="it cannot be padded with samples that the loss ignores, as it has no integer labels",
            fix="set dataloader_drop_last",
        )

    def longer(name: str, value: Any) -> Any:
        if name not in tensors or len(value) != size:
            return value
        copies = value[-1:].expand(missing, *value.shape[1:])
        return torch.cat([value, torch.full_like(copies, IGNORED) if name in labels else copies])

    items: Mapping[str, Any] = {name: longer(name, value) for name, value in inputs.items()}
    return items
