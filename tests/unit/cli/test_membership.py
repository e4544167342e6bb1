"""Which machines take part in a start, and which one leads: launchers in threads, connected over the loopback."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time

import pytest

from neuron_accel.cli import heartbeat, membership
from neuron_accel.cli.heartbeat import Refused
from neuron_accel.cli.membership import Membership, NotNeeded, Status, View, read_status
from neuron_accel.cli.restarts import choose_machines, reason_to_end
from neuron_accel.cli.run_secret import RunSecret
from neuron_accel.engine.plan.restart import Fit, Notes
from neuron_accel.errors import CommunicationError
from neuron_accel.testing._call import free_port

NOTES = Notes(fits=tuple(Fit(ranks=n, data_parallel=n, mesh=f"dp {n}") for n in (60, 5, 4, 3, 2, 1)), accumulates=True)


class Machine(Membership):
    """A launcher whose connections to some machines can be cut, as by a network failure."""

    def __init__(self, number, *, nnodes, port, least=1, lost_after=20.0, patience=6.0, read_notes=lambda: NOTES):
        self.cut, self.signals = set(), []
        self.opened, self.outcome, self.thread = [], None, None
        super().__init__(
            number,
            nnodes,
            ("127.0.0.1", port),
            ranks=1,
            choose=lambda here, notes, last: choose_machines(
                here, machines=nnodes, ranks=1, least=least, notes=notes, last=last
            ),
            read_notes=read_notes,
            launched=float(number),
            patience=patience,
            first_patience=10.0,
            find_ranks=list,
            secret=RunSecret(b"0123456789abcdef"),
            lost_after=lost_after,
            grace=0.1,
            send_signal=self.signals.append,
        )

    def _may_enter(self, number):
        return number not in self.cut and super()._may_enter(number)

    def _introduce(self, address):
        is_cut = any(self._addresses.get(machine) == address for machine in self.cut)
        return None if is_cut else super()._introduce(address)

    def _ask(self, machine, address):
        if machine not in self.cut:
            super()._ask(machine, address)

    def _hear(self, number, link, message):
        if number in self.cut:
            raise ConnectionResetError
        super()._hear(number, link, message)

    def begin(self):
        """Waits for the next start in a thread, as a launcher does whose ranks have failed."""
        self.outcome = None

        def serve(host, number, interface):
            self.opened.append(number)
            return host, 10_000 + number

        def work():
            try:
                self.outcome = self.meet(serve)
            except (CommunicationError, NotNeeded) as error:
                self.outcome = error

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        return self

    def end(self, seconds=40):
        """What :meth:`begin` has come to."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), f"machine {self.machine} still waits"
        return self.outcome

    def die(self):
        """Ends as by SIGKILL: connections are closed without a last message, and nothing listens any more."""
        self._farewell = lambda: (_ for _ in ()).throw(ConnectionResetError)
        self.__exit__()


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for name, seconds in (("PAUSE_S", 0.1), ("RETURN_S", 0.5), ("HANDSHAKE_S", 3.0)):
        monkeypatch.setattr(heartbeat, name, seconds)
    monkeypatch.setattr(membership, "POLL_S", 0.02)
    monkeypatch.setattr(membership, "PROBE_S", 1.0)


@pytest.fixture
def run():
    """Starts launchers; those of the first start have met."""
    port, started = free_port(), []

    def launch(number, **options):
        started.append(Machine(number, port=port, **options))
        return started[-1].__enter__().begin()

    def go(nnodes, **options):
        machines = [launch(number, nnodes=nnodes, **options) for number in range(nnodes)]
        for machine in machines:
            view = machine.end()
            assert (view.number, view.machines, view.store) == (1, tuple(range(nnodes)), ("127.0.0.1", 10_001))
        until(lambda: all(len(machine._addresses) == nnodes for machine in machines))
        return machines

    go.launch = launch
    yield go
    for machine in started:
        machine.__exit__()


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waits(leader, machine, *, after):
    """Whether a machine waits for the start after that one, as far as the leader knows, and is connected to it."""
    return leader._is_open(machine) and leader._peers[machine].waits == after


def restart(machines):
    """What the launchers come to whose ranks have failed."""
    for machine in machines:
        machine.begin()
    return [machine.end() for machine in machines]


def test_after_machine_0_is_lost_the_next_one_leads(run):
    zero, *others = run(3)
    zero.die()
    found = restart(others)
    assert {view.leader for view in found} == {1}
    assert {view.machines for view in found} == {(1, 2)}
    assert {view.number for view in found} == {2}
    assert others[0].opened == [2]
    assert {view.launched for view in found} == {0.0}
    assert all(signal.SIGTERM in machine.signals for machine in others)
    found = restart(others)  # again, with the new leader
    assert [(view.number, view.leader) for view in found] == [(3, 1), (3, 1)]


def test_machines_0_and_1_are_lost_at_once(run):
    zero, one, *others = run(5)
    for lost in (zero, one):
        lost.die()
    assert {(view.leader, view.machines) for view in restart(others)} == {(2, (2, 3, 4))}


@pytest.mark.parametrize("dies", ["before it decides", "after it has decided"])
def test_machine_0_is_lost_during_a_restart(run, dies):
    zero, one, two = run(3)
    if dies == "before it decides":
        one.begin()
        two.begin()
        time.sleep(0.3)
        zero.die()
        found = [one.end(), two.end()]
    else:
        assert {view.number for view in restart([zero, one, two])} == {2}
        zero.die()  # the store is lost with it, so that all wait again
        found = restart([one, two])
    assert {(view.leader, view.machines) for view in found} == {(1, (1, 2))}


def test_the_new_leader_is_lost_during_a_restart(run):
    zero, one, two, three = run(4)
    zero.die()
    until(lambda: one._leads)
    two.begin()
    three.begin()
    time.sleep(0.5)
    one.die()
    assert [(view.leader, view.machines) for view in (two.end(), three.end())] == [(2, (2, 3)), (2, (2, 3))]


def test_the_run_ends_with_machine_0_if_that_was_ended(run):
    zero, one, two = run(3)
    zero.__exit__()  # as after a signal of the user
    for found in restart([one, two]):
        assert isinstance(found, CommunicationError)
        assert "The launcher of machine 0 has ended" in str(found)
        assert "signal" in str(found)
    assert not one._leads


def test_of_two_groups_one_goes_on(run):
    """A network failure between machines 0, 1 and 2, 3, 4."""
    machines = run(5)
    for machine in machines:
        machine.cut |= {0, 1} if machine.machine > 1 else {2, 3, 4}
    small, large = machines[:2], machines[2:]
    for machine in machines:
        machine.begin()
    assert {(m.end().leader, m.end().machines) for m in large} == {(2, (2, 3, 4))}
    for machine in small:
        assert isinstance(machine.end(), CommunicationError)
        assert "machines 2, 3, 4 are silent" in str(machine.end())
        assert "2 of 5 machines are here, and more than half are needed" in str(machine.end())


def test_of_two_halves_the_one_with_the_leader_goes_on(run):
    machines = run(4)
    for machine in machines:
        machine.cut |= {0, 1} if machine.machine > 1 else {2, 3}
        machine.begin()
    assert {(m.end().leader, m.end().machines) for m in machines[:2]} == {(0, (0, 1))}
    for machine in machines[2:]:
        assert "machines 0, 1 are silent" in str(machine.end())
        assert "half with machine 0, which led the last start" in str(machine.end())


def test_a_group_below_the_smallest_number_of_machines_ends(run):
    zero, one, two = run(3, least=3)
    zero.die()
    for found in restart([one, two]):
        assert "machine 0 is lost, and 2 of 3 machines are left, fewer than --min-nnodes 3" in str(found)


def test_machine_0_is_only_slow_and_waits_for_the_next_restart(run):
    zero, one, two = machines = run(3)
    for machine, others in zip(machines, ({1, 2}, {0}, {0}), strict=True):
        machine.cut |= others
    found = restart([one, two])
    assert {view.machines for view in found} == {(1, 2)}
    for machine in machines:  # the network works again, and machine 0 has not decided yet
        machine.cut.clear()
    until(lambda: zero._leader == 1)
    assert not zero._leads
    assert zero.signals  # its ranks have ended
    zero.begin()
    until(lambda: waits(one, 0, after=2))
    found = [one.begin(), two.begin(), zero]
    assert {(m.end().leader, m.end().machines) for m in found} == {(1, (0, 1, 2))}
    assert one.outcome.why == "all 3 machines continue"


@pytest.mark.parametrize("number", [0, 2])
def test_a_machine_that_was_started_again_is_taken_in_at_the_next_restart(run, number, capsys):
    machines = run(3)
    machines[number].die()
    left = [machine for machine in machines if machine.machine != number]
    leader = left[0].machine
    assert {view.machines for view in restart(left)} == {tuple(m.machine for m in left)}
    back = run.launch(number, nnodes=3)
    until(lambda: waits(left[0], number, after=2))
    assert back.outcome is None
    assert "it waits for the next restart" in capsys.readouterr().err
    for machine in left:
        machine.begin()
    everyone = [*left, back]
    assert {(m.end().leader, m.end().machines, m.end().number) for m in everyone} == {(leader, (0, 1, 2), 3)}
    assert {m.end().launched for m in everyone} == {0.0}  # when the run was launched, not the machine


@pytest.mark.parametrize("ends_well", [True, False])
def test_a_machine_that_waits_ends_with_the_run(run, ends_well):
    zero, one = run(2)
    one.die()
    restart([zero])
    back = run.launch(1, nnodes=2)
    until(lambda: back._view.number == 2)
    zero.succeeds = ends_well
    zero.__exit__()
    assert isinstance(back.end(), NotNeeded if ends_well else CommunicationError)


def test_a_second_launcher_of_a_machine_that_runs_is_refused(run):
    zero, one, _ = run(3)
    second = run.launch(1, nnodes=3)
    assert "Machine 1 takes part already, with another launcher" in str(second.end())
    assert one.signals == zero.signals == []


def test_a_machine_that_is_started_again_at_once_ends_the_ranks_of_the_others(run):
    """Before its loss was noticed."""
    zero, one, two = run(3)
    one.die()
    until(lambda: not zero._is_open(1))
    back = run.launch(1, nnodes=3)
    until(lambda: zero.signals and waits(zero, 1, after=1))
    found = [zero.begin(), two.begin(), back]
    assert {(machine.end().number, machine.end().machines) for machine in found} == {(2, (0, 1, 2))}


def test_a_machine_that_the_mesh_does_not_need_waits(run):
    fits = tuple(Fit(ranks=n, data_parallel=n, mesh=f"dp {n}") for n in (4, 2, 1))
    machines = run(4, read_notes=lambda: Notes(fits=fits, accumulates=True))
    machines[3].die()
    for machine in machines[:3]:
        machine.begin()
    assert [machines[n].end().machines for n in (0, 1)] == [(0, 1), (0, 1)]
    until(lambda: machines[2]._view.number == 2)
    assert machines[2].outcome is None
    machines[1].die()
    assert machines[0].begin().end().machines == machines[2].end().machines == (0, 2)


def test_of_what_a_launcher_says_the_latest_counts(run):
    """Over two connections it may arrive in another order."""
    zero = run(2)[0]
    until(lambda: (one := zero._peers[1]).view.number == 1 and one.waits is None and len(one.addresses) == 2)
    latest = zero._peers[1]
    zero._take(1, dataclasses.replace(latest, version=latest.version - 1, waits=5))
    assert zero._peers[1] == latest
    zero._take(1, dataclasses.replace(latest, version=latest.version + 1, waits=5))
    assert zero._peers[1].waits == 5


def test_notes_of_machine_0_outlive_it(run):
    zero, one = run(2, read_notes=Notes)
    zero._read_notes = lambda: NOTES
    until(lambda: one._notes == NOTES)
    zero.die()
    assert restart([one])[0].machines == (1,)


def test_machines_that_do_not_come_to_the_first_start_are_named(run):
    zero = Machine(0, nnodes=4, port=free_port())
    zero._first_patience = 0.2
    with zero:
        text = str(zero.begin().end())
    assert "3 of 4 machines have not come within 0 s: 1, 2, 3" in text


# ---- who may go on ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("here", "last", "ended", "goes_on"),
    [
        ([1, 2], [0, 1, 2], [], True),
        ([1], [0, 1, 2], [], False),
        ([0], [0, 1, 2], [], False),
        ([0], [0, 1], [], True),  # half, with the leader
        ([1], [0, 1], [], False),
        ([1], [0, 1], [0], True),  # its launcher has ended: it does not go on
        ([3], [0, 1, 2, 3], [0, 1, 2], True),
        ([3], [0, 1, 2, 3], [0, 1], False),
        ([0, 5], [0, 1, 2], [], False),  # one that waits does not count
        ([0, 1], [0, 1], [], True),
    ],
)
def test_more_than_half_go_on_or_half_with_the_leader(here, last, ended, goes_on):
    assert (reason_to_end(here, last=last, ended=ended, leader=0) is None) == goes_on


def test_no_two_groups_of_a_split_go_on():
    for machines in range(1, 9):
        last = list(range(machines))
        for mask in range(2**machines):
            groups = [[m for m in last if mask >> m & 1 == side] for side in (0, 1)]
            going = [group for group in groups if group and reason_to_end(group, last=last, ended=(), leader=0) is None]
            assert len(going) <= 1


# ---- messages --------------------------------------------------------------------------------------------------------
def test_a_status_is_read_as_it_was_written():
    view = View(number=3, leader=1, machines=(1, 2), launchers={1: "a", 2: "b"}, full_size=4, why="w", store=("h", 1))
    given = Status(
        machine=1,
        launcher="a",
        version=7,
        follows=1,
        port=2,
        waits=None,
        view=view,
        addresses={1: ("h", 2)},
        notes=NOTES,
        refused=("c",),
    )
    assert read_status(given.to_bytes()) == given


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b"null", b'{"view": 1, "notes": {}}', b"[" * 100_000, b"\xff", json.dumps({"a": 1})],
    ids=range(9),
)
def test_a_status_that_is_none_is_refused(content):
    with pytest.raises(Refused):
        read_status(content)
