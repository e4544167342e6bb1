# SPDX-License-Identifier: Apache-2.0
"""Short notes between ranks, beside collectives: a key-value store that all of them share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from neuron_accel.backends.group import reported


class Board(ABC):
    """A key-value store for short notes between ranks. Reading and writing involves no collective and does not wait;
    it raises a :class:`~neuron_accel.errors.CommunicationError` if the rank that keeps the notes has ended."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @abstractmethod
    def put(self, key: str, note: bytes) -> None:
        """Stores ``note`` under ``key``, replacing an earlier note."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Returns the note stored under ``key``, or None if there is none yet."""

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Returns the notes stored under ``keys``, or None for each that there is not yet."""
        return [self.get(key) for key in keys]

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Adds ``amount`` to a number, which is 0 at first, and returns the sum. No two ranks get the same sum of
        positive amounts. :meth:`get` returns the number in decimal digits."""


class LocalBoard(Board):
    """A board for ranks that are threads of one process, or for a single rank."""

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, key: str, note: bytes) -> None:
        with self._lock:
            self._notes[key] = note

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._notes.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            number = int(self._notes.get(key, b"0")) + amount
            self._notes[key] = b"%d" % number
            return number


class StoreBoard(Board):
    """A board for ranks that are processes, on a :class:`torch.distributed.Store`.

    Args:
        store: the store; keys get a prefix of their own.
    """

    def __init__(self, store: Any) -> None:
        import torch.distributed as dist

        self._store = dist.PrefixStore("neuron_accel_board", store)

    @classmethod
    def of_default_group(cls) -> StoreBoard:
        """Returns a board on the store of the default process group."""
        from torch.distributed.distributed_c10d import _get_default_store

        return cls(_get_default_store())

    def put(self, key: str, note: bytes) -> None:
        with reported("a note between ranks", f"note {key!r}"):
            self._store.set(key, note)  # type: ignore[arg-type]  # the store keeps bytes

    def get(self, key: str) -> bytes | None:
        with reported("a note between ranks", f"note {key!r}"):
            return self._store.get(key) if self._store.check([key]) else None

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """See :meth:`Board.get_all`. Two requests to the store if it has all notes; a few more for each that is
        missing, for which it would wait."""
        if len(keys) < 2:
            return [self.get(key) for key in keys]
        with reported("a note between ranks", f"{len(keys)} notes from {keys[0]!r} on"):
            if self._store.check(list(keys)):
                return list(self._store.multi_get(list(keys)))
        half = len(keys) // 2
        return self.get_all(keys[:half]) + self.get_all(keys[half:])

    def add(self, key: str, amount: int) -> int:
        with reported("a note between ranks", f"number {key!r}"):
            return self._store.add(key, amount)
