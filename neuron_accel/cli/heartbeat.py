# SPDX-License-Identifier: Apache-2.0
"""Detects that another machine of a launch is lost, also if its connections were not closed.

The launcher of machine 0 listens at the port after that of the rendezvous, and the launchers of the others stay
connected to it. Both sides send a heartbeat every second. If no heartbeat arrives for some time, or the connections of
a machine end without a message that the launch is over and it does not come back, the machine is considered lost, and
the ranks of this machine are ended; they would otherwise wait in a collective until it times out. If the port cannot be
used, the launch continues without heartbeats. A run that may continue without lost machines adds
:mod:`neuron_accel.cli.membership`.

A connection counts once both sides have proved that they know the secret of the run, which is never sent: each sends
random bytes, and answers with an HMAC of those of both sides. Every later message carries an HMAC of its content and
position, so that it can be neither inserted nor repeated. Whatever else arrives at the port is closed after a few
seconds and bytes, and changes nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from neuron_accel.cli.escalation import signal_ranks
from neuron_accel.cli.host import listen
from neuron_accel.cli.run_secret import RunSecret
from neuron_accel.errors import ConfigurationError

BEAT, LEAVE, STATUS = b".", b"q", b"s"
PAUSE_S = 1.0
LARGEST = 1 << 20
"""Bytes of a message's content."""
RETURN_S = 3.0
"""Seconds in which a machine whose connections ended may connect again before it is considered lost."""
HANDSHAKE_S = 5.0
"""Seconds in which both sides have to prove that they know the secret."""
STRANGERS = 32
"""Connections that may be waiting for a proof at the same time; more are closed."""
CONNECTIONS = 4
"""Connections of one machine; more are closed."""

_NONCE, _MAC, _MACHINE, _SIZE = 32, 32, 4, 4
_VERSION = b"neuron-accel heartbeat 2\n"


class Refused(Exception):
    """The other side of a connection has not proved that it knows the secret."""


class Message(NamedTuple):
    """A message; its kind is empty at the end of the connection."""

    kind: bytes
    content: bytes = b""


class Link:
    """A connection of which both sides know the secret.

    Args:
        connection: the socket.
        key: the key of this connection, which both sides derived.
        mine: what distinguishes messages of this side, ``b"0"`` on machine 0 and ``b"1"`` on another.
    """

    def __init__(self, connection: socket.socket, key: bytes, mine: bytes) -> None:
        self._connection, self._key = connection, key
        self._mine, self._theirs = mine, b"1" if mine == b"0" else b"0"
        self._sent = self._received = 0
        self._rest = b""

    @property
    def hosts(self) -> tuple[str, str]:
        """Addresses of this and of the other side."""
        return str(self._connection.getsockname()[0]), str(self._connection.getpeername()[0])

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Sends :data:`BEAT`, :data:`LEAVE`, or :data:`STATUS` with its content."""
        head = kind + len(content).to_bytes(_SIZE, "big")
        self._connection.settimeout(PAUSE_S)
        self._connection.sendall(head + content + self._sign(self._mine, self._sent, head + content))
        self._sent += 1

    def leave(self, content: bytes) -> None:
        """Sends :data:`LEAVE`, the last message, and waits up to :data:`PAUSE_S` until the other side has closed.

        Closing a connection while something is unread resets it, and the other side may then lose what it has not read
        either.
        """
        self.send(LEAVE, content)
        self._connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + PAUSE_S
        with contextlib.suppress(OSError):
            while _receive(self._connection, LARGEST, deadline):
                pass

    def receive(self, seconds: float) -> Message:
        """The next message.

        Raises:
            TimeoutError: if none is complete within ``seconds``.
            Refused: if it does not come from the other side of this connection, or is too large.
        """
        deadline, head = time.monotonic() + seconds, 1 + _SIZE
        while len(self._rest) < (size := head + self._length() + _MAC):
            data = _receive(self._connection, (head if len(self._rest) < head else size) - len(self._rest), deadline)
            if not data:
                return Message(b"")
            self._rest += data
        message, self._rest = self._rest, b""
        signed, mac = message[:-_MAC], message[-_MAC:]
        if not hmac.compare_digest(mac, self._sign(self._theirs, self._received, signed)):
            raise Refused
        self._received += 1
        return Message(signed[:1], signed[head:])

    def _length(self) -> int:
        """Size of the content of the message that is being received, as far as it is known."""
        size = int.from_bytes(self._rest[1 : 1 + _SIZE], "big") if len(self._rest) > _SIZE else 0
        if size > LARGEST:
            raise Refused
        return size

    def _sign(self, side: bytes, number: int, message: bytes) -> bytes:
        return hmac.digest(self._key, side + number.to_bytes(8, "big") + message, "sha256")


def admit(connection: socket.socket, secret: bytes, run: bytes) -> tuple[int, Link]:
    """Lets another machine prove that it knows the secret, and proves it to that machine. Called on machine 0.

    Args:
        connection: a connection that was accepted.
        secret: the secret of the run.
        run: what both sides know of the run besides; it distinguishes runs with the same secret.

    Returns:
        the index that the machine says it has, and the connection.

    Raises:
        Refused: if it does not prove it.
        OSError: if the connection ends, or the time is over (TimeoutError).
    """
    deadline = time.monotonic() + HANDSHAKE_S
    mine = secrets.token_bytes(_NONCE)
    connection.settimeout(HANDSHAKE_S)
    connection.sendall(_VERSION + mine)
    answer = _receive_exactly(connection, _MACHINE + _NONCE + _MAC, deadline)
    machine, theirs, mac = answer[:_MACHINE], answer[_MACHINE:-_MAC], answer[-_MAC:]
    about = run + mine + theirs + machine
    if not hmac.compare_digest(mac, hmac.digest(secret, b"1" + about, "sha256")):
        raise Refused
    connection.sendall(hmac.digest(secret, b"0" + about, "sha256"))
    return int.from_bytes(machine, "big"), Link(connection, hmac.digest(secret, b"key" + about, "sha256"), b"0")


def introduce(connection: socket.socket, secret: bytes, run: bytes, machine: int) -> Link:
    """The counterpart of :func:`admit`, on another machine, whose index is ``machine``."""
    deadline = time.monotonic() + HANDSHAKE_S
    greeting = _receive_exactly(connection, len(_VERSION) + _NONCE, deadline)
    if greeting[: len(_VERSION)] != _VERSION:
        raise Refused
    theirs, mine = greeting[len(_VERSION) :], secrets.token_bytes(_NONCE)
    number = machine.to_bytes(_MACHINE, "big")
    about = run + theirs + mine + number
    connection.sendall(number + mine + hmac.digest(secret, b"1" + about, "sha256"))
    try:
        proof = _receive_exactly(connection, _MAC, deadline)
    except ConnectionError:
        raise Refused from None  # machine 0 ends the connection if the answer is wrong
    if not hmac.compare_digest(proof, hmac.digest(secret, b"0" + about, "sha256")):
        raise Refused
    return Link(connection, hmac.digest(secret, b"key" + about, "sha256"), b"1")


def _receive_exactly(connection: socket.socket, size: int, deadline: float) -> bytes:
    found = b""
    while len(found) < size:
        data = _receive(connection, size - len(found), deadline)
        if not data:
            raise ConnectionResetError("the connection ended")
        found += data
    return found


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """At most ``size`` bytes, before ``deadline``: a peer that sends slowly gets no more time."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    connection.settimeout(left)
    return connection.recv(size)


@dataclass
class _Machine:
    """Another machine that has proved to know the secret at least once."""

    heard: float
    connections: int = 0
    entered: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)


class Heartbeat:
    """A context manager in which lost machines are detected, and the ranks of this machine ended.

    Args:
        node_rank: index of this machine.
        nnodes: number of machines.
        address: address of machine 0, and the port.
        secret: the secret of the run.
        lost_after: seconds without a heartbeat after which a machine is considered lost.
        grace: seconds from SIGTERM until ranks are killed.
        interface: network interface on which machine 0 listens if it does not have the address itself.
        send_signal: sends a signal to every rank of this machine.
    """

    def __init__(
        self,
        node_rank: int,
        nnodes: int,
        address: tuple[str, int],
        *,
        secret: RunSecret,
        lost_after: float,
        grace: float,
        interface: str | None = None,
        send_signal: Callable[[int], None] = signal_ranks,
    ) -> None:
        self._node_rank, self._nnodes, self._address = node_rank, nnodes, address
        self._send_signal = send_signal
        self.gone: set[int] = set()
        """Machines that are lost, or whose launch is over."""
        self._secret, self._run = secret, f"{address[1]}/{nnodes}\n".encode()
        self._lost_after, self._grace, self._interface = lost_after, grace, interface
        self._over, self._lost, self._has_said = threading.Event(), threading.Event(), threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._machines: dict[int, _Machine] = {}
        self._strangers = threading.Semaphore(STRANGERS)

    def __enter__(self) -> Heartbeat:
        """Starts listening or connecting, in threads.

        Raises:
            ConfigurationError: if the secret cannot be read or, on machine 0, made.
        """
        if self._node_rank == 0:
            self._secret.make()
        self._secret.read()
        for work in self._works():
            self._start(work)
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        with self._lock:
            threads = self._threads
        for thread in threads:
            thread.join(timeout=2 * PAUSE_S)
        self._secret.remove()

    def _works(self) -> list[Callable[[], None]]:
        """What is done in threads."""
        return [self._listen if self._node_rank == 0 else self._connect]

    def _start(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, daemon=True, name="neuron_accel_heartbeat")
        with self._lock:  # so that no thread runs that the end does not wait for
            thread.start()
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        return thread

    # ---- machine 0 ---------------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        try:
            listener = listen(*self._address, interface=self._interface)
        except OSError as error:
            say(f"lost machines will not be detected: port {self._address[1]} cannot be used ({error.strerror})")
            return
        self._accept(listener)

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            port = listener.getsockname()[1]
            listener.settimeout(PAUSE_S / 2)
            while not self._over.is_set():
                try:
                    connection, other = listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # such as too many open files: connections that end make room
                    self._over.wait(PAUSE_S)
                    continue
                if not self._strangers.acquire(blocking=False):
                    connection.close()
                    continue
                self._start(self._admit, connection, str(other[0]), port)

    def _may_enter(self, number: int) -> bool:
        """Whether a machine with this number may connect to this one."""
        return 0 < number < self._nnodes

    def _admit(self, connection: socket.socket, sender: str, port: int) -> None:
        with connection:
            try:
                secret = self._secret.read()
                number, link = admit(connection, secret or secrets.token_bytes(_NONCE), self._run)
                if not self._may_enter(number):
                    raise Refused
            except (Refused, OSError, ConfigurationError):
                self._say_once(
                    f"a connection from {sender} to port {port} did not prove that it knows the secret of "
                    "this run, and was closed; it changed nothing, and further ones are not reported"
                )
                return
            finally:
                self._strangers.release()
            machine = self._enter(number)
            if machine is not None:
                leaves = self._watch(link, number, machine)
                connection.close()
                self._leave(number, machine, leaves)

    def _enter(self, number: int) -> _Machine | None:
        """Counts a connection of a machine; returns None if the machine has too many."""
        with self._lock:
            machine = self._machines.setdefault(number, _Machine(heard=time.monotonic()))
        with machine.changed:
            if machine.connections >= CONNECTIONS:
                return None
            machine.connections += 1
            machine.entered += 1
            machine.heard = time.monotonic()
            machine.changed.notify_all()
        return machine

    def _leave(self, number: int, machine: _Machine, leaves: bool) -> None:
        """Ends a connection of a machine. The machine is lost if this was the last one, it did not end by a message,
        and there is no new one within :data:`RETURN_S`."""
        with machine.changed:
            machine.connections -= 1
            entered = machine.entered
            if leaves or machine.connections:
                return
            deadline = time.monotonic() + RETURN_S
            while machine.entered == entered and not self._over.is_set() and time.monotonic() < deadline:
                machine.changed.wait(PAUSE_S / 4)
            lost = machine.entered == entered
        if lost:
            self._end_ranks(number, "ended without closing its connection")

    # ---- another machine ---------------------------------------------------------------------------------------------
    def _connect(self) -> None:
        """Connects to machine 0, again if the connection ends, until the launch is over or machine 0 is lost."""
        machine = _Machine(heard=time.monotonic())
        known = False  # whether machine 0 has proved that it knows the secret
        while not (self._over.is_set() or self._lost.is_set()):
            found = self._introduce(self._address)
            if found is not None:
                known, machine.heard = True, time.monotonic()
                with found[0]:
                    if self._watch(found[1], 0, machine):
                        return
            elif known and time.monotonic() - machine.heard > RETURN_S:
                self._end_ranks(0, "ended without closing its connection")
            self._over.wait(PAUSE_S)

    def _introduce(self, address: tuple[str, int]) -> tuple[socket.socket, Link] | None:
        try:
            secret = self._secret.read()
            if secret is None:  # machine 0 has not written it yet
                return None
            connection = socket.create_connection(address, timeout=HANDSHAKE_S)
        except ConfigurationError as error:
            self._say_once(f"lost machines are not detected: {error}")
            return None
        except OSError:  # machine 0 has not been started yet
            return None
        try:
            return connection, introduce(connection, secret, self._run, self._node_rank)
        except (Refused, OSError) as error:
            connection.close()
            if isinstance(error, Refused):
                host, port = address
                self._say_once(
                    f"lost machines are not detected: {host}:{port} and this machine do not know the same secret, or "
                    f"differ in --nnodes; --node-rank {self._node_rank} is expected once"
                )
            return None

    # ---- both --------------------------------------------------------------------------------------------------------
    def _watch(self, link: Link, number: int, machine: _Machine) -> bool:
        """Exchanges heartbeats over a connection.

        Returns:
            True once one side has left, because its launch is over; False if the connection has ended otherwise.
        """
        heard, told = time.monotonic(), b""
        try:
            while not self._over.is_set():
                link.send(BEAT)
                until = time.monotonic() + PAUSE_S
                while not self._over.is_set() and (left := until - time.monotonic()) > 0:
                    told = self._tell(link, told)
                    try:
                        message = link.receive(min(left, PAUSE_S / 5))
                    except TimeoutError:
                        continue
                    if message.kind == LEAVE:
                        self._take_leave(number, message.content)
                    if message.kind in (LEAVE, b""):
                        return message.kind == LEAVE
                    machine.heard = heard = time.monotonic()
                    self._hear(number, link, message)
                if time.monotonic() - heard > self._lost_after:
                    if time.monotonic() - machine.heard > self._lost_after:
                        self._end_ranks(number, f"sent no heartbeat for {self._lost_after:g} s")
                    return False  # it has another connection
            self._tell(link, told)
            link.leave(self._farewell())
        except OSError:  # the connection has ended, maybe after a last message that was not read
            return self._read_leave(link, number) or self._over.is_set()
        except Refused:
            pass
        return self._over.is_set()

    def _read_leave(self, link: Link, number: int) -> bool:
        """Whether the last message on a connection that has ended is :data:`LEAVE`."""
        with contextlib.suppress(OSError, Refused):
            while (message := link.receive(PAUSE_S)).kind:
                if message.kind == LEAVE:
                    self._take_leave(number, message.content)
                    return True
        return False

    def _tell(self, link: Link, told: bytes) -> bytes:
        """Sends what the other side does not know yet; ``told`` is what it knows. Returns what it knows then."""
        return told

    def _hear(self, number: int, link: Link, message: Message) -> None:
        """Takes note of a message of another machine, other than the last."""

    def _take_leave(self, number: int, content: bytes) -> None:
        """Takes note of the last message of another machine."""
        self.gone.add(number)

    def _farewell(self) -> bytes:
        """The content of the last message of this machine."""
        return b""

    def _end_ranks(self, machine: int, how: str) -> None:
        if self._lost.is_set() or self._over.is_set() or machine in self.gone:
            return
        self._lost.set()
        say(f"machine {machine} {how} and is considered lost; ending the ranks of this machine")
        self._send_signal(signal.SIGTERM)
        if not self._over.wait(self._grace):
            self._send_signal(signal.SIGKILL)

    def _say_once(self, text: str) -> None:
        if not self._has_said.is_set():
            self._has_said.set()
            say(text)


def say(text: str) -> None:
    print(f"neuron-accel: {text}", file=sys.stderr, flush=True)
