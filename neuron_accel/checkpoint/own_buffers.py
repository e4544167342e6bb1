"""Buffers that ranks have different values of.

A buffer is stored once, with the first rank's values, and any mesh loads these. But ranks see different samples, and
until somebody makes them alike have running statistics of their own. Those are stored besides, so that the same mesh
goes on exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from neuron_accel.checkpoint.files import checksums_of
from neuron_accel.checkpoint.snapshot import buffers_of, bytes_of

if TYPE_CHECKING:
    from neuron_accel.checkpoint.training import Training


def _buffers(training: Training) -> dict[str, torch.Tensor]:
    return {
        f"{index}/{names[0]}": value.detach()
        for index, model in training.numbered_models()
        for names, value in buffers_of(model).items()
    }


def own_buffers(training: Training) -> dict[str, torch.Tensor]:
    """This rank's buffers whose values are not those of the first rank that has them, on the host. Collective."""
    run = training.run
    mine = {name: value.to("cpu", copy=True) for name, value in _buffers(training).items()}
    sums = {name: checksums_of(bytes(bytes_of(value))) for name, value in mine.items()}
    first: dict[str, tuple[str, ...]] = {}
    for theirs in run.backend.all_gather_object(sums, run.world):
        first = theirs | first
    return {name: value for name, value in mine.items() if sums[name] != first[name]}


def set_own_buffers(training: Training, values: dict[str, torch.Tensor]) -> None:
    """The inverse, after all buffers were loaded."""
    buffers = _buffers(training)
    with torch.no_grad():
        for name, value in values.items():
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].copy_(value)
