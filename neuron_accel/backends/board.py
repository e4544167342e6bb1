# SPDX-License-Identifier: Apache-2.0
"""Short notes between ranks, beside collectives: a key-value store that all of them share."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
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
