# SPDX-License-Identifier: Apache-2.0
"""Training loops in which ranks have different numbers of batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.data_loader import DataLoaderDispatcher

from neuron_accel.engine.runtime.tensors import broadcast_tensors, buffers_by_axes, state_tensors

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.runtime.run import PreparedModel, Run


@contextmanager
def join_uneven_inputs(run: Run) -> Iterator[None]:
    """A context manager that ranks may leave after different numbers of steps, with equal weights.

    A rank that has run out of batches takes part in the backward passes, clipping, optimizer and scheduler steps of the
    others without samples: gradients are still divided by the number of all ranks, as under torch's ``Join``.
    """
    with run.join.uneven():
        yield
    if not run.join.has_parted:
        return
    # Buffers may differ, and weights too if the loop itself changed gradients.
    for model in run.models:
        for axes, tensors in _by_axes(model, run).items():
            broadcast_tensors(tensors, run, run.group(*axes), run.join.position_of_leader(axes))


def _by_axes(model: PreparedModel, run: Run) -> dict[tuple[str, ...], list[torch.Tensor]]:
    """The parameters and buffers of a model, by the gradient axes over which they are replicated."""
    named = dict(model.module.named_buffers())
    result = {axes: [named[name] for name in names] for axes, names in buffers_by_axes(model, run).items()}
    for tensor in state_tensors(model.module):
        record = model.parameters.find(tensor)
        if record is not None and record.weights is None:  # of those, each rank keeps its own elements
            result.setdefault(record.reduction_axes(run.mesh), []).append(tensor)
    return result


@contextmanager
def even_batches_as(value: bool | None, loaders: Iterable[Any]) -> Iterator[None]:
    """A context manager that overrides ``even_batches`` of prepared loaders; with None it does nothing."""
    changed = []
    if value is not None:
        for loader in loaders:
            sampler: Any = getattr(loader, "batch_sampler", None)
            if isinstance(loader, DataLoaderDispatcher) or not hasattr(sampler, "even_batches"):
                warnings.warn(
                    "Overriding even_batches is only supported for map-style datasets; the loader of an iterable "
                    "dataset is not changed.",
                    stacklevel=4,
                )
                continue
            changed.append((sampler, sampler.even_batches))
            sampler.even_batches = value
    try:
        yield
    finally:
        for sampler, previous in changed:
            sampler.even_batches = previous
