"""Machines that are lost, as launchers of one host: the others end, or go on, in a known time."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import psutil
import pytest
from torch.distributed import TCPStore

from neuron_accel.launch.lost import LOST_CODE, Watch
from neuron_accel.launch.rendezvous import Start

SITS = "import os, sys, time\nopen(os.path.join(sys.argv[1], os.environ['RANK']), 'w').close()\ntime.sleep(300)\n"


def stop(pid):
    """Suspends a launcher and its ranks: their connections stay open."""
    launcher = psutil.Process(pid)
    for process in (launcher, *launcher.children()):
        process.suspend()
    return [launcher, *launcher.children()]


def wait_for(condition):
    deadline = time.monotonic() + 90 * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def listens(endpoint):
    host, port = endpoint.split(":")
    with socket.socket() as client:
        return client.connect_ex((host, int(port))) == 0


@pytest.mark.parametrize("lost", [0, 2], ids=["the store's", "another"])
def test_ranks_that_wait_for_a_machine_that_is_lost_are_ended(start, tmp_path, lost):
    """As in a collective that never fails. Nobody is blamed for what the launchers have ended."""
    (tmp_path / "sits.py").write_text(SITS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", str(port), "--cpu", "--quiet"]
    options += ["--heartbeat", "3", "--grace", "5", str(tmp_path / "sits.py"), str(tmp_path)]
    machines = [start("--node-rank", str(node), *options, forked=True) for node in range(3)]
    wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(3)))
    stopped = stop(machines[lost].process.pid)
    try:
        for node in {0, 1, 2} - {lost}:
            code, _, err = machines[node].finish(timeout=30)
            assert code == LOST_CODE, err
            gone = f"machine 2 ({socket.gethostname()})" if lost else f"the machine with the store, 127.0.0.1:{port},"
            assert f"neuron-accel: the run has ended: {gone} is lost" in err
            assert "failed first" not in err
            assert "without an error" not in err
    finally:
        for process in stopped:
            process.send_signal(signal.SIGKILL)


WAITS = """
import os, sys, time
folder, ranks = sys.argv[1], os.environ["WORLD_SIZE"]
open(os.path.join(folder, os.environ["RANK"] + "_of_" + ranks), "w").close()
while ranks == "3" or not os.path.exists(os.path.join(folder, "lost")):
    time.sleep(0.1)
"""


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ends", "goes on"])
def test_a_launcher_that_is_ended_by_a_signal(start, tmp_path, goes_on):
    """As by a scheduler that drains a machine, with ranks that wait in a collective that never fails. With a number
    that may vary, the third machine comes late, and takes part as well."""
    (tmp_path / "waits.py").write_text(WAITS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    options = ["--nnodes", "3", "--master-addr", "127.0.0.1", "--master-port", endpoint.partition(":")[2]]
    if goes_on:
        options = [
            "--nnodes",
            "2:3",
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-conf",
            "last_call_timeout=5,keep_alive_interval=10,keep_alive_max_attempt=2",
        ]
    options += ["--cpu", "--quiet", "--grace", "5", str(tmp_path / "waits.py"), str(tmp_path)]
    machines = []
    for node in range(3):
        machines.append(start("--node-rank", str(node), *options))
        wait_for(lambda: listens(endpoint))  # at the first, which has the store
        if node == 1 and goes_on:
            wait_for(lambda: len(list(tmp_path.glob("*_of_2"))) == 2)
    wait_for(lambda: len(list(tmp_path.glob("*_of_3"))) == 3)
    for path in tmp_path.glob("*_of_2"):
        path.unlink()
    (tmp_path / "lost").touch()
    machines[2].signal(signal.SIGTERM)
    ends = [machine.finish(timeout=60) for machine in machines]
    assert [code for code, _, _ in ends] == ([0, 0, 143] if goes_on else [143] * 3), ends
    for _, _, err in ends[:2]:
        assert f"({socket.gethostname()}): its launcher was ended by SIGTERM" in err
        assert "failed first" not in err
    assert len(list(tmp_path.glob("*_of_2"))) == (2 if goes_on else 0)


def test_a_machine_that_comes_after_the_end_ends_with_an_error(start, tmp_path):
    """A limit of torch's rendezvous, which is closed then, though the run has succeeded."""
    (tmp_path / "train.py").write_text("")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "run", "--cpu", "--quiet"]
    options += ["--rdzv-conf", "is_host=false,last_call_timeout=1", str(tmp_path / "train.py")]
    assert start(*options).finish(timeout=60)[0] == 0
    code, _, err = start(*options).finish(timeout=60)
    assert code == 2, err
    assert f"The rendezvous at 127.0.0.1:{store.port} failed: the run has ended" in err


# ---- stamps, without launchers ---------------------------------------------------------------------------------------
@pytest.fixture
def watch():
    """Makes a watch of one of four machines, which records when its ranks are ended."""
    store, made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []

    def make(machine, machines=4, **options):
        ended = threading.Event()
        start = Start(number=0, run="r", machine=machine, machines=machines, store=store)
        options = {"lost_after": 2.0, "is_elastic": False, **options}
        made.append(Watch(start, end_ranks=ended.set, **options))
        made[-1].ended = ended
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_machines_that_are_there_or_have_left_are_not_missed(watch):
    three = [watch(machine) for machine in range(3)]
    watch(3).close()
    three[2].close()
    time.sleep(4)
    assert [one.end for one in three] == [None] * 3
    assert not three[0].ended.is_set()


def test_all_machines_learn_the_first_reason_and_only_that(watch):
    four = [watch(machine, is_elastic=True) for machine in range(4)]
    four[2].say(code=7, what="rank 5 failed first", is_final=True)
    four[1].say(code=8, what="rank 3 failed first", is_final=True)
    assert four[2].end is None  # it has said so
    assert not four[2].ended.is_set()
    for one in (four[0], four[1], four[3]):
        assert one.ended.wait(5)
        assert (one.end.code, one.end.is_final) == (7, True)
        assert one.end.what == f"machine 2 ({socket.gethostname()}): rank 5 failed first"


def test_a_rank_that_was_killed_is_named_before_the_errors_that_follow(watch):
    """The launcher whose rank was killed notices late, as on a busy machine."""
    two = [watch(machine, machines=2) for machine in range(2)]

    def say_late():
        time.sleep(2.5)
        two[1].say(code=137, what="rank 1 failed first: ended by SIGKILL", is_final=False)

    late = threading.Thread(target=say_late)
    late.start()
    two[0].wait_for_cause()
    two[0].say(code=1, what="rank 0 failed first: exit code 1", is_final=False)
    late.join()
    assert two[0].end.code == 137
    assert two[1].end is None


def test_a_machine_that_leaves_at_once_says_why_the_start_ended(watch, capfd):
    """Its own ranks had already failed, as their connections closed."""
    four = [watch(machine) for machine in range(4)]
    four[0].say(code=137, what="rank 0 failed first: ended by SIGKILL", is_final=False)
    for one in four[1:]:
        one.wait_for_cause()
        one.close()
    said = f"machine 0 ({socket.gethostname()}): rank 0 failed first: ended by SIGKILL; ending the ranks"
    assert capfd.readouterr().err.count(said) == 3


def test_two_neighbours_are_lost_at_once_and_the_run_may_go_on(watch):
    two = [watch(machine, is_elastic=True) for machine in (0, 3)]  # of four
    for one in two:
        assert one.ended.wait(8)
        assert (one.end.code, one.end.is_final) == (LOST_CODE, False)
        assert "machine 1 is lost: it sent no sign for 2 s" in one.end.what


def test_the_work_of_a_machine_does_not_grow_with_their_number(watch, monkeypatch):
    calls = []
    for name in ("set", "get", "check", "compare_set", "add"):
        real = getattr(TCPStore, name)
        monkeypatch.setattr(TCPStore, name, lambda self, *a, real=real: (calls.append(a), real(self, *a))[1])
    watch(0, machines=1000, lost_after=60.0)
    time.sleep(3)
    assert len(calls) <= 5 * 4
