"""Heartbeats between launchers: what ends the ranks of a machine, and that a stranger does not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import threading
import time

import psutil
import pytest

from neuron_accel.backends.select import Decision
from neuron_accel.cli import heartbeat
from neuron_accel.cli.heartbeat import BEAT, LEAVE, STATUS, Heartbeat, Refused, admit, introduce
from neuron_accel.cli.host import Host, listen
from neuron_accel.cli.launch_plan import LaunchRequest, check_request, plan_launch
from neuron_accel.cli.run_secret import VARIABLE, RunSecret, take_secret
from neuron_accel.errors import ConfigurationError
from neuron_accel.testing._call import free_port

SECRET = b"0123456789abcdef"
RUN = b"run"
CPU = Decision(backend="torch", device="cpu", reason="")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for name, seconds in (("PAUSE_S", 0.05), ("RETURN_S", 0.4), ("HANDSHAKE_S", 0.5)):
        monkeypatch.setattr(heartbeat, name, seconds)


@pytest.fixture
def machines():
    """Starts the heartbeats of machines; returns them with the signals that their ranks got."""
    port, started = free_port(), []

    def start(rank, secret=SECRET, nnodes=3, lost_after=60.0, **more):
        signals = []
        secret = secret if isinstance(secret, RunSecret) else RunSecret(secret)
        options = {"secret": secret, "lost_after": lost_after, "grace": 0.1, "send_signal": signals.append, **more}
        started.append(Heartbeat(rank, nnodes, ("127.0.0.1", port), **options))
        started[-1].__enter__()
        return started[-1], signals

    start.port = port
    yield start
    for one in started:
        one.__exit__()


def until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(port):
    until(lambda: any(c.status == "LISTEN" and c.laddr.port == port for c in psutil.Process().net_connections("tcp")))
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    connection.settimeout(5)
    return connection


def connections(machine, number):
    known = machine._machines.get(number)
    return known.connections if known else 0


def test_machines_that_leave_are_not_lost(machines):
    zero, zero_signals = machines(0)
    one, one_signals = machines(1)
    until(lambda: connections(zero, 1) == 1)
    one.__exit__()
    time.sleep(1)
    assert zero_signals == one_signals == []


def test_a_machine_whose_connection_ends_is_lost_and_the_ranks_are_ended(machines):
    zero, signals = machines(0)
    introduce(connection := connect(machines.port), SECRET, zero._run, 1)
    until(lambda: connections(zero, 1) == 1)
    connection.close()
    until(lambda: len(signals) == 2)
    assert signals == [signal.SIGTERM, signal.SIGKILL]


def test_the_end_waits_for_threads_that_threads_have_started():
    began, ended = threading.Event(), []

    class Nested(Heartbeat):
        def _works(self):
            return [lambda: self._start(self._inner)]

        def _inner(self):
            began.set()
            self._over.wait()
            time.sleep(0.03)
            ended.append(True)

    with Nested(0, 2, ("127.0.0.1", 1), secret=RunSecret(SECRET), lost_after=60.0, grace=0.1):
        assert began.wait(10)
    assert ended == [True]


def test_a_machine_whose_launch_is_over_is_gone(machines):
    zero, signals = machines(0)
    one, _ = machines(1)
    until(lambda: connections(zero, 1) == 1)
    one.__exit__()
    until(lambda: zero.gone == {1})
    assert signals == []


def test_a_last_message_counts_although_the_connection_has_ended_since():
    """The other side has closed it, so that sending fails before the message is read."""
    zero, one, left, right = pair()
    beats = Heartbeat(0, 8, ("127.0.0.1", 1), secret=RunSecret(SECRET), lost_after=60.0, grace=0.1)
    one.send(LEAVE)
    right.close()
    assert beats._watch(zero, 7, heartbeat._Machine(heard=time.monotonic()))
    assert beats.gone == {7}
    left.close()


def test_a_last_message_arrives_although_its_sender_has_not_read_everything():
    """Closing such a connection resets it, and drops what the system has not sent yet."""
    for _ in range(5):
        zero, one, left, right = pair(tcp_pair)
        one.send(BEAT)
        for _ in range(3):
            zero.send(BEAT)
        zero.leave(b"1")
        left.close()
        kinds = [one.receive(5).kind for _ in range(4)]
        assert kinds == [BEAT, BEAT, BEAT, LEAVE]
        right.close()


def test_machine_0_whose_connection_ends_is_lost(machines):
    with socket.create_server(("127.0.0.1", machines.port)) as listener:
        one, signals = machines(1)
        connection, _ = listener.accept()
        admit(connection, SECRET, one._run)
    connection.close()
    until(lambda: signals)


def test_a_machine_without_heartbeats_is_lost(machines, capsys):
    zero, signals = machines(0, lost_after=0.3)
    introduce(connection := connect(machines.port), SECRET, zero._run, 2)
    until(lambda: signals)
    assert "machine 2 sent no heartbeat for 0.3 s and is considered lost" in capsys.readouterr().err
    connection.close()


def test_a_second_connection_of_a_machine_is_not_its_death(machines):
    zero, signals = machines(0, lost_after=2.0)
    machines(1)
    until(lambda: connections(zero, 1) == 1)
    silent, ends = connect(machines.port), connect(machines.port)
    for connection in (silent, ends):
        introduce(connection, SECRET, zero._run, 1)
    until(lambda: connections(zero, 1) == 3)
    ends.close()
    until(lambda: connections(zero, 1) == 1)  # the silent one is closed
    time.sleep(0.6)
    assert signals == []
    silent.close()


def test_a_machine_that_comes_back_is_not_lost(machines):
    zero, signals = machines(0)
    introduce(first := connect(machines.port), SECRET, zero._run, 1)
    until(lambda: connections(zero, 1) == 1)
    first.close()
    until(lambda: connections(zero, 1) == 0)
    machines(1)
    until(lambda: connections(zero, 1) == 1)
    time.sleep(0.8)
    assert signals == []


@pytest.mark.parametrize(
    "sent",
    [b"", b"1\n", b"q", b"\x00" * 68, b"1\n" * 100_000, b"\x00\x00\x00\x01" + b"x" * 64, os.urandom(68)],
    ids=["nothing", "a number", "leave", "zeros", "much", "no proof", "random"],
)
def test_a_stranger_changes_nothing_and_is_reported_once(machines, sent, capsys):
    zero, signals = machines(0)
    machines(1)
    until(lambda: connections(zero, 1) == 1)
    for _ in range(2):
        with connect(machines.port) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(sent)
            while stranger.recv(4096):
                pass
    assert connections(zero, 1) == 1
    time.sleep(0.5)
    assert signals == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "did not prove that it knows the secret of this run" in said


def test_a_slow_stranger_gets_no_more_time_than_a_silent_one(machines):
    machines(0)
    began = time.monotonic()
    stranger = connect(machines.port)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - began < 5:
            stranger.sendall(b"\x00")
            time.sleep(0.1)
    assert time.monotonic() - began < 3
    stranger.close()


def test_strangers_that_wait_take_a_limited_number_of_threads(machines, monkeypatch):
    monkeypatch.setattr(heartbeat, "HANDSHAKE_S", 5.0)
    machines(0)
    strangers = [connect(machines.port) for _ in range(heartbeat.STRANGERS + 20)]
    time.sleep(0.5)
    named = [thread for thread in threading.enumerate() if thread.name == "neuron_accel_heartbeat"]
    assert heartbeat.STRANGERS // 2 < len(named) <= heartbeat.STRANGERS + 1
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("differs", ["secret", "number of machines"])
def test_machines_that_do_not_share_the_secret_say_so_and_go_on(machines, capsys, differs):
    zero, zero_signals = machines(0)
    _, one_signals = machines(1, b"another secret, as long") if differs == "secret" else machines(1, nnodes=2)
    time.sleep(0.7)
    assert connections(zero, 1) == 0
    assert zero_signals == one_signals == []
    said = capsys.readouterr().err
    assert said.count("lost machines are not detected") == 1
    assert said.count("did not prove") == 1
    assert "0123456789abcdef" not in said


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        right = socket.create_connection(server.getsockname())
        return server.accept()[0], right


def pair(make=socket.socketpair):
    """Both sides of a connection that has been authenticated, and their sockets."""
    left, right = make()
    found = {}
    thread = threading.Thread(target=lambda: found.update(zero=admit(left, SECRET, RUN)))
    thread.start()
    one = introduce(right, SECRET, RUN, 7)
    thread.join()
    number, zero = found["zero"]
    assert number == 7
    return zero, one, left, right


def test_a_message_cannot_be_repeated_reflected_or_inserted():
    zero, one, left, right = pair()
    one.send(STATUS, b"content")
    message = left.recv(100)
    right.sendall(message[:3])
    with pytest.raises(TimeoutError):
        zero.receive(0.05)
    right.sendall(message[3:])
    assert zero.receive(1) == (STATUS, b"content")
    right.sendall(message)  # repeated
    with pytest.raises(Refused):
        zero.receive(1)
    zero, one, left, right = pair()
    one.send(LEAVE)
    left.sendall(left.recv(100))  # reflected
    with pytest.raises(Refused):
        one.receive(1)
    zero, one, left, right = pair()
    one.send(STATUS, b"content")
    right.sendall(left.recv(100).replace(b"content", b"contend"))  # changed
    with pytest.raises(Refused):
        zero.receive(1)
    zero, one, left, right = pair()
    right.sendall(LEAVE * 33)  # inserted, and larger than any message
    with pytest.raises(Refused):
        zero.receive(1)
    for connection in (left, right):
        connection.close()


def test_a_false_machine_0_is_refused():
    left, right = socket.socketpair()
    left.sendall(heartbeat._VERSION + b"n" * 32 + b"p" * 32)
    with pytest.raises(Refused):
        introduce(right, SECRET, RUN, 1)
    assert SECRET not in left.recv(1000)
    left.close()
    right.close()


# ---- the secret ------------------------------------------------------------------------------------------------------
def test_machine_0_writes_the_secret_for_its_owner_only_and_removes_it(tmp_path, machines):
    file = tmp_path / "secret"
    old = os.umask(0)
    try:
        one, _ = machines(1, RunSecret(None, file))  # started first: it waits
        zero, _ = machines(0, RunSecret(None, file))
    finally:
        os.umask(old)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(file.read_bytes().strip()) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    until(lambda: connections(zero, 1) == 1)
    one.__exit__()
    zero.__exit__()
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_was_there_stays(tmp_path):
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    file.chmod(0o600)
    secret = RunSecret(None, file)
    secret.make()
    assert secret.read() == SECRET
    secret.remove()
    assert file.exists()


def _readable(file):
    file.write_bytes(SECRET)
    file.chmod(0o640)


def _link(file):
    (file.parent / "other").write_bytes(SECRET)
    (file.parent / "other").chmod(0o600)
    file.symlink_to(file.parent / "other")


def _short(file):
    file.write_bytes(b"short")
    file.chmod(0o600)


def _long(file):
    file.write_bytes(b"x" * 100_000)
    file.chmod(0o600)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_readable, "can be read by others (mode 0640)"),
        (_link, "cannot be opened"),
        (_short, "has 5 characters"),
        (_long, "has more than 4096 characters"),
        (lambda file: file.mkdir(), "is not a file"),
        (lambda file: os.mkfifo(file, 0o600), "is not a file"),
    ],
    ids=["readable", "link", "short", "long", "folder", "pipe"],
)
def test_a_file_that_others_could_have_read_or_written_is_refused(tmp_path, make, what):
    file = tmp_path / "secret"
    make(file)
    for call in (RunSecret(None, file).read, RunSecret(None, file).make):
        with pytest.raises(ConfigurationError, match="secret") as error:
            call()
        assert what in str(error.value)
        assert SECRET.decode() not in str(error.value)


def test_ranks_do_not_inherit_the_secret_and_it_is_not_printed():
    environ = {VARIABLE: SECRET.decode(), "OTHER": "1"}
    secret = take_secret(environ, None)
    assert environ == {"OTHER": "1"}
    assert secret.read() == SECRET
    assert SECRET.decode() not in repr(secret)
    assert take_secret({}, None) is None
    with pytest.raises(ConfigurationError, match="16 to 4096"):
        take_secret({VARIABLE: "short"}, None)


# ---- where it listens ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("host", "interface", "address"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("localhost", None, "127.0.0.1"),
        ("192.0.2.1", None, "0.0.0.0"),  # not an address of this machine
        ("192.0.2.1", "lo", "127.0.0.1"),
    ],
)
def test_it_listens_on_the_interface_that_has_the_address(host, interface, address):
    with listen(host, 0, interface=interface) as listener:
        assert listener.getsockname()[0] == address


# ---- a launch --------------------------------------------------------------------------------------------------------
def plan(tmp_path, environment, **fields):
    script = tmp_path / "train.py"
    script.touch()
    request = LaunchRequest(target=str(script), master_addr="10.0.0.1", nnodes=2, **fields)
    return plan_launch(request, Host(cores=8, loopback="lo", torch_xla=False), CPU, environment)


def test_without_a_secret_there_are_no_heartbeats_and_the_plan_says_why(tmp_path):
    without, given = plan(tmp_path, {}), plan(tmp_path, {VARIABLE: SECRET.decode()})
    assert (without.heartbeat, given.heartbeat) == (0, 30)
    assert f"set {VARIABLE} to the same value on all machines" in without.explain()
    assert "heartbeat 30" in given.explain()
    assert "no heartbeats" not in given.explain() + plan(tmp_path, {}, heartbeat=0.0).explain()
    assert plan(tmp_path, {}, secret_file="/shared/secret", heartbeat=6.0).heartbeat == 6
    assert SECRET.decode() not in given.explain()


def test_heartbeats_that_are_asked_for_need_a_secret(tmp_path):
    with pytest.raises(ConfigurationError, match="--secret-file"):
        plan(tmp_path, {}, heartbeat=6.0)


@pytest.mark.parametrize(
    "fields", [{"nnodes": 1, "secret_file": "x"}, {"heartbeat": 0.0, "secret_file": "x"}, {"secret_file": ""}]
)
def test_a_secret_that_has_no_effect_is_refused(tmp_path, fields):
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(ConfigurationError, match="--secret-file"):
        check_request(LaunchRequest(target=str(script), **{"nnodes": 2, "master_addr": "a", **fields}))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"nnodes": 1}, "on one machine."),
        ({"max_restarts": 0}, "without --max-restarts."),
        ({"heartbeat": 0.0}, "without heartbeats."),
        ({"min_nnodes": 5}, "--min-nnodes 5 is not possible here."),
        ({"min_nnodes": 0}, "--min-nnodes 0 is not possible here."),
    ],
)
def test_a_smallest_number_of_machines_needs_restarts_and_heartbeats(tmp_path, fields, what):
    (tmp_path / "t.py").touch()
    given = {"nnodes": 4, "master_addr": "127.0.0.1", "max_restarts": 1, "min_nnodes": 2, **fields}
    with pytest.raises(ConfigurationError) as caught:
        check_request(LaunchRequest(target=str(tmp_path / "t.py"), **given))
    assert what in str(caught.value)
    check_request(LaunchRequest(target=str(tmp_path / "t.py"), **{**given, "nnodes": 4, **VALID}))


VALID = {"max_restarts": 1, "heartbeat": None, "min_nnodes": 2}
