"""What a Trainer does with losses, where a pipeline's last stage has to do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from neuron_accel.errors import UnsupportedModelError, UsageError

IGNORED = -100
"""The label that counts nothing."""


def loss_inside(model: nn.Module, compute_loss: Callable[..., Any] | None, label_smoother: Any) -> None:
    """Lets a model of transformers compute itself the loss that a Trainer computes from its logits.

    Args:
        model: as it was built.
        compute_loss: the Trainer's ``compute_loss_func``: (outputs, labels, num_items_in_batch=None) -> loss.
        label_smoother: the Trainer's, or None.

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

    model.loss_function = loss  # type: ignore[assignment]  # a property with a setter, meant for this


def filled_up(inputs: Any, microbatches: int, label_names: list[str]) -> Any:
    """A batch whose number of samples ``microbatches`` divides: with copies of the last sample that have no labels.

    Args:
        inputs: tensors by name, the batch first.
        microbatches: number of micro-batches to split it into.
        label_names: which of them are labels.

    Raises:
        UsageError: if samples are missing and there are no integer labels to tell copies by.
    """
    tensors = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim()}
    size = max((len(value) for value in tensors.values()), default=0)
    missing = -size % microbatches
    if not missing:
        return inputs
    labels = [name for name in label_names if name in tensors and not tensors[name].is_floating_point()]
    if not labels:
        raise UsageError(
            f"A batch of {size} samples cannot be split into {microbatches} micro-batches.",
            why="it could be filled up with samples that do not count, but it has no integer labels to mark them",
            fix="set dataloader_drop_last",
        )

    def longer(name: str, value: Any) -> Any:
        if name not in tensors or len(value) != size:
            return value
        copies = value[-1:].expand(missing, *value.shape[1:])
        return torch.cat([value, torch.full_like(copies, IGNORED) if name in labels else copies])

    items: Mapping[str, Any] = {name: longer(name, value) for name, value in inputs.items()}
    return items
