# SPDX-License-Identifier: Apache-2.0
"""Ensures that a signal to the launcher ends its ranks.

The elastic agent passes SIGINT and SIGTERM on to the ranks. A rank that is inside a collective does not handle an
interrupt until the collective returns, which may never happen. So a thread of the launcher, which the signal wakes
through ``signal.set_wakeup_fd``, sends SIGTERM and SIGKILL after some time, and SIGKILL at once on a second signal.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time

import psutil

INTERRUPT_SECONDS = 5.0
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Escalation:
    """A context manager in which a first signal gives the ranks ``grace`` seconds to end, and a second one kills them.

    Before ranks are started, an interrupt ends this process at once: it may be waiting for other machines in native
    code, where Python's handlers do not run. The elastic agent replaces the handlers when it starts ranks.

    SIGTERM follows :data:`INTERRUPT_SECONDS` after an interrupt; it ends a rank unless the script handles SIGTERM.

    Args:
        grace: seconds from the first signal until the ranks are killed.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="neuron_accel_escalation")
        self._previous = -1
        self._handlers = {number: signal.getsignal(number) for number in HANDLED}

    def __enter__(self) -> Escalation:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        self._previous = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(self._previous)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._writer.close()  # the thread reads the end of the stream and stops
        self._thread.join(timeout=5)
        self._reader.close()

    def _watch(self) -> None:
        first = self._next_signal(None)
        if first is None:
            return
        name = signal.Signals(first).name
        print(f"neuron-accel: {name}: ending the ranks (send it again to kill them)", file=sys.stderr, flush=True)
        deadline = time.monotonic() + self._grace
        if first == signal.SIGINT and self._grace > INTERRUPT_SECONDS:
            if self._wait(time.monotonic() + INTERRUPT_SECONDS):
                return
            signal_ranks(signal.SIGTERM)
        if not self._wait(deadline):
            signal_ranks(signal.SIGKILL)

    def _wait(self, deadline: float) -> bool:
        """Whether the launch has ended by ``deadline``; a further signal kills the ranks at once."""
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._reader], [], [], left)
            if not ready:
                return False
            if self._next_signal(0) is None:
                return True
            signal_ranks(signal.SIGKILL)
        return False

    def _next_signal(self, timeout: float | None) -> int | None:
        """The next signal of :data:`HANDLED`; None at the end of the launch."""
        while True:
            data = self._reader.recv(1)
            if not data:
                return None
            if data[0] in HANDLED:
                return data[0]


def signal_ranks(number: int) -> None:
    """Sends a signal to every child of this process, or to its process group if it leads one."""
    for child in psutil.Process().children():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(child.pid) == child.pid:
                os.killpg(child.pid, number)
            else:
                os.kill(child.pid, number)


def end_ranks(grace: float) -> None:
    """Ends the ranks that run now: by SIGTERM, and after ``grace`` seconds by SIGKILL. Returns when they have ended;
    the agent finds their exit codes."""
    ranks, deadline = psutil.Process().children(), time.monotonic() + grace
    signal_ranks(signal.SIGTERM)
    while any(map(_runs, ranks)):
        if time.monotonic() > deadline:
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.kill()
            return
        time.sleep(0.1)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
