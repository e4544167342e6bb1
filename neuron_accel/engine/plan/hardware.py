"""What a kind of machine can do, as data given to the planner, and whether a mesh fits it.

The planner knows no machine by name: who starts a run says what there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from neuron_accel.engine.plan.mesh import AxisKind, Mesh
from neuron_accel.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Limits of one kind of host.

    Args:
        name: of the machine, for messages.
        ranks_per_host: the numbers of ranks that may run on one host; the largest fills it.
        model_groups: the sizes of groups that divide parameters (tensor parallel), which stay within a host; one rank
            is always possible.
        several_hosts: whether ranks of several hosts can form groups. They fill their hosts then.
        partitions: the most ways in which one graph may divide the ranks into groups; None: any number.
    """

    name: str
    ranks_per_host: tuple[int, ...]
    model_groups: tuple[int, ...]
    several_hosts: bool = True
    partitions: int | None = None

    @property
    def full(self) -> int:
        """Ranks on a full host."""
        return max(self.ranks_per_host)

    def check_ranks(self, ranks: int) -> None:
        """Raises :class:`PlanError`, with the nearest legal number, unless this many ranks can run together."""
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
            why = f"one runs at most {self.full} ranks, and several cannot form groups"
        raise PlanError(
            f"{ranks} ranks cannot run on {self.name}.",
            where=f"hardware {self.name}, {ranks} ranks",
            why=why,
            fix=f"start {_nearest(ranks, legal)} ranks",
        )

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises :class:`PlanError`, with the nearest legal choice, unless every group of ``mesh`` can be formed."""
        self.check_ranks(mesh.world_size)
        for axis in mesh.axes:
            if axis.kind is AxisKind.MODEL and axis.degree > 1 and axis.degree not in self.model_groups:
                legal = {1, *(size for size in self.model_groups if mesh.world_size % size == 0)}
                raise PlanError(
                    f"Axis {axis.name!r} of degree {axis.degree} cannot be formed on {self.name}.",
                    where=f"hardware {self.name}, mesh {mesh}",
                    why=f"groups that divide parameters have {_listing(self.model_groups)} neighbouring ranks there",
                    fix=f"choose degree {_nearest(axis.degree, legal)}",
                )
        self._check_hosts(mesh)
        self._check_partitions(mesh)

    def _check_partitions(self, mesh: Mesh) -> None:
        """What a step divides the ranks into at least: along each axis, those that average gradients together with
        each axis that may hold parts of them, those that hold one model, and all."""
        axes = tuple(axis.name for axis in mesh.axes if axis.degree > 1)
        wanted = {
            *((axis,) for axis in axes),
            *((*mesh.gradient_axes, axis) for axis in mesh.model_axes),
            mesh.data_axes,
            mesh.gradient_axes,
            mesh.model_axes,
            axes,
        }
        divided = {mesh.groups(*names) for names in wanted if names}
        if self.partitions is not None and len(divided) > self.partitions:
            raise PlanError(
                f"{len(axes)} axes divide the ranks into groups in {len(divided)} ways, and {self.name} allows "
                f"{self.partitions} in one step.",
                where=f"hardware {self.name}, mesh {mesh}",
                why="each way needs communicators of its own, whose number in one compiled graph is limited",
                fix="leave out plugins that bring an axis, or give one of their axes degree 1",
            )

    def _check_hosts(self, mesh: Mesh) -> None:
        """Groups reach every host alike: the axes from the innermost up to any one fill hosts, or parts of one."""
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
                    f"Axis {axis.name!r} of degree {axis.degree} would use parts of hosts unevenly.",
                    where=f"hardware {self.name}, mesh {mesh}",
                    why=f"together with the axes inside it it takes {reached} ranks, hosts have {self.full}, and "
                    "groups between hosts have equally many ranks on each",
                    fix=f"choose degree {_nearest(axis.degree, legal)}",
                )
            inner = reached


def _nearest(wanted: int, legal: Iterable[int]) -> str:
    """The legal number below and the one above ``wanted``, the nearer first."""
    around = [
        max((n for n in legal if 0 < n < wanted), default=None),
        min((n for n in legal if n > wanted), default=None),
    ]
    near = sorted((n for n in around if n is not None), key=lambda n: (abs(math.log(n / wanted)), n))
    return " or ".join(map(str, near))


def _listing(numbers: Iterable[int]) -> str:
    listed = sorted(numbers)
    if len(listed) == 1:
        return str(listed[0])
    shown = [str(n) for n in listed] if len(listed) <= 10 else [*map(str, listed[:7]), "..."]
    return f"{', '.join(shown)} or {listed[-1]}" if len(listed) > 10 else f"{', '.join(shown[:-1])} or {shown[-1]}"
