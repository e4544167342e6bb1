# SPDX-License-Identifier: Apache-2.0
"""The ranks over which parameters are sharded, if these are not all data-parallel ranks.

Groups within the data-parallel ranks are axes of the mesh of their own, of kind ``DATA``: loaders, schedulers and
averages treat them as data-parallel ranks, layouts and checkpoints do not depend on them, and limits of the hardware
are checked as for any axis. They stand inside of ``dp``, so that their ranks are consecutive data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from neuron_accel.contract import AxisKind, AxisSpec, ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.contract import Bucket, Group, Run

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


class ShardGroups:
    """The ranks over which parameters are sharded.

    Args:
        run: the run.
        hybrid: whether each group of ranks along :data:`SHARD` and :data:`NEAR` has all parameters.

    Attributes:
        axes: gradient axes over which parameters are sharded.
        replica_axes: gradient axes along which ranks have the same shards.
        near: the ranks between which parameters are gathered for the backward pass, if these are not all.
    """

    def __init__(self, run: Run, *, hybrid: bool) -> None:
        mesh = run.mesh
        same = mesh.names(AxisKind.DATA) if hybrid else ()
        self.replica_axes = tuple(axis for axis in same if axis not in (SHARD, NEAR))
        self.axes = tuple(axis for axis in mesh.gradient_axes if axis not in self.replica_axes)
        is_near = mesh.degree(NEAR) > 1 and self.axes != (NEAR,)
        self.near: Group | None = run.group(NEAR) if is_near else None

    def sharded(self, bucket: Bucket) -> Bucket:
        """Returns a bucket whose gradients are reduce-scattered over :attr:`axes` only: what these ranks have is a
        partial sum over the others, and an all-reduce of the shards completes it."""
        replicas = tuple(axis for axis in bucket.reduction_axes if axis in self.replica_axes)
        if not replicas:
            return bucket
        return replace(
            bucket,
            reduction_axes=tuple(axis for axis in bucket.reduction_axes if axis not in replicas),
            partial_axes=(*bucket.partial_axes, *replicas),
        )
