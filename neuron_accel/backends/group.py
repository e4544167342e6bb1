# SPDX-License-Identifier: Apache-2.0
"""The ranks of a collective, a collective that may not be complete, and one that has failed."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import CommunicationError

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


# ---- A collective that has failed ------------------------------------------------------------------------------------
# torch raises RuntimeError for a lost connection and for a wrong argument; only the message distinguishes them
_LOST = re.compile(
    r"gloo[/\\]|nccl (error|communicator)|connect|socket|timed? ?out|reset by peer|broken pipe|rendezvous",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed? ?out", re.IGNORECASE)


@contextmanager
def reported(op: str, where: str) -> Iterator[None]:
    """Context that converts the failure of a collective into a :class:`CommunicationError`.

    Args:
        op: name of the collective.
        where: rank and group, for the message.

    Raises:
        CommunicationError: if the body raised a RuntimeError because of another rank or the network.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_communication_failure(error):
            raise
        slow = _TIMEOUT.search(str(error)) is not None
        raise CommunicationError(
            f"The collective {op!r} did not complete: {_summary(error)}",
            where=where,
            why="a peer did not arrive in time" if slow else "a peer has most likely ended",
            fix="look for the first error in the output of the other ranks"
            + ("; if they only were slow, allow more time (timeout)" if slow else ""),
        ) from error


def is_communication_failure(error: RuntimeError) -> bool:
    """Returns whether ``error`` was raised because of another rank or the network, not because of an argument."""
    return isinstance(error, _network_errors()) or _LOST.search(str(error)) is not None


def _network_errors() -> tuple[type[Exception], ...]:
    import torch.distributed as dist

    return tuple(getattr(dist, name) for name in ("DistNetworkError", "DistStoreError") if hasattr(dist, name))


def _summary(error: Exception) -> str:
    """Returns the first line of the message, without the advice that gloo appends."""
    return str(error).strip().partition("\n")[0].partition(". This is typically")[0] or type(error).__name__
