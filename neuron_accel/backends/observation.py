"""Looking on while collectives are issued, and a board for notes beside them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group


class CollectiveObserver(ABC):
    """Is told of collectives just before they happen. What it raises keeps them from happening."""

    @abstractmethod
    def issued(self, op: str, group: Group, sent: int, *, deferred: bool) -> None:
        """A collective is about to be issued.

        Args:
            op: its name.
            group: who takes part; more than one rank.
            sent: bytes that this rank sends; 0 where objects travel.
            deferred: whether it only becomes part of a graph, which :meth:`executing` announces.
        """

    @abstractmethod
    def executing(self, ranks: tuple[int, ...]) -> None:
        """A lazy device is about to execute what was deferred, as are those of all ``ranks``, among them this one's."""


class Board(ABC):
    """Short notes that ranks leave for each other, beside all collectives and without waiting for anybody."""

    @abstractmethod
    def put(self, key: str, note: bytes) -> None:
        """Leaves a note, in place of an earlier one under the same key."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """The note under ``key``, or None as long as there is none."""


class LocalBoard(Board):
    """For ranks that are threads of one process, or for one rank."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, note: bytes) -> None:
        with self._lock:
            self._notes[key] = note

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._notes.get(key)


class StoreBoard(Board):
    """For ranks that are processes: a key-value store of torch.distributed.

    Args:
        store: the store; a prefix of its own keeps keys apart from those of others.
    """

    def __init__(self, store: Any) -> None:
        import torch.distributed as dist

        self._store = dist.PrefixStore("neuron_accel_board", store)

    @classmethod
    def of_default_group(cls) -> StoreBoard:
        """On the store that the default process group was made with."""
        from torch.distributed.distributed_c10d import _get_default_store

        return cls(_get_default_store())

    def put(self, key: str, note: bytes) -> None:
        self._store.set(key, note)  # type: ignore[arg-type]  # bytes are what it keeps

    def get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None
