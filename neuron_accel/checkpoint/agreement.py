"""Ranks that fail together: what one cannot do, none goes on from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from neuron_accel.engine.errors import CheckpointError, NeuronAccelError

if TYPE_CHECKING:
    from neuron_accel.engine.run import Run

T = TypeVar("T")


def agreed(run: Run, work: Callable[[], T]) -> T:
    """``work()``, if it succeeds on every rank; its first error otherwise, on every rank. Collective."""
    result: Any = None
    error: NeuronAccelError | None = None
    try:
        result = work()
    except NeuronAccelError as e:
        error = e
    except Exception as e:
        error = CheckpointError(f"Unexpected: {e!r}", where=f"rank {run.backend.rank}")
        error.__cause__ = e
    errors = run.backend.all_gather_object(error, run.world) if run.world.size > 1 else [error]
    first = next((e for e in errors if e is not None), None)
    if first is not None:
        raise error if error is not None else first
    return result
