# SPDX-License-Identifier: Apache-2.0
"""A thread that completes operations for those who do not wait for them: those who hold a future, and other ranks."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

import torch
from torch.futures import Future

_LATER = 0.02
"""Seconds that an operation is left to the rank itself, so that a rank that computes is not interrupted."""


class Completes(Protocol):
    """An operation that was started."""

    def wait(self) -> None:
        """Completes it."""

    def test(self) -> bool:
        """Whether it is complete; completes it if that is possible now."""


class Attendant:
    """Completes operations of a group in a thread, which the first one starts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._promised: deque[tuple[Completes, Future, list[torch.Tensor]]] = deque()
        self._left: list[Completes] = []
        self._thread: threading.Thread | None = None
        self._ends = False

    def promise(self, operation: Completes, value: list[torch.Tensor]) -> Future:
        """Returns a future that has ``value`` once the operation is complete."""
        future: Future = Future()
        with self._changed:
            self._promised.append((operation, future, value))
            self._begin()
            self._changed.notify()
        return future

    def look_after(self, operation: Completes) -> None:
        """Sees that an operation goes on, in whose middle other ranks need this one, also if this one does not wait for
        it."""
        with self._changed:
            self._left.append(operation)
            self._begin()
            if len(self._left) == 1:
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread. Promised operations must be able to end, at the latest with an error."""
        with self._changed:
            self._ends = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="neuron_accel_host", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._promised or self._left or self._ends)
                if not self._promised and not self._ends:
                    self._changed.wait_for(lambda: self._promised or self._ends, _LATER)
                if not self._promised and self._ends:
                    return
                promised = self._promised.popleft() if self._promised else None
                left, self._left = self._left, []
            if promised is not None:
                _fulfil(*promised)
            left = [operation for operation in left if not _is_over(operation)]
            with self._changed:
                self._left += left


def _fulfil(operation: Completes, future: Future, value: list[torch.Tensor]) -> None:
    try:
        operation.wait()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(value)


def _is_over(operation: Completes) -> bool:
    try:
        return operation.test()
    except RuntimeError:  # which who waits for it gets, too
        return True
