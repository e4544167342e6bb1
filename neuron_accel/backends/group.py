# SPDX-License-Identifier: Apache-2.0
"""The ranks of a collective, and a collective that may not be complete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, as seen by this rank.

    Args:
        ranks: the global ranks of the group, ascending.
        index: position of this rank in ``ranks``.
        partition: all groups of the same kind, this one included; together they contain every rank once.
        name: name of the group in messages, such as ``"tp"`` or ``"dp x tp"``.
        handle: the backend's own object for the group; None for a group of one rank.
    """

    ranks: tuple[int, ...]
    index: int
    partition: tuple[tuple[int, ...], ...]
    name: str
    handle: Any = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, rank: int, partition: Sequence[Sequence[int]], name: str, world_size: int) -> Group:
        """Returns the group of ``partition`` in which ``rank`` is, without a handle. The order of groups, and of the
        ranks in each, does not matter.

        Raises:
            ValueError: if ``partition`` does not name every rank exactly once.
        """
        groups = tuple(sorted(tuple(sorted(ranks)) for ranks in partition))
        if sorted(each for ranks in groups for each in ranks) != list(range(world_size)):
            raise ValueError(f"{groups} does not partition the ranks 0 to {world_size - 1}")
        ranks = next(ranks for ranks in groups if rank in ranks)
        return cls(ranks=ranks, index=ranks.index(rank), partition=groups, name=name)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "handle": None}  # a connection cannot be moved to another process

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        return self  # copies of a model communicate in the same groups


class Pending(ABC):
    """A collective that has been started and may not be complete."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def wait(self) -> torch.Tensor:
        """Waits for the collective and returns its result."""


class Done(Pending):
    """A :class:`Pending` whose result is already available."""

    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {tuple(self._result.shape)} of {self._result.dtype}>"

    def wait(self) -> torch.Tensor:
        return self._result


class Then(Pending):
    """A :class:`Pending` whose result is passed through a function.

    Args:
        pending: the collective.
        finish: maps the result of ``pending`` to the result of this object; called once, by the first ``wait()``.
    """

    def __init__(self, pending: Pending, finish: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._pending: Pending | None = pending
        self._finish = finish
        self._result: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._result = self._finish(pending.wait())
        assert self._result is not None
        return self._result
