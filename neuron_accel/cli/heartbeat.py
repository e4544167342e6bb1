"""Detects that another machine of a launch is lost, also if its connections were not closed.

The launcher of machine 0 listens at the port after that of the rendezvous, and the launchers of the others stay
connected to it. Both sides send a heartbeat every second. If no heartbeat arrives for some time, or a connection ends
without a message that the launch is over, the machine is considered lost, and the ranks of this machine are ended; they
would otherwise wait in a collective until it times out. If the port cannot be used, the launch continues without
heartbeats.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
import time

from neuron_accel.cli.escalation import signal_ranks

BEAT, LEAVE = b".", b"q"
PAUSE_S = 1.0


class Heartbeat:
    """A context manager in which lost machines are detected, and the ranks of this machine ended.

    Args:
        node_rank: index of this machine.
        address: address of machine 0, and the port.
        lost_after: seconds without a heartbeat after which a machine is considered lost; 0 disables the check.
        grace: seconds from SIGTERM until ranks are killed.
    """

    def __init__(self, node_rank: int, address: tuple[str, int], *, lost_after: float, grace: float) -> None:
        self._node_rank, self._address = node_rank, address
        self._lost_after, self._grace = lost_after, grace
        self._over, self._lost = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> Heartbeat:
        if self._lost_after > 0:
            self._start(self._listen if self._node_rank == 0 else self._connect)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in list(self._threads):
            thread.join(timeout=2 * PAUSE_S)
        if self._listener is not None:
            self._listener.close()

    def _start(self, target, *arguments) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name="neuron_accel_heartbeat")
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        try:
            self._listener = socket.create_server(("", self._address[1]))
        except OSError as error:
            say(f"lost machines will not be detected: port {self._address[1]} cannot be used ({error.strerror})")
            return
        self._listener.settimeout(PAUSE_S / 2)
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listener.accept()
                self._start(self._greet, connection)

    def _greet(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            connection.settimeout(10)
            self._watch(connection, int(connection.recv(16).split(b"\n")[0]))

    def _connect(self) -> None:
        while not self._over.is_set():
            try:
                connection = socket.create_connection(self._address, timeout=5)
            except OSError:  # machine 0 has not been started yet
                self._over.wait(PAUSE_S)
                continue
            with connection:
                connection.sendall(f"{self._node_rank}\n".encode())
                self._watch(connection, 0)
            return

    def _watch(self, connection: socket.socket, machine: int) -> None:
        """Exchanges heartbeats with a machine until the launch is over or the machine is lost."""
        connection.settimeout(PAUSE_S)
        heard = time.monotonic()
        try:
            while not self._over.is_set():
                sent = time.monotonic()
                connection.sendall(BEAT)
                try:
                    words = connection.recv(64)
                    if LEAVE in words:
                        return
                    if not words:
                        self._end_ranks(machine, "ended without closing its connection")
                        return
                    heard = time.monotonic()
                    self._over.wait(max(0.0, PAUSE_S - (heard - sent)))
                except TimeoutError:
                    pass
                if time.monotonic() - heard > self._lost_after:
                    self._end_ranks(machine, f"sent no heartbeat for {self._lost_after:g} s")
                    return
            connection.sendall(LEAVE)
        except OSError:
            if not self._over.is_set():
                self._end_ranks(machine, "reset its connection")

    def _end_ranks(self, machine: int, how: str) -> None:
        if self._lost.is_set() or self._over.is_set():
            return
        self._lost.set()
        say(f"machine {machine} {how} and is considered lost; ending the ranks of this machine")
        signal_ranks(signal.SIGTERM)
        if not self._over.wait(self._grace):
            signal_ranks(signal.SIGKILL)


def say(text: str) -> None:
    print(f"neuron-accel: {text}", file=sys.stderr, flush=True)
