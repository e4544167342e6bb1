# SPDX-License-Identifier: Apache-2.0
"""Named ranges of time in a run: parts of a step, hooks of plugins, collectives. Observers see them begin and end.

Without an observer a range costs a function call. Nothing is measured here: an observer takes the time, or marks the
range in a profile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal

Category = Literal["part", "collective", "pipeline", "hook", "user"]

_NOTHING: AbstractContextManager[Any] = nullcontext()


class OpenRange:
    """A range of time, from the beginning to the end of a ``with`` statement.

    Args:
        ranges: what notifies the observers.
        name: what happens in it.
        category: ``"part"`` of a step, ``"hook"`` of a plugin, ``"collective"``, ``"pipeline"`` action, or ``"user"``
            for ranges of the training script.
        part: the part of a step that its time belongs to, such as ``"forward"``; None: that of the range around it.
        arguments: details; those of a collective get its group and the bytes that this rank sends.
    """

    __slots__ = ("_before", "_ranges", "arguments", "category", "name", "part")

    _before: OpenRange | None

    def __init__(
        self, ranges: Ranges, name: str, category: Category, part: str | None, arguments: dict[str, Any]
    ) -> None:
        self._ranges = ranges
        self.name, self.category, self.part, self.arguments = name, category, part, arguments

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, {self.category}>"

    def __enter__(self) -> OpenRange:
        ranges = self._ranges
        if self.category == "collective":
            self._before = ranges.collective
            ranges.collective = self
        for observer in ranges.observers:
            observer.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ranges = self._ranges
        if self.category == "collective":
            ranges.collective = self._before
        for observer in ranges.last_first:
            observer.end(self)


class RangeObserver(ABC):
    """Receives calls when ranges begin and end. Ranges of one thread are nested: the last one that began ends first."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def begin(self, opened: OpenRange) -> None:
        """Is called when a range begins."""

    @abstractmethod
    def end(self, opened: OpenRange) -> None:
        """Is called when a range ends, with the object that :meth:`begin` received. It may be one that began before
        this observer was registered."""


class Ranges:
    """The ranges of a run.

    Attributes:
        observers: those that are registered.
        last_first: the same, in the order in which they are called when a range ends.
        collective: the collective that is under way on the host, if there is an observer.
    """

    def __init__(self) -> None:
        self.observers: tuple[RangeObserver, ...] = ()
        self.last_first: tuple[RangeObserver, ...] = ()
        self.collective: OpenRange | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.observers)} observers>"

    def __reduce__(self) -> tuple[type[Ranges], tuple[()]]:
        return Ranges, ()  # observers stay in their process

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranges:
        return self  # copies of a loader or model belong to the same run

    def observe(self, observer: RangeObserver) -> Callable[[], None]:
        """Registers ``observer`` for all following ranges. Returns a function that removes it."""
        self._set((*self.observers, observer))
        return lambda: self._set(tuple(each for each in self.observers if each is not observer))

    def _set(self, observers: tuple[RangeObserver, ...]) -> None:
        self.observers, self.last_first = observers, observers[::-1]

    def open(
        self, name: str, category: Category = "user", *, part: str | None = None, **arguments: Any
    ) -> AbstractContextManager[Any]:
        """Returns a context manager for a range. See :class:`OpenRange`."""
        if not self.observers:
            return _NOTHING
        return OpenRange(self, name, category, part, arguments)
