# SPDX-License-Identifier: Apache-2.0
"""Limits of a kind of machine, as data for the planner, and checks of a mesh against them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from neuron_accel.engine.plan.mesh import AxisKind, Mesh
from neuron_accel.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Limits of one kind of host.

    Args:
        name: name of the machine, for messages.
        ranks_per_host: valid numbers of ranks on one host; the largest is a full host.
        model_groups: valid sizes of groups that shard parameters (tensor parallel), which are within a host; 1 is
            always valid.
        several_hosts: whether ranks of several hosts can form groups; all hosts must then be full.
        partitions: maximum number of partitions of the ranks into groups in one graph; None for any number.
        torus: number of chips of a host along each dim of the torus that connects them, row-major; empty if all chips
            are connected with each other, or there is only one.
        ranks_per_chip: number of neighbouring ranks on one chip.
        core_bytes: memory of the device of one rank, in bytes; None if it is not known.
        peak_flops: dense BF16 operations that the device of one rank can do in a second; None if it is not known.
    """

    name: str
    ranks_per_host: tuple[int, ...]
    model_groups: tuple[int, ...]
    several_hosts: bool = True
    partitions: int | None = None
    torus: tuple[int, ...] = ()
    ranks_per_chip: int = 1
    core_bytes: int | None = None
    peak_flops: float | None = None

    @property
    def full(self) -> int:
        """Number of ranks on a full host."""
        return max(self.ranks_per_host)

    def check_ranks(self, ranks: int) -> None:
        """Raises :class:`PlanError`, with the nearest valid number, if this number of ranks cannot run together."""
        if ranks in self.ranks_per_host or (self.several_hosts and ranks % self.full == 0):
            return
        legal = {*self.ranks_per_host}
        if self.several_hosts:
            legal |= {ranks // self.full * self.full or self.full, (ranks // self.full + 1) * self.full}
        if ranks < self.full:
            why = f"one runs {_listing(self.ranks_per_host)} ranks"
        elif self.several_hosts:
            why = f"with several hosts each runs all of its {self.full} ranks"
        else:
            why = f"one runs at most {self.full} ranks, and several instances of it cannot form groups"
        raise PlanError(
            f"{ranks} ranks cannot run on {self.name}.",
            where=f"hardware {self.name}, {ranks} ranks",
            why=why,
            fix=f"start {_nearest(ranks, legal)} ranks",
        )

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises :class:`PlanError`, with the nearest valid choice, if a group of ``mesh`` cannot be formed."""
        self.check_ranks(mesh.world_size)
        for axis in mesh.axes:
            if axis.kind is AxisKind.MODEL and axis.degree > 1 and axis.degree not in self.model_groups:
                legal = {1, *(size for size in self.model_groups if mesh.world_size % size == 0)}
                raise PlanError(
                    f"Axis {axis.name!r} of degree {axis.degree} cannot be formed on {self.name}.",
                    where=f"hardware {self.name}, mesh {mesh}",
                    why=f"groups that shard parameters have {_listing(self.model_groups)} neighbouring ranks there",
                    fix=f"choose degree {_nearest(axis.degree, legal)}",
                )
        self._check_hosts(mesh)
        self._check_data_groups(mesh)
        self._check_partitions(mesh)

    def _check_data_groups(self, mesh: Mesh) -> None:
        """Checks the groups within the data-parallel ranks, along each of their axes but the outermost and along all of
        these."""
        inner = [axis.name for axis in mesh.axes if axis.kind is AxisKind.DATA and axis.degree > 1][1:]
        for names in dict.fromkeys((*((name,) for name in inner), tuple(inner))):
            problem = self.groups_problem(mesh.groups(*names)) if names else None
            if problem is not None:
                sizes = sorted({*self.model_groups, *self.ranks_per_host, 16})
                raise PlanError(
                    f"Groups of {mesh.size(names)} data-parallel ranks (axis {' x '.join(names)}) cannot be formed on "
                    f"{self.name}.",
                    where=f"hardware {self.name}, mesh {mesh}",
                    why=problem,
                    fix=f"choose groups of {_listing(sizes)} neighbouring ranks",
                )

    def _check_partitions(self, mesh: Mesh) -> None:
        """Checks the number of partitions of the ranks that a step uses at least: along each axis, along the gradient
        axes together with each model axis, along the data, gradient and model axes, and all ranks."""
        axes = tuple(axis.name for axis in mesh.axes if axis.degree > 1)
        wanted = {
            *((axis,) for axis in axes),
            *((*mesh.gradient_axes, axis) for axis in mesh.model_axes),
            mesh.data_axes,
            mesh.gradient_axes,
            mesh.model_axes,
            axes,
        }
        sharded = {mesh.groups(*names) for names in wanted if names}
        if self.partitions is not None and len(sharded) > self.partitions:
            raise PlanError(
                f"{len(axes)} axes divide the ranks into groups in {len(sharded)} ways, and {self.name} allows "
                f"{self.partitions} in one step.",
                where=f"hardware {self.name}, mesh {mesh}",
                why="each way needs separate communicators, whose number in one compiled graph is limited",
                fix="leave out plugins that add an axis, or give one of their axes degree 1",
            )

    def _check_hosts(self, mesh: Mesh) -> None:
        """Checks that groups have the same number of ranks on every host: the axes from the innermost up to any other
        must fill hosts, or a fraction of one."""
        inner = 1
        for axis in reversed(mesh.axes):
            reached = inner * axis.degree
            if mesh.world_size > self.full and reached % self.full and self.full % reached:
                legal = {
                    degree
                    for degree in range(1, mesh.world_size // inner + 1)
                    if (inner * degree) % self.full == 0 or self.full % (inner * degree) == 0
                }
                raise PlanError(
                    f"Axis {axis.name!r} of degree {axis.degree} would use hosts unevenly.",
                    where=f"hardware {self.name}, mesh {mesh}",
                    why=f"together with the axes inside it, it takes {reached} ranks, hosts have {self.full}, and "
                    "groups between hosts have equally many ranks on each",
                    fix=f"choose degree {_nearest(axis.degree, legal)}",
                )
            inner = reached

    # ---- checks of single collectives --------------------------------------------------------------------------------
    def groups_problem(self, groups: Sequence[Sequence[int]]) -> str | None:
        """Returns the reason why the groups of a collective cannot be formed, or None if they can.

        Within a host, a group must consist of blocks of neighbouring ranks, of a valid size, at equal distances. A
        group over several hosts must have the same ranks of each.
        """
        if len({len(group) for group in groups}) > 1:
            return "groups of one collective have equal sizes"
        sizes = {*self.model_groups, *self.ranks_per_host, 16}
        for group in groups:
            hosts: dict[int, list[int]] = {}
            for rank in sorted(group):
                hosts.setdefault(rank // self.full, []).append(rank % self.full)
            first = next(iter(hosts.values()))
            if any(ranks != first for ranks in hosts.values()):
                return f"ranks {_some(group)} differ between hosts of {self.full} ranks"
            block = next((i for i in range(1, len(first)) if first[i] != first[0] + i), len(first))
            starts = first[::block]
            distances = {b - a for a, b in itertools.pairwise(starts)}
            regular = all(first[i] == starts[i // block] + i % block for i in range(len(first)))
            if not regular or len(first) % block or len(distances) > 1:
                return f"ranks {_some(group)} are not blocks of neighbours at equal distances"
            if block not in sizes:
                return f"{block} neighbouring ranks {_some(group)} form no group on {self.name}"
        return None

    def ring_problem(self, pairs: Sequence[tuple[int, int]]) -> str | None:
        """Returns the reason why a permutation cannot be made by point-to-point messages, or None if it can.

        Args:
            pairs: source and target rank of each message.
        """
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        if len({*sources}) < len(pairs) or sorted(sources) != sorted(targets):
            return "only rings can be permuted: every rank that sends receives, once"
        for source, target in pairs:
            if not self._are_linked(source, target):
                return f"ranks {source} and {target} are on chips without a direct link"
        return None

    def _are_linked(self, one: int, other: int) -> bool:
        """Returns whether two ranks are on the same chip, or on chips of one host that are directly connected."""
        if one // self.full != other // self.full:
            return False
        chips = [rank % self.full // self.ranks_per_chip for rank in (one, other)]
        if chips[0] == chips[1] or not self.torus:
            return True
        apart = 0
        for size in reversed(self.torus):
            distance = abs(chips[0] % size - chips[1] % size)
            apart += min(distance, size - distance)
            chips = [chip // size for chip in chips]
        return apart == 1


def _some(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6]))
    return f"[{shown}, ...]" if len(ranks) > 6 else f"[{shown}]"


def _nearest(wanted: int, legal: Iterable[int]) -> str:
    """Returns the valid number below and the one above ``wanted``."""
    below = max((n for n in legal if 0 < n < wanted), default=None)
    above = min((n for n in legal if n > wanted), default=None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def _listing(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    if len(listed) == 1:
        return str(listed[0])
    shown = [str(n) for n in listed] if len(listed) <= 10 else [*map(str, listed[:7]), "..."]
    return f"{', '.join(shown)} or {listed[-1]}" if len(listed) > 10 else f"{', '.join(shown[:-1])} or {shown[-1]}"
