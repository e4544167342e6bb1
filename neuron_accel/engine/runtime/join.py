# SPDX-License-Identifier: Apache-2.0
"""Uneven inputs: ranks that have run out of data take part in the collectives of the others.

A data-parallel step is a sequence of collectives in which every rank takes part. A rank whose epoch ended earlier would
leave the others waiting. While inputs may be uneven, ranks therefore announce each action of such a sequence before
they start it. A rank without data receives the announcements and performs the same actions: it contributes zeros to
sums and takes the same optimizer steps, so that its weights stay equal to those of the others. This is like torch's
``Join``, in which a joined rank is not updated but overwritten at the end.

Outside :meth:`Join.uneven` nothing is announced or sent, and a step calls no function of this file: who takes an action
looks at its attribute ``announced`` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from neuron_accel.errors import DesyncError, UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.plan.mesh import Mesh


class Ranks(Protocol):
    """The attributes of a run that describe its ranks."""

    backend: Backend

    @property
    def mesh(self) -> Mesh: ...
    @property
    def world(self) -> Group: ...
    @property
    def coordinates(self) -> dict[str, int]: ...
    def group(self, *axes: str) -> Group: ...


@dataclass(eq=False)
class JoinAction:
    """A collective action of a step. Where it is ``announced``, call it with the arguments of ``perform`` before it.

    Args:
        join: the join that it belongs to.
        name: name for messages.
        perform: is called on ranks without data.
        flush: completes pending reductions; called before other actions with ``flushes``.
        flushes: whether pending reductions are completed before it.
        compares: whether ranks with data must give it equal arguments.
        announced: whether calls are announced to other ranks now.
    """

    join: Join
    name: str
    perform: Callable[..., Any]
    flush: Callable[[], None] | None = None
    flushes: bool = False
    compares: bool = False
    announced: bool = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def __call__(self, *arguments: Any) -> None:
        if self.announced:
            self.join.announce(self, *arguments)


class Join:
    """The ranks that sum gradients with this one.

    Attributes:
        leader: position in their group of the first rank that still has (or was the last to have) data.
        has_parted: whether some rank has run out of data before others since inputs became uneven.
        is_uneven: whether this rank announces actions: inputs may be uneven, and it has data.
        is_through: whether this rank has run out of data, and performs the actions that others announce.
    """

    def __init__(self, run: Ranks) -> None:
        self._run = run
        self._actions: list[JoinAction] = []
        self.is_uneven = self.is_through = False
        self.leader = 0
        self.has_parted = False
        self._collective_only = self.register("a collective of the loop", _refuse)

    def __repr__(self) -> str:
        inputs = "out of data" if self.is_through else "uneven inputs" if self.is_uneven else "even inputs"
        return f"<{type(self).__name__}: {inputs}; {len(self._actions)} actions>"

    def register(self, name: str, perform: Callable[..., Any], **options: Any) -> JoinAction:
        """Creates an action; see :class:`JoinAction`. All ranks must register the same actions in the same order."""
        action = JoinAction(self, name, perform, **options, announced=self.is_uneven)
        self._actions.append(action)
        return action

    def drop(self, *actions: JoinAction) -> None:
        """Drops actions that are not taken any more, and what they keep. The others keep their numbers, which ranks
        send each other."""
        gone = set(actions)
        for action in gone:
            action.announced = False
        self._actions = [self._collective_only if action in gone else action for action in self._actions]

    def forget(self) -> None:
        """Drops all registered actions."""
        self._actions = [self._collective_only]

    def announce(self, action: JoinAction, *arguments: Any) -> None:
        """Announces the next action to ranks without data, and waits for them. Collective.

        Raises:
            DesyncError: on every rank, if ranks with data announce different actions.
        """
        if action.flushes:
            for other in self._actions:
                if other.flush is not None:
                    other.flush()
        self._exchange((self._actions.index(action), arguments))

    def collective_only(self, what: str) -> None:
        """Raises UsageError on every rank if one of them has run out of data; what follows needs all of them."""
        self._collective_only(what)
        if self._run.world.size > 1:
            with self._run.backend.events.collective(what.strip("`"), self._run.world):
                pass
        if self.is_uneven and self.has_parted:
            _refuse(what)

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Context that ranks may leave at different times; ranks that have left perform the actions of the others.

        Raises:
            UsageError: on a mesh with replicas, whose communication is not announced.
        """
        if axes := self._run.mesh.replica_axes:
            raise UsageError(
                "Inputs cannot be uneven if replicas train separately.",
                where=f"axis {', '.join(axes)}",
                why="a rank that runs out of data follows its own replica only, and the others would wait for it",
                fix="prepare loaders with even_batches=True, which is the default",
            )
        self.has_parted, self.leader = False, 0
        self._announce_all(True)
        try:
            yield
            self._announce_all(False)
            self.is_through = True  # from here on this rank performs what others announce
            while (announced := self._exchange(None)) is not None:
                index, arguments = announced
                self._actions[index].perform(*arguments)
        finally:
            self._announce_all(False)
            self.is_through = False

    def _announce_all(self, announced: bool) -> None:
        self.is_uneven = announced
        for action in self._actions:
            action.announced = announced

    def position_of_leader(self, axes: Sequence[str]) -> int:
        """Returns the position, in the group along some of the gradient axes, of the rank with the leader's coordinates
        along these axes."""
        if not self.leader:  # the first of all is the first along some axes, too
            return 0
        run = self._run
        group, everyone = run.group(*axes), run.group(*run.mesh.gradient_axes)
        leader = run.mesh.coordinates(everyone.ranks[self.leader])
        return group.ranks.index(run.mesh.rank(run.coordinates | {axis: leader[axis] for axis in axes}))

    def _exchange(self, mine: tuple[int, tuple[Any, ...]] | None) -> tuple[int, tuple[Any, ...]] | None:
        """Returns the action that ranks with data announce, or None if no rank has data."""
        everyone = self._run.backend.all_gather_object(mine, self._run.group(*self._run.mesh.gradient_axes))
        busy = {position: announced for position, announced in enumerate(everyone) if announced is not None}
        if not busy:
            return None
        self.leader = min(busy)
        self.has_parted = len(busy) < len(everyone)
        wanted = {(index, arguments if self._actions[index].compares else ()) for index, arguments in busy.values()}
        if len(wanted) > 1:
            names = {
                position: " ".join([self._actions[index].name, *(map(repr, arguments) if compares else ())])
                for position, (index, arguments) in busy.items()
                for compares in [self._actions[index].compares]
            }
            raise DesyncError(
                "Ranks perform different actions in a step.",
                where="; ".join(f"data-parallel rank {position}: {name}" for position, name in names.items()),
                why="each would wait for the others forever",
                fix="let every rank run the same loop: the same accumulation, the same number of steps per batch",
            )
        return busy[self.leader]


def _refuse(what: str) -> None:
    raise UsageError(
        f"{what} is not possible while some ranks have run out of data.",
        where="inside `join_uneven_inputs`",
        why="it needs a value from every rank, and ranks without data have none",
        fix="do it after the loop, or train with even_batches=True",
    )
