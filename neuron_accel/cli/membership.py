# SPDX-License-Identifier: Apache-2.0
"""Agrees on the machines of each start of a run that may continue without some of them, and on the leader.

The leader is machine 0 at first. The other launchers stay connected to it, as for heartbeats, and over these
connections each says whether it waits for the next start of its ranks. Once all machines wait that are not lost, the
leader chooses those that take part in the next start, opens the store in which their ranks meet, and tells the others.

Every launcher listens at a port of its own, and the leader tells all launchers the addresses of all. If the leader is
lost, each of the others connects to the machine with the lowest number of those that took part in the last start and
are not lost; that machine leads from then on.

In a network failure each of two groups of machines considers the other one lost, and only one of them may continue,
since both would write the same checkpoints. A group continues if it has more than half of the machines of the last
start, or half of them and the leader of that start. Machines whose launcher has ended for certain do not count: a
launcher says so when it ends, and where one was killed, the system refuses connections to its port.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from neuron_accel.cli import heartbeat
from neuron_accel.cli.heartbeat import STATUS, Heartbeat, Link, Message, Refused, introduce, say
from neuron_accel.cli.host import listen
from neuron_accel.cli.restarts import Choice, reason_to_end
from neuron_accel.engine.plan.restart import Fit, Notes
from neuron_accel.errors import CommunicationError, ConfigurationError

POLL_S = 0.1
PROBE_S = 2.0
"""Seconds in which a launcher has to accept a connection that asks whether it runs."""
SUCCESS, FAILURE = b"0", b"1"
"""What a launcher says at its end."""
_WHERE = "restart of several machines"


@dataclass(frozen=True, kw_only=True)
class View:
    """A start of the ranks, as the leader has decided it.

    Args:
        number: number of this start, from 1; 0 before the first one.
        leader: the machine that has decided.
        machines: those that take part, ascending; empty if the run does not continue.
        launchers: the name of the launcher of each of them.
        full_size: number of data-parallel ranks of the first start, if there are fewer now; else None.
        why: what is said about it; empty if there is nothing to say.
        store: address and port of the store of the ranks.
        first_host: address of the machine of rank 0.
        launched: when the run was started, in seconds since the epoch.
    """

    number: int = 0
    leader: int = 0
    machines: tuple[int, ...] = ()
    launchers: Mapping[int, str] = dataclasses.field(default_factory=dict)
    full_size: int | None = None
    why: str = ""
    store: tuple[str, int] = ("", 0)
    first_host: str = ""
    launched: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a launcher tells another.

    Args:
        machine: its number.
        launcher: its name, chosen at random: another launcher with the same number has another one.
        version: counts the changes of what this launcher says; over two connections they may arrive in another order.
        follows: the machine that it takes for the leader.
        port: where it listens; 0: nowhere yet.
        waits: number of the start after which it waits for the next one; None: its ranks run.
        view: the last start that it knows of.
        addresses: of all machines that it knows.
        notes: what the first rank has noted.
        refused: names of launchers that may not take part, since another one has their number.
    """

    machine: int
    launcher: str
    version: int
    follows: int
    port: int
    waits: int | None
    view: View
    addresses: Mapping[int, tuple[str, int]]
    notes: Notes
    refused: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()


def read_status(content: bytes) -> Status:
    """The counterpart of :meth:`Status.to_bytes`.

    Raises:
        Refused: if it is not the content of such a message.
    """
    try:
        found: dict[str, Any] = json.loads(content)
        view, notes = dict(found["view"]), dict(found["notes"])
        view["machines"] = tuple(int(machine) for machine in view["machines"])
        view["launchers"] = {int(machine): str(name) for machine, name in view["launchers"].items()}
        view["store"] = (str(view["store"][0]), int(view["store"][1]))
        found["addresses"] = {int(m): (str(host), int(port)) for m, (host, port) in found["addresses"].items()}
        found["refused"] = tuple(found["refused"])
        fits = tuple(Fit(**fit) for fit in notes["fits"])
        status = Status(**{**found, "view": View(**view), "notes": Notes(fits=fits, accumulates=notes["accumulates"])})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Refused from error
    numbers = (status.machine, status.version, status.follows, status.port, status.view.number, status.view.leader)
    if not all(isinstance(number, int) for number in numbers):
        raise Refused
    return status


class NotNeeded(Exception):
    """The run has ended well without this machine, which waited to take part."""


class Membership(Heartbeat):
    """A context manager in which launchers agree on who takes part in each start.

    Args:
        node_rank: number of this machine.
        nnodes: number of machines.
        address: address of machine 0, and the port.
        ranks: number of ranks on each machine.
        choose: returns the machines that continue, of those that are present, given the notes of the first rank and
            the machines of the last start. Used on the leader.
        read_notes: returns the notes of the first rank if it runs on this machine.
        launched: when this launcher was started, in seconds since the epoch.
        patience: seconds that the leader waits for a machine which is not known to be lost.
        first_patience: seconds that it waits for all machines at the first start.
        find_ranks: returns the ranks of this machine that run.
        options: further arguments of :class:`Heartbeat`.
    """

    def __init__(
        self,
        node_rank: int,
        nnodes: int,
        address: tuple[str, int],
        *,
        ranks: int,
        choose: Callable[[Sequence[int], Notes, Sequence[int]], Choice],
        read_notes: Callable[[], Notes],
        launched: float,
        patience: float,
        first_patience: float,
        find_ranks: Callable[[], list[psutil.Process]] = lambda: psutil.Process().children(),
        **options: Any,
    ) -> None:
        super().__init__(node_rank, nnodes, address, **options)
        self._run = f"{address[1]}/{nnodes}/{ranks}\n".encode()  # machines that differ in these do not meet
        self._choose, self._read_notes, self._launched = choose, read_notes, launched
        self._patience, self._first_patience, self._find_ranks = patience, first_patience, find_ranks
        self.succeeds = False
        """Whether this launcher ends because the training script has ended well."""
        self._name = secrets.token_hex(8)
        self._changed = threading.Condition(threading.RLock())
        self._view = View(machines=tuple(range(nnodes)), launched=launched)
        self._leader = 0
        self._leader_ended: bytes | None = None
        self._ended: set[int] = set()
        self._peers: dict[int, Status] = {}
        self._open: dict[str, float] = {}  # when launchers were heard to which there is a connection
        self._of_link: dict[Link, str] = {}
        self._refused: set[str] = set()
        self._is_refused = False
        self._waits: int | None = None
        self._notes = Notes()
        self._said: Status | None = None
        self._host, self._port = (address[0], address[1]) if node_rank == 0 else ("", 0)
        self._addresses: dict[int, tuple[str, int]] = {0: address}
        self._heard_leader = time.monotonic()

    # ---- for the launcher --------------------------------------------------------------------------------------------
    @property
    def machine(self) -> int:
        """Number of this machine."""
        return self._node_rank

    def meet(self, serve: Callable[[str, int, str | None], tuple[str, int]]) -> View:
        """Waits for the next start of the ranks in which this machine takes part.

        Args:
            serve: opens a store for the ranks: given an address of this machine, the number of the start and the
                network interface; returns the address and port of the store. Used on the leader.

        Raises:
            CommunicationError: if the run does not continue, or not with this machine.
            NotNeeded: if the run ends well without this machine.
        """
        before, since, led, has_said = self._view.number, time.monotonic(), self._leads, False
        try:
            while True:
                with self._changed:
                    view, self._waits = self._view, before
                    if view.number > before:
                        if not view.machines:
                            raise CommunicationError(
                                f"The run does not continue: {view.why}.",
                                where=_WHERE,
                                fix="launch again with the remaining machines; the script continues from its latest "
                                "checkpoint",
                            )
                        if self._takes_part(view) and view.leader not in self.gone:
                            return view
                        before, since = view.number, time.monotonic()
                        continue
                    self._check_goes_on()
                    if self._leads != led:
                        led, since = self._leads, time.monotonic()
                if view.number and not self._takes_part(view) and not has_said:
                    has_said = True
                    say(
                        f"machine {self.machine} does not take part at the moment (start {view.number} has "
                        f"{len(view.machines)} of {self._nnodes} machines); it waits for the next restart"
                    )
                waited = time.monotonic() - since
                if led:
                    self._lead(before, waited, serve)
                elif waited > self._first_patience and (not view.number or self._takes_part(view)):
                    raise CommunicationError(
                        f"Machine {self._leader} has not decided on {'a restart' if view.number else 'the first start'}"
                        f" within {waited:.0f} s.",
                        where=_WHERE if view.number else "start of several machines",
                        why="it cannot be reached, or its ranks still run",
                        fix="check that a launcher runs there, and that this machine can reach it at "
                        f"{':'.join(map(str, self._addresses.get(self._leader, self._address)))}",
                    )
                with self._changed:
                    self._changed.wait(POLL_S)
        finally:
            with self._changed:
                self._waits = None

    def _check_goes_on(self) -> None:
        if self._is_refused:
            raise CommunicationError(
                f"Machine {self.machine} takes part already, with another launcher.",
                where="--node-rank",
                fix="give every machine a number of its own; if the other launcher has just been ended, try again in "
                "a few seconds",
            )
        if self._leader_ended == SUCCESS and not self._takes_part(self._view):
            raise NotNeeded
        if self._leader_ended is not None:
            raise CommunicationError(
                f"The launcher of machine {self._leader} has ended.",
                where=_WHERE,
                why="a signal ended it, or its ranks failed and there were no restarts left; the run ends with the "
                "machine that leads it",
                fix="see its output; a new launch continues from the latest checkpoint",
            )

    # ---- the leader --------------------------------------------------------------------------------------------------
    @property
    def _leads(self) -> bool:
        return self._leader == self.machine

    def _takes_part(self, view: View) -> bool:
        return view.launchers.get(self.machine) == self._name

    def _lead(self, before: int, waited: float, serve: Callable[[str, int, str | None], tuple[str, int]]) -> None:
        """Decides on the next start if all machines wait for it, or have had the time to."""
        with self._changed:
            last = self._view
            waiting = {m for m, peer in self._peers.items() if peer.waits == before and peer.launcher in self._open}
            here = sorted({self.machine} | waiting)
            missing = [m for m in last.machines if m not in here and (not before or m not in self.gone)]
            ended = set(self._ended)
        if missing and waited < (self._patience if before else self._first_patience):
            return
        if missing and not before:
            raise CommunicationError(
                f"{len(missing)} of {self._nnodes} machines have not come within {waited:.0f} s: "
                f"{', '.join(map(str, missing))}.",
                where="start of several machines",
                fix="start the launcher there, with the same --nnodes, --nproc-per-node, --min-nnodes, --master-addr "
                "and --master-port; machine 0 has to be reached at this port and the next one",
            )
        if before:
            self._find_ended(m for m in last.machines if m not in here and m not in ended)
        with self._changed:
            if self._view is not last:  # another machine knew of a later start
                return
            choice = Choice(machines=tuple(here))
            if before:
                reason = reason_to_end(here, last=last.machines, ended=self._ended, leader=last.leader)
                choice = self._choose(here, self._best_notes(), last.machines)
                choice = Choice(machines=(), why=reason) if reason is not None else choice
            self._publish(choice, last, serve)

    def _publish(self, choice: Choice, last: View, serve: Callable[[str, int, str | None], tuple[str, int]]) -> None:
        names = {m: self._name if m == self.machine else self._peers[m].launcher for m in choice.machines}
        store, first_host = ("", 0), ""
        if choice.machines:
            store = serve(self._host, last.number + 1, self._interface)
            first = choice.machines[0]
            first_host = self._host if first == self.machine else self._addresses.get(first, ("", 0))[0]
        self.gone |= set(last.machines) - set(choice.machines)
        self.gone -= set(choice.machines)
        self._ended -= set(choice.machines)
        self._view = View(
            number=last.number + 1,
            leader=self.machine,
            machines=tuple(choice.machines),
            launchers=names,
            full_size=choice.full_size,
            why=choice.why,
            store=store,
            first_host=first_host,
            launched=last.launched,
        )
        self._changed.notify_all()

    def _find_ended(self, machines: Iterable[int]) -> None:
        """Asks machines that are missing whether their launcher has ended."""
        known = [(m, self._addresses[m]) for m in machines if m in self._addresses]
        threads = [self._start(self._ask, machine, address) for machine, address in known]
        for thread in threads:
            thread.join(2 * PROBE_S)

    def _ask(self, machine: int, address: tuple[str, int]) -> None:
        """Tells a launcher who leads, if it runs, and notes that it has ended if nothing listens there."""
        try:
            secret = self._secret.read()
            connection = socket.create_connection(address, timeout=PROBE_S)
        except ConnectionRefusedError:
            with self._changed:
                self._ended.add(machine)
            return
        except (OSError, ConfigurationError):
            return
        with connection, contextlib.suppress(OSError, Refused):
            link = introduce(connection, secret or secrets.token_bytes(32), self._run, self.machine)
            self._tell(link, b"")
            until = time.monotonic() + PROBE_S
            while (message := link.receive(until - time.monotonic())).kind not in (STATUS, b""):
                pass
            if message.kind != STATUS:
                return
            status = read_status(message.content)
            if status.machine == machine:
                self._take(machine, status)
            else:  # another launcher has got the port
                with self._changed:
                    self._ended.add(machine)

    # ---- threads -----------------------------------------------------------------------------------------------------
    def _works(self) -> list[Callable[[], None]]:
        return [self._listen, self._follow] if self.machine == 0 else [self._follow]

    def _may_enter(self, number: int) -> bool:
        return 0 <= number < self._nnodes and number != self.machine

    def _follow(self) -> None:
        """Stays connected to the leader, whichever machine that is; on the leader, tells others that it leads."""
        asked = 0.0
        while not self._over.is_set():
            leader = self._leader
            if self._leads:
                if self._view.number and time.monotonic() - asked > PROBE_S:
                    asked = time.monotonic()
                    with self._changed:
                        away = [m for m in self._addresses if m != self.machine and not self._is_open(m)]
                    self._find_ended(away)
            elif self._leader_ended is not None:
                return
            else:
                self._follow_once(leader, self._addresses.get(leader, self._address))
            self._over.wait(heartbeat.PAUSE_S / 2)

    def _follow_once(self, leader: int, address: tuple[str, int]) -> None:
        found = self._introduce(address)
        if found is not None:
            connection, link = found
            with connection:
                self._heard_leader = time.monotonic()
                self._listen_beside(link)
                machine = heartbeat._Machine(heard=time.monotonic())
                self._watch(link, leader, machine)
                self._heard_leader = max(self._heard_leader, machine.heard)
        elif time.monotonic() - self._heard_leader > heartbeat.RETURN_S:
            self._end_ranks(leader, "ended without closing its connection, or cannot be reached")

    def _listen_beside(self, link: Link) -> None:
        """Listens at the address by which this machine reaches the leader: at the same port, or a free one."""
        if self._port:
            return
        self._host = link.hosts[0]
        for port in (self._address[1], 0):
            try:
                listener = listen(self._host, port)
            except OSError:
                continue
            with self._changed:
                self._port = int(listener.getsockname()[1])
                self._addresses[self.machine] = (self._host, self._port)
            self._start(self._accept, listener)
            return

    def _leave(self, number: int, machine: heartbeat._Machine, leaves: bool) -> None:
        """Ends a connection that another machine has made; only the leader concludes anything from that."""
        super()._leave(number, machine, leaves or not self._leads)

    def _is_open(self, machine: int) -> bool:
        peer = self._peers.get(machine)
        return peer is not None and peer.launcher in self._open

    # ---- messages ----------------------------------------------------------------------------------------------------
    def _watch(self, link: Link, number: int, machine: heartbeat._Machine) -> bool:
        try:
            return super()._watch(link, number, machine)
        finally:
            with self._changed:
                name = self._of_link.pop(link, "")
                if name not in self._of_link.values():
                    self._open.pop(name, None)

    def _tell(self, link: Link, told: bytes) -> bytes:
        with self._changed:
            status = Status(
                machine=self.machine,
                launcher=self._name,
                version=self._said.version if self._said is not None else 0,
                follows=self._leader,
                port=self._port,
                waits=self._waits,
                view=self._view,
                addresses=dict(self._addresses),
                notes=self._best_notes(),
                refused=tuple(sorted(self._refused)),
            )
            if status != self._said:
                self._said = dataclasses.replace(status, version=status.version + 1)
            content = self._said.to_bytes()
        if content != told:
            link.send(STATUS, content)
        return content

    def _hear(self, number: int, link: Link, message: Message) -> None:
        with self._changed:
            if message.kind == STATUS:
                status = read_status(message.content)
                self._of_link[link] = status.launcher
                if number != status.machine and not self._leads:  # another machine than machine 0 has this address
                    self._addresses[status.machine] = link.hosts[1], status.port
                    self._addresses.update(status.addresses)
                    self._leader = status.follows
                    raise Refused
                if status.port and self._leads:
                    self._addresses[number] = link.hosts[1], status.port
                self._take(number, status)
            if link in self._of_link:
                self._open[self._of_link[link]] = time.monotonic()

    def _take(self, number: int, status: Status) -> None:
        """Takes note of what another machine says."""
        with self._changed:
            if self._name in status.refused:
                self._is_refused = True
            if not self._is_known_launcher(number, status):
                return
            known = self._peers.get(number)
            if known is not None and known.launcher == status.launcher and known.version > status.version:
                return
            self._peers[number] = status
            self._merge(status.notes)
            if status.view.number > self._view.number:
                self._adopt(status)
            elif number == self._leader and status.view.number == self._view.number:
                own = {self.machine: self._addresses[self.machine]} if self.machine in self._addresses else {}
                self._addresses = {**self._addresses, **status.addresses, **own}
            self._changed.notify_all()

    def _is_known_launcher(self, number: int, status: Status) -> bool:
        """Whether no other launcher has this number. One that was started again takes the place of the one before."""
        known = self._view.launchers.get(number)
        if not self._leads or known in (None, status.launcher) or number in self.gone:
            return True
        if time.monotonic() - self._open.get(known or "", 0.0) < heartbeat.RETURN_S:
            self._refused.add(status.launcher)
            return False
        self._end_ranks(number, "was started again")
        self._ended.add(number)
        return True

    def _adopt(self, status: Status) -> None:
        """Takes over a later start, which the leader has decided on; this machine may have been left out."""
        took_part = self._takes_part(self._view) and self._view.number > 0
        self._view = status.view
        self.gone -= {*status.view.machines, status.follows}
        self._ended -= {*status.view.machines, status.follows}
        self._addresses.update({m: a for m, a in status.addresses.items() if m != self.machine})
        if self._leader != status.follows:
            self._leader, self._heard_leader = status.follows, time.monotonic()
        if took_part and self._waits is None and not self._takes_part(status.view):
            say(f"the others continue without this machine: {status.view.why}; ending its ranks")
            self._end_this_start()

    def _merge(self, notes: Notes) -> None:
        if notes.fits:
            accumulates = self._notes.accumulates or notes.accumulates
            self._notes = Notes(fits=self._notes.fits or notes.fits, accumulates=accumulates)

    def _best_notes(self) -> Notes:
        if not self._notes.accumulates:
            self._merge(self._read_notes())
        return self._notes

    def _take_leave(self, number: int, content: bytes) -> None:
        with self._changed:
            if number == self._leader:
                self._leader_ended = content
            elif self._leads:
                self.gone.add(number)
                self._ended.add(number)
            self._changed.notify_all()

    def _farewell(self) -> bytes:
        return SUCCESS if self.succeeds else FAILURE

    # ---- lost machines -----------------------------------------------------------------------------------------------
    def _end_ranks(self, machine: int, how: str) -> None:
        with self._changed:
            if self._over.is_set() or machine in self.gone or not self._view.number:
                return
            was_leader = machine == self._leader
            if not was_leader and not self._leads:  # the leader decides about the others
                return
            if machine not in self._view.machines and not was_leader:
                return
            runs = self._takes_part(self._view)
            what = "; ending the ranks of this machine, to continue without it" if runs else ""
            say(f"machine {machine} {how} and is considered lost{what}")
            if runs and machine in self._view.machines:
                self._end_this_start()
            self.gone.add(machine)  # from now on there may be ranks of the next start
            if was_leader:
                self._elect(machine)
            self._changed.notify_all()

    def _elect(self, lost: int) -> None:
        """Follows the machine with the lowest number that is not lost."""
        left = [m for m in self._view.machines if m not in self.gone]
        if not left:  # this one waited to take part
            self._leader_ended = FAILURE
            return
        self._leader, self._heard_leader = min(left), time.monotonic()
        if self._leads:
            say(f"machine {self.machine} leads the run instead of machine {lost}")

    def _end_this_start(self) -> None:
        """Ends the ranks that run now, in a thread, and none of a later start."""
        ranks = self._find_ranks()
        self._send_signal(signal.SIGTERM)
        self._start(self._kill, ranks)

    def _kill(self, ranks: list[psutil.Process]) -> None:
        deadline = time.monotonic() + self._grace
        while ranks and not self._over.is_set():
            ranks = [rank for rank in ranks if _runs(rank)]
            if time.monotonic() > deadline:
                for rank in ranks:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        rank.kill()
                return
            self._over.wait(heartbeat.PAUSE_S / 4)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
