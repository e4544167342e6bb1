# SPDX-License-Identifier: Apache-2.0
"""What happens in a run, as one stream of events that observers follow: parts of a step, hooks of plugins, calls that
every rank makes, collectives.

An event has a beginning and an end, and nothing else is known of it here: an observer counts collectives, compares them
between ranks, takes the time, or marks the event in a profile. Without an observer an event costs a function call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

if TYPE_CHECKING:
    import torch

    from neuron_accel.backends.group import Group

Category = Literal["part", "step", "call", "hook", "pipeline", "collective", "deferred", "wait", "graph", "user"]
CATEGORIES: frozenset[str] = frozenset(get_args(Category))


class Unobserved:
    """An event that no observer follows."""

    def __enter__(self) -> Unobserved:
        return self

    def __exit__(self, *error: object) -> None:
        return

    def received(self, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        """See :meth:`Collective.received`."""

    def waiting(self) -> Unobserved:
        return self


UNOBSERVED = Unobserved()
"""The one of them that there is."""


class Event:
    """Something that happens, from the beginning to the end of a ``with`` statement.

    Args:
        events: of the run.
        name: what happens.
        category: ``"part"`` of a step, or the ``"step"`` of an optimizer; ``"call"`` of a method that every rank calls;
            ``"hook"`` of a plugin; ``"pipeline"`` action; a ``"collective"``, or a ``"deferred"`` one, which is only
            added to a graph; the ``"wait"`` for a collective; the execution of a ``"graph"``; ``"user"`` for those of
            the training script.
        part: the part of a step that its time belongs to, such as ``"forward"``; None: that of the event around it.
        arguments: details.
    """

    __slots__ = ("_events", "arguments", "category", "name", "part")

    def __init__(
        self, events: Events, name: str, category: Category, part: str | None, arguments: dict[str, Any]
    ) -> None:
        self._events = events
        self.name, self.category, self.part, self.arguments = name, category, part, arguments

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.category}>"

    def __enter__(self):
        for observer in self._events.of[self.category]:
            observer.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for observer in self._events.last_first[self.category]:
            observer.end(self)


class Collective(Event):
    """A collective, from before it is sent until the call that sends it returns.

    Args:
        events: of the run.
        op: its name.
        category: ``"deferred"`` if it is only added to a graph, else ``"collective"``.
        group: the ranks.
        sent: bytes that this rank sends; 0 for collectives on objects.
        dtype: of the tensor that is sent; None for collectives on objects.
        summed: what this rank contributes, if floating-point or complex numbers are summed, else empty; until
            observers have been called. Must neither be changed nor, on a lazy device, be read.
        scattered: whether row i of each summed tensor, ``[group.size, ...]``, is summed on the i-th rank only;
            otherwise every rank receives all sums.
    """

    __slots__ = ("_actions", "dtype", "group", "scattered", "sent", "summed")

    def __init__(
        self,
        events: Events,
        op: str,
        category: Category,
        group: Group,
        sent: int,
        dtype: torch.dtype | None,
        summed: Sequence[torch.Tensor],
        scattered: bool,
    ) -> None:
        super().__init__(events, op, category, "communication", {"op": op, "group": group.name, "bytes": sent})
        self.group, self.sent, self.dtype, self.scattered = group, sent, dtype, scattered
        inexact = dtype is not None and (dtype.is_floating_point or dtype.is_complex)
        self.summed: Sequence[torch.Tensor] = summed if inexact else ()
        self._actions: list[Callable[[Sequence[torch.Tensor], float], None]] = []

    def __enter__(self):
        super().__enter__()
        self.summed = ()  # not longer than that
        return self

    def when_received(self, action: Callable[[Sequence[torch.Tensor], float], None]) -> None:
        """Registers a function that is called with this rank's sums and the factor by which they were multiplied,
        before the caller of the collective receives them."""
        self._actions.append(action)

    def received(self, tensors: Sequence[torch.Tensor], scale: float = 1.0) -> None:
        """Is called by the backend with the sums."""
        for action in self._actions:
            action(tensors, scale)

    def waiting(self) -> Event | Unobserved:
        """Returns the event of waiting for this collective, if it was started and is not complete."""
        events = self._events
        return Wait(events, self) if events.of["wait"] else UNOBSERVED


class Wait(Event):
    """The wait for a collective.

    Args:
        events: of the run.
        collective: the collective.
    """

    __slots__ = ("collective",)

    def __init__(self, events: Events, collective: Collective) -> None:
        op, group = collective.name, collective.group.name
        arguments = {"op": op, "group": group, "waits": True}
        super().__init__(events, f"wait for {op}", "wait", "communication", arguments)
        self.collective = collective


class Observer:
    """Follows the events of a run. Events of one thread are nested: the last one that began ends first.

    Attributes:
        categories: those of the events that it receives.
    """

    categories: ClassVar[frozenset[str]] = CATEGORIES

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def begin(self, event: Event) -> None:
        """Is called when an event begins. If it raises for a collective, the collective is not sent."""

    def end(self, event: Event) -> None:
        """Is called when an event ends, with the object that :meth:`begin` received. It may be one that began before
        this observer was registered."""


class Events:
    """The events of a run.

    Attributes:
        of: the observers of each category.
        last_first: the same, in the order in which they are called when an event ends.
    """

    def __init__(self) -> None:
        self._observers: tuple[Observer, ...] = ()
        self._set(())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self._observers)} observers>"

    def __reduce__(self) -> tuple[type[Events], tuple[()]]:
        return Events, ()  # observers stay in their process

    def __deepcopy__(self, memo: dict[int, Any]) -> Events:
        return self  # copies of a loader or model belong to the same run

    def observe(self, observer: Observer) -> Callable[[], None]:
        """Registers ``observer`` for all following events. Returns a function that removes it."""
        self._set((*self._observers, observer))
        return lambda: self._set(tuple(each for each in self._observers if each is not observer))

    def _set(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers
        self.of: dict[str, tuple[Observer, ...]] = {
            name: tuple(each for each in observers if name in each.categories) for name in CATEGORIES
        }
        self.last_first = {name: found[::-1] for name, found in self.of.items()}

    def open(self, name: str, category: Category = "user", *, part: str | None = None, **arguments: Any) -> Any:
        """Returns a context manager for an event. See :class:`Event`."""
        return Event(self, name, category, part, arguments) if self.of[category] else UNOBSERVED

    def collective(
        self,
        op: str,
        group: Group,
        sent: int = 0,
        dtype: torch.dtype | None = None,
        *,
        deferred: bool = False,
        summed: Sequence[torch.Tensor] = (),
        scattered: bool = False,
    ) -> Collective | Unobserved:
        """Returns a context manager for sending a collective. See :class:`Collective`."""
        category: Category = "deferred" if deferred else "collective"
        if not self.of[category]:
            return UNOBSERVED
        return Collective(self, op, category, group, sent, dtype, summed, scattered)


# ---- Records of collectives ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Transfer:
    """Record of one collective.

    Args:
        op: name of the collective.
        group: name of the group.
        size: number of ranks in the group.
        sent: bytes that this rank sends.
        dtype: dtype of the tensor that is sent; not compared.
        ranks: the ranks of the group; not compared.
    """

    op: str
    group: str
    size: int
    sent: int
    dtype: torch.dtype | None = field(default=None, compare=False)
    ranks: tuple[int, ...] = field(default=(), compare=False, repr=False)


@dataclass(repr=False)
class Traffic(Observer):
    """The collectives on tensors that were sent while it observed, as inside :meth:`Backend.record`, in order.

    Args:
        transfers: the collectives.
        order: ``("start", i)`` and ``("wait", i)`` for ``transfers[i]``, in the order in which they happened. There is
            no wait for what was complete when it was started.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"collective", "deferred", "wait"})

    transfers: list[Transfer] = field(default_factory=list)
    order: list[tuple[Literal["start", "wait"], int]] = field(default_factory=list)
    _started: dict[Event, int] = field(default_factory=dict, init=False, compare=False)

    def __repr__(self) -> str:
        by_op = ", ".join(f"{op} {self.count(op=op)}" for op in dict.fromkeys(t.op for t in self.transfers))
        return f"<{type(self).__name__}: {self.sent()} bytes sent; collectives: {by_op or 'none'}>"

    def begin(self, event: Event) -> None:
        if isinstance(event, Wait):
            index = self._started.pop(event.collective, None)
            if index is not None:
                self.order.append(("wait", index))
        elif isinstance(event, Collective) and event.dtype is not None:
            self._started[event] = len(self.transfers)
            self.order.append(("start", len(self.transfers)))
            group = event.group
            self.transfers.append(
                Transfer(event.name, group.name, group.size, event.sent, dtype=event.dtype, ranks=group.ranks)
            )

    def sent(self, *, op: str | None = None, group: str | None = None) -> int:
        """Returns the bytes sent by this rank, optionally of one collective ``op`` or one ``group`` only."""
        return sum(t.sent for t in self._select(op, group))

    def count(self, *, op: str | None = None, group: str | None = None) -> int:
        """Returns the number of collectives, optionally of one ``op`` or one ``group`` only."""
        return len(self._select(op, group))

    def _select(self, op: str | None, group: str | None) -> list[Transfer]:
        return [t for t in self.transfers if op in (None, t.op) and group in (None, t.group)]
