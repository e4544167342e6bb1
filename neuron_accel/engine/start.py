"""The start of a run: every rank plans for itself, and all find out whether they agree before a model is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from neuron_accel.engine.errors import DesyncError
from neuron_accel.engine.plan import Plan, difference

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend


def agree_on_plan(decide: Callable[[], Plan], backend: Backend) -> Plan:
    """The plan of this rank, if it is that of every rank. Collective, also where deciding fails.

    Args:
        decide: makes this rank's plan.

    Raises:
        DesyncError: on every rank, naming what differs, or the rank that could not decide.
        NeuronAccelError: whatever ``decide`` raises, on the rank where it does.
    """
    plan: Plan | None = None
    failure: Exception | None = None
    try:
        plan = decide()
        mine: Any = (plan.to_dict(), None)
    except Exception as error:
        failure, mine = error, (None, f"{type(error).__name__}: {error}")
    world = backend.new_group([range(backend.world_size)], "world")
    everyone = backend.all_gather_object(mine, world)
    if failure is not None:
        raise failure
    assert plan is not None
    for rank, (_, message) in enumerate(everyone):
        if message is not None:
            raise DesyncError(f"Rank {rank} cannot run.", where=f"rank {rank} of {backend.world_size}", why=message)
    reference = everyone[0][0]
    for rank, (theirs, _) in enumerate(everyone):
        parts = difference(reference, theirs)
        if parts:
            raise DesyncError(
                f"Rank {rank} has another configuration than rank 0.",
                where="; ".join(f"{p.path}: {p.left!r} on rank 0, {p.right!r} on rank {rank}" for p in parts[:5]),
                why="ranks that follow different plans wait for each other for ever",
                fix="give every rank the same plugins and options",
            )
    return plan
