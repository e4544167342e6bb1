# SPDX-License-Identifier: Apache-2.0
"""The ranks over which parameters are sharded, if these are not all data-parallel ranks.

Groups within the data-parallel ranks are axes of the mesh of their own, of kind ``DATA``: loaders, schedulers and
averages treat them as data-parallel ranks, layouts and checkpoints do not depend on them, and limits of the hardware
are checked as for any axis. They stand inside of ``dp``, so that their ranks are consecutive data-parallel ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_accel.contract import AxisKind, AxisSpec
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.contract import Group, Run

SHARD, NEAR = "shard", "shard_near"
"""Axes of the ranks over which parameters are sharded, and of those within them between which parameters are gathered
for the backward pass; together the first are ``SHARD`` and ``NEAR``. Axes of a kind are ordered by name."""


def check(reshard: bool | int | None, hybrid: int | None, where: str) -> None:
    """Checks ``reshard_after_forward`` and ``hybrid_shard_size``.

    Raises:
        ConfigurationError: if one is not a valid number of ranks, or they contradict each other.
    """
    for name, size in (("reshard_after_forward", reshard), ("hybrid_shard_size", hybrid)):
        if size is not None and not isinstance(size, bool) and size < 2:
            raise ConfigurationError(
                f"{name} is {size}; a group has at least 2 ranks.",
                where=where,
                fix="write reshard_after_forward=False to keep parameters for the backward pass"
                if name == "reshard_after_forward"
                else "leave it out to shard over all data-parallel ranks; replicated on each of them parameters are "
                "with ZeRO-1 (Zero1Plugin)",
            )
    if hybrid and reshard and hybrid % reshard:  # True divides every number
        raise ConfigurationError(
            f"reshard_after_forward={reshard} does not divide hybrid_shard_size={hybrid}.",
            where=where,
            why="after the forward pass a shard of the latter is divided into groups of the former",
            fix=f"choose a divisor of {hybrid}, or True",
        )


def added_axes(reshard: bool | int | None, hybrid: int | None) -> tuple[AxisSpec, ...]:
    """Returns the axes that these options of the plugin add to the mesh."""
    near = int(reshard or 1)  # True is 1
    sizes = {SHARD: (hybrid or near) // near, NEAR: near}
    return tuple(AxisSpec(name=name, degree=size, kind=AxisKind.DATA) for name, size in sizes.items() if size > 1)


def replica_axes(run: Run, hybrid: int | None) -> tuple[str, ...]:
    """Returns the gradient axes along which ranks have the same shards: with ``hybrid_shard_size``, those of kind
    ``DATA`` that :func:`added_axes` does not add."""
    return tuple(axis for axis in run.mesh.names(AxisKind.DATA) if axis not in (SHARD, NEAR)) if hybrid else ()


def near_group(run: Run, replicas: tuple[str, ...]) -> Group | None:
    """Returns the ranks between which parameters are gathered for the backward pass, if these are not all."""
    sharded = [axis for axis in run.mesh.gradient_axes if axis not in replicas]
    return run.group(NEAR) if run.mesh.degree(NEAR) > 1 and sharded != [NEAR] else None
