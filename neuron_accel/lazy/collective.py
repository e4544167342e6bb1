"""Models without memory in a run of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from neuron_accel.checkpoint.agreement import agreed
from neuron_accel.lazy.filling import Filled, Origin

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.engine.run import PreparedModel, Run


def origin_of(model: nn.Module, run: Run) -> Origin | None:
    """Where the tensors of a model without memory come from, asked before anything of it is rewritten; None if all have
    memory.

    Raises:
        ConfigurationError: if it was built for other numbers of ranks than there are.
    """
    origin = Origin.of(model)
    if origin is not None:
        origin.check_degrees({axis.name: axis.degree for axis in run.mesh.axes})
    return origin


def give_memory(origin: Origin, record: PreparedModel, run: Run) -> Filled:
    """Gives a model, rewritten by now, this rank's share of its weights, or room for it where a plugin names a
    checkpoint that is loaded next. Collective.

    Raises:
        UsageError: on every rank, for a tensor of which nothing is known.
        CheckpointError: on every rank, if a file cannot be read, or has changed.
    """
    loaded_next = len(run.models) == 1 and any(p.initial_weights() is not None for p in run.plan.plugins)
    _share_states(origin, run)
    return agreed(run, lambda: origin.fill(record.module, record.parameters, run.coordinates, values=not loaded_next))


def _share_states(origin: Origin, run: Run) -> None:
    """Lets every rank draw what the first one would have drawn, as if that had handed out its weights."""
    if run.world.size == 1:
        return
    for recording in origin.recordings:
        states = run.backend.broadcast_object([state.numpy().tobytes() for state in recording.states], run.world)
        recording.states[:] = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states]
