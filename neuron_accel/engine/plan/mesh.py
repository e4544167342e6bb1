# SPDX-License-Identifier: Apache-2.0
"""The mesh of ranks: named axes, coordinates of ranks, and groups of ranks.

Ranks are numbered row-major over the axes, outer to inner: stages, replicas, data, sequence, model (pp, ..., dp, cp,
tp), so that ranks along the axis that communicates most are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from neuron_accel.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class AxisSpec:
    """An axis of the mesh.

    Args:
        name: short name, such as ``pp``, ``dp``, ``cp``, ``tp``.
        degree: number of ranks along the axis; with 1 it has no effect.
        kind: what differs between ranks along the axis.
    """

    name: str
    degree: int
    kind: AxisKind


DATA_AXIS = "dp"
"""Name of the axis of the remaining ranks, which no plugin needs to add."""


class AxisKind(Enum):
    """What differs between the ranks along an axis. The order is the mesh's, outer to inner."""

    STAGE = "stage"
    """Different layers, same data."""
    REPLICA = "replica"
    """Different samples, separate parameters: replicas that diverge, as in local SGD. The owner of gradient reduction
    does not reduce over them, loaders count them, and checkpoints store a copy for each. They begin with equal weights;
    the plugin that adds the axis synchronises them again."""
    DATA = "data"
    """Different samples, and the same parameters except for those that a layout shards along the axis: these ranks
    average gradients, and loaders count them."""
    SEQUENCE = "sequence"
    """Different positions of the same samples, and the same parameters except for those that a layout shards along the
    axis: these ranks average gradients."""
    MODEL = "model"
    """Different shards of the same parameters, same data."""

    @property
    def order(self) -> int:
        """Position of the kind in the mesh, from 0 for the outermost."""
        return list(AxisKind).index(self)


@dataclass(frozen=True)
class Mesh:
    """An immutable mesh.

    Args:
        axes: outer to inner; their degrees multiply to the number of ranks.
    """

    axes: tuple[AxisSpec, ...]

    @classmethod
    def build(cls, axes: Iterable[AxisSpec], world_size: int) -> Mesh:
        """Returns the mesh of ``world_size`` ranks with ``axes`` and, for the remaining ranks, :data:`DATA_AXIS`.

        Raises:
            PlanError: if a degree is not valid, an axis is given twice, or the degrees do not match the number of
                ranks.
        """
        axes = list(axes)
        names = [axis.name for axis in axes]
        if type(world_size) is not int or world_size < 1:
            raise PlanError(f"There are {world_size!r} ranks.", where="world size", fix="start at least one rank")
        for axis in axes:
            if type(axis.degree) is not int or axis.degree < 1:
                raise PlanError(
                    f"Axis {axis.name!r} has degree {axis.degree!r}.",
                    where=f"axis {axis.name!r}",
                    why="a degree is a number of ranks",
                    fix="give an integer of at least 1",
                )
            if names.count(axis.name) > 1:
                raise PlanError(
                    f"Axis {axis.name!r} is added more than once.",
                    where=f"axis {axis.name!r}",
                    why="an axis has one degree and one meaning",
                    fix="keep one of the plugins that add it",
                )
        needed = math.prod(axis.degree for axis in axes)
        if world_size % needed:
            product = " x ".join(f"{axis.name} {axis.degree}" for axis in axes)
            below = world_size // needed * needed
            legal = [n for n in (below, below + needed) if n > 0]
            nearest = min(legal, key=lambda n: (abs(n - world_size), n))
            start = f"`neuron-accel launch --nproc-per-node {nearest}`"
            if world_size == 1:
                fix = f"start {nearest} ranks: start it with {start}"
            else:
                fix = f"start {nearest} ranks ({start}), or choose degrees whose product divides {world_size}"
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            raise PlanError(
                f"{ranks} cannot be divided into groups of {needed} ({product}).",
                where=ranks,
                why="the number of ranks is a multiple of the product of all degrees; the rest is data parallel",
                fix=fix,
            )
        if DATA_AXIS not in names:
            axes.append(AxisSpec(name=DATA_AXIS, degree=world_size // needed, kind=AxisKind.DATA))
        elif needed != world_size:
            raise PlanError(
                f"The degrees multiply to {needed}, but there are {world_size} ranks.",
                where=f"{world_size} ranks",
                why=f"with a degree of axis {DATA_AXIS!r} given, no rank may be left over",
                fix=f"start {needed} ranks, or leave the degree of axis {DATA_AXIS!r} out",
            )
        return cls(tuple(sorted(axes, key=lambda axis: (axis.kind.order, axis.name))))

    @cached_property
    def world_size(self) -> int:
        return math.prod(axis.degree for axis in self.axes)

    def degree(self, axis: str) -> int:
        """Returns the degree of ``axis``; 1 if the mesh has no axis of that name."""
        return next((a.degree for a in self.axes if a.name == axis), 1)

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        """Names of all axes, also those of one rank, outer to inner."""
        return tuple(axis.name for axis in self.axes)

    def names(self, *kinds: AxisKind) -> tuple[str, ...]:
        """Returns the names of the axes of these kinds that have more than one rank, outer to inner."""
        return tuple(axis.name for axis in self.axes if axis.kind in kinds and axis.degree > 1)

    @cached_property
    def data_axes(self) -> tuple[str, ...]:
        """Axes along which ranks process different samples. Their size determines loaders, schedulers and gathered
        metrics."""
        return self.names(AxisKind.REPLICA, AxisKind.DATA)

    @cached_property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes whose ranks have separate parameters."""
        return self.names(AxisKind.REPLICA)

    @property
    def replicas(self) -> int:
        """Number of copies of the model that may differ."""
        return self.size(self.replica_axes)

    def replica(self, rank: int) -> int:
        """Returns the number of the replica that a global rank belongs to; 0 if there is only one."""
        return self.position(rank, self.replica_axes)

    def size(self, axes: Iterable[str]) -> int:
        """Returns the number of ranks that differ along ``axes`` only."""
        return math.prod(self.degree(axis) for axis in axes)

    def position(self, rank: int, axes: Iterable[str]) -> int:
        """Returns the position of a global rank among the ranks that differ along ``axes`` only."""
        at, number = self.coordinates(rank), 0
        for axis in axes:
            number = number * self.degree(axis) + at.get(axis, 0)
        return number

    @cached_property
    def gradient_axes(self) -> tuple[str, ...]:
        """Axes over which gradients are averaged: those of other samples or positions. The gradient of a parameter that
        is sharded along one of them is summed over the others only (:meth:`ParameterRecord.reduction_axes`)."""
        return self.names(AxisKind.DATA, AxisKind.SEQUENCE)

    @cached_property
    def model_axes(self) -> tuple[str, ...]:
        """Axes whose ranks hold different shards of the model."""
        return self.names(AxisKind.STAGE, AxisKind.MODEL)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of a global rank along each axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a mesh of {self.world_size}")
        result = {}
        for axis in reversed(self.axes):
            rank, result[axis.name] = divmod(rank, axis.degree)
        return {axis.name: result[axis.name] for axis in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Inverse of :meth:`coordinates`. Axes that are left out have index 0; an axis that the mesh does not have must
        have index 0."""
        for name, index in coordinates.items():
            if not 0 <= index < self.degree(name):
                raise ValueError(f"index {index} is not on axis {name!r} of degree {self.degree(name)}")
        rank = 0
        for axis in self.axes:
            rank = rank * axis.degree + coordinates.get(axis.name, 0)
        return rank

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Returns the partition of all ranks into groups that differ only along ``axes``, with ranks ascending in each
        group."""
        moving, fixed = [0], [0]  # offsets of ranks within a group, and of groups, both ascending
        for axis in self.axes:
            offsets = moving if axis.name in axes else fixed
            offsets[:] = [offset * axis.degree + index for offset in offsets for index in range(axis.degree)]
            other = fixed if offsets is moving else moving
            other[:] = [offset * axis.degree for offset in other]
        return tuple(tuple(start + offset for offset in moving) for start in fixed)

    def __str__(self) -> str:
        present = [f"{axis.name} {axis.degree}" for axis in self.axes if axis.degree > 1]
        return " x ".join(present) if present else "one rank"
