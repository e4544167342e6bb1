# SPDX-License-Identifier: Apache-2.0
"""Weights that a loop reads and writes between steps, whatever shards they are kept in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.engine.runtime.run import Run


@contextmanager
def full_weights(module: nn.Module, run: Run) -> Iterator[None]:
    """See :meth:`neuron_accel.NeuronAccelerator.full_weights`."""
    prepared = run.prepared(module)
    inside = {id(p) for p in (module if prepared is None else prepared.module).parameters()}
    records = [r for records in run.parameter_maps for r in records if id(r.current) in inside]
    if not records:
        raise UsageError(
            f"{type(module).__name__} is not a prepared model, nor a part of one.",
            where="`accelerator.full_weights`",
            fix="give the model that `prepare` returned, or a module inside it",
        )
    _before_save(run)
    kept = [(record.fqn, record.weights) for record in records if record.weights is not None]
    for fqn, weights in kept:
        if weights.hold is None:
            raise UsageError(
                f"The full values of {fqn!r} cannot be written.",
                where="`accelerator.full_weights`",
                why="the plugin that shards it does not provide `WeightShard.hold`",
                fix="write the elements that a rank keeps: `ParameterRecord.weights.tensor`",
            )
    try:
        for _, weights in kept:
            weights.hold(True)  # type: ignore[misc]  # checked above
        yield
        _before_save(run)  # before any is freed: one may have been assigned memory of another
    finally:
        for _, weights in kept:
            weights.hold(False)  # type: ignore[misc]
        _before_save(run)


def _before_save(run: Run) -> None:
    """Waits for weights that are being gathered, and takes those that the loop has written, as before saving."""
    for save in run.hooks["save"]:
        save(run)
