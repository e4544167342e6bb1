# SPDX-License-Identifier: Apache-2.0
"""Gathers the outputs of a model along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.contract import gather_from_group
from neuron_accel_context_parallel.gradients import mean_of_group, scale_gradient

if TYPE_CHECKING:
    from neuron_accel_context_parallel.zigzag import Zigzag

_PER_POSITION = ("logits", "last_hidden_state", "hidden_states")


class Joiner:
    """Gathers outputs along the sequence.

    Args:
        zigzag: shards sequences.
        keeps_logits: whether to gather logits in training although the model returns a loss.
    """

    def __init__(self, zigzag: Zigzag, *, keeps_logits: bool) -> None:
        self._zigzag, self._keeps_logits = zigzag, keeps_logits

    def join(self, output: Any, length: int, *, training: bool) -> Any:
        """Returns the output for the full sequence, equal on every rank. Collective.

        Args:
            output: the output of a model of transformers, a mapping.
            length: length of the full sequence.
            training: whether to leave out logits if there is a loss, unless ``keeps_logits``.
        """
        kept = {name: value for name, value in output.items() if value is not None}
        loss = kept.get("loss")
        if loss is not None:
            kept["loss"] = mean_of_group(loss, self._zigzag.backend, self._zigzag.group)
            if training and not self._keeps_logits:
                kept.pop("logits", None)
        for name in _PER_POSITION:
            if name in kept:
                kept[name] = _each(kept[name], lambda shard: self._full(shard, length))
        return type(output)(**kept)

    def _full(self, shard: torch.Tensor, length: int) -> torch.Tensor:
        """Gathers shards [batch, positions, ...] to [batch, length, ...]."""
        zigzag = self._zigzag
        scaled = scale_gradient(shard, zigzag.degree)
        ordered = gather_from_group(scaled, zigzag.backend, zigzag.group, 1, grad="chunk")
        return zigzag.restore(ordered, 1, length)


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tuple(change(item) for item in value) if isinstance(value, (tuple, list)) else change(value)
