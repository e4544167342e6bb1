# SPDX-License-Identifier: Apache-2.0
"""Stopping a run on request: after a signal to a rank or a notice in a file, all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run

SIGNALS = ("SIGTERM", "SIGINT")
AHEAD = 2
"""How many steps a rank may be ahead of the first one, and after how many steps a run stops."""
POLL_SECONDS, LOOKS_A_SECOND = 0.001, 2000
"""Seconds between two looks of a rank that waits, at first, and how often all of them look together once each has
looked a few times."""


class Interruption:
    """Watches for a request to stop, and lets all ranks stop after the same step.

    At each call of :meth:`requested`, the first rank writes its number of calls to the run's board, and once a rank was
    asked to stop, the call after which all ranks do, :data:`AHEAD` calls later. The others read that, and wait while
    they are more than :data:`AHEAD` calls ahead of the first rank, so that none can miss it: on devices that work
    asynchronously, and with strategies that do not communicate in each step, ranks may be steps apart. A call involves
    no collective and does not read from the device.

    Args:
        run: the run.
        signals: names of signals that ask to stop, such as ``("SIGTERM", "SIGUSR1")``. A second SIGINT interrupts the
            rank at once.
        notice_file: a path; a file there asks to stop. None for signals only.
        counts: whether a call counts, which is the same on every rank; calls within an accumulation do not.

    Raises:
        ConfigurationError: if a signal does not exist or cannot be handled.
        UsageError: in a thread other than the main one with ``signals``.
    """

    def __init__(
        self,
        run: Run,
        *,
        signals: Sequence[str] = SIGNALS,
        notice_file: str | os.PathLike[str] | None = None,
        counts: Callable[[], bool] = lambda: True,
    ) -> None:
        numbers = [_number(name) for name in signals]
        if numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "Signals can be watched in the main thread only.",
                where="watch_for_interruption",
                why="Python handles signals in the main thread",
                fix="call it there, or pass signals=() and a notice_file",
            )
        self._run, self._notice, self._counts = run, notice_file and os.fspath(notice_file), counts
        self._rank, self._ahead = run.world.index, AHEAD if run.world.size > 1 else 0
        self._board = run.backend.board()
        self._name = run.backend.broadcast_object(f"interruption/{os.getpid()}/{id(self)}", run.world)
        self._call, self._first, self._stop_at = 0, 0, 0
        self._reason, self._told = "", False
        self._previous: dict[int, Any] = {number: signal.signal(number, self._handle) for number in numbers}

    def __repr__(self) -> str:
        watched = [signal.Signals(number).name for number in self._previous]
        watched += [] if self._notice is None else [repr(self._notice)]
        return f"<{type(self).__name__}: watches {', '.join(watched) or 'nothing'}>"

    def requested(self) -> bool:
        """Whether the run has been asked to stop. Every rank calls this after each step, and the result is the same on
        all of them. Within an accumulation it is False. Once True, it stays True.

        Raises:
            UsageError: inside `join_uneven_inputs`, where ranks do not do the same number of steps.
        """
        self._run.join.collective_only("`requested`")
        if not self._counts():
            return False
        if not self._stopping:
            with self._run.events.open("requested", "call"):
                self._call += 1
                self._ask()
                if self._rank == 0:
                    self._lead()
                else:
                    self._follow()
        return self._stopping

    @property
    def reason(self) -> str:
        """What asked this rank to stop, such as ``"SIGTERM"``; empty if nothing did, or another rank was asked."""
        return self._reason

    def close(self) -> None:
        """Restores the handlers of the signals."""
        while self._previous:
            signal.signal(*self._previous.popitem())

    # ---- a request ---------------------------------------------------------------------------------------------------
    def _handle(self, number: int, frame: object) -> None:
        if self._reason and number == signal.SIGINT:
            self.close()
            raise KeyboardInterrupt
        self._reason = self._reason or signal.Signals(number).name

    def _ask(self) -> None:
        if not self._reason and self._notice is not None and os.path.exists(self._notice):
            self._reason = f"the file {self._notice}"
        if self._reason and not self._told:
            self._board.put(f"{self._name}/asked", f"{self._reason} on rank {self._rank}".encode())
            self._told = True

    # ---- agreement ---------------------------------------------------------------------------------------------------
    @property
    def _stopping(self) -> bool:
        return 0 < self._stop_at <= self._call

    def _lead(self) -> None:
        if not self._stop_at and (asked := self._board.get(f"{self._name}/asked")):
            self._stop_at = self._call + self._ahead
            when = f"in {self._ahead} steps" if self._ahead else "after this step"
            print(f"neuron_accel: stopping {when}: {asked.decode()}", file=sys.stderr, flush=True)
        self._board.put(f"{self._name}/first", f"{self._call} {self._stop_at}".encode())

    def _follow(self) -> None:
        self._read()
        pause, longest = POLL_SECONDS, max(0.02, self._run.world.size / LOOKS_A_SECOND)
        while self._first < self._call - self._ahead:
            time.sleep(pause)
            pause = min(2 * pause, longest)
            self._read()

    def _read(self) -> None:
        if note := self._board.get(f"{self._name}/first"):
            self._first, self._stop_at = map(int, note.split())


def _number(name: str) -> int:
    try:
        number = signal.Signals[name]
    except KeyError:
        raise ConfigurationError(
            f"{name!r} is not a signal.", where="signals", fix="use names such as SIGTERM, SIGINT or SIGUSR1"
        ) from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigurationError(f"{name} cannot be handled.", where="signals", fix="use SIGTERM")
    return int(number)
