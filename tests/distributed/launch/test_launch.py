"""``neuron-accel launch`` with real ranks: environment, exit codes, signals, logs, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time

import psutil
import pytest

SECONDS = 60


@pytest.fixture
def script(tmp_path):
    """Writes the training script; it can say ``report(something)``, which the test reads with ``reports()``."""
    header = (
        "import json, os, pathlib, signal, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        f"folder = pathlib.Path({str(tmp_path)!r}, 'reports')\n"
        "folder.mkdir(exist_ok=True)\n"
        "def report(value):\n"
        "    (folder / f'.{rank}').write_text(json.dumps({'pid': os.getpid(), 'value': value}))\n"
        "    (folder / f'.{rank}').rename(folder / f'{rank}.json')\n"
        "def wait_for(*ranks):\n"
        "    while not all((folder / f'{r}.json').exists() for r in ranks):\n"
        "        time.sleep(0.01)\n"
    )

    def write(body):
        path = tmp_path / "train.py"
        path.write_text(header + body)
        return str(path)

    return write


@pytest.fixture
def reports(tmp_path):
    def read():
        return {int(p.stem): json.loads(p.read_text()) for p in (tmp_path / "reports").glob("*.json")}

    return read


def until(condition, timeout=SECONDS):
    deadline = time.monotonic() + timeout * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def free_port():
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def alive(pids):
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def test_ranks_meet_and_get_their_arguments_and_environment(start, script, reports):
    body = """
import torch, torch.distributed as dist
from neuron_accel.backends.process_group import let_threads_finish
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
let_threads_finish()  # or PyTorch may abort at the end of a bare script
names = ["OMP_NUM_THREADS", "ACCELERATE_USE_CPU", "MASTER_ADDR", "LOCAL_RANK", "WORLD_SIZE"]
report([total.item(), sys.argv[1:], *[os.environ[name] for name in names]])
print("out", rank)
print("err", rank, file=sys.stderr)
"""
    code, out, err = start(
        "--nproc-per-node", "2", "--cpu", script(body), "--epochs", "3", "--dry-run", forked=True
    ).finish()
    assert code == 0, err
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in (0, 1):
        expected = [2.0, ["--epochs", "3", "--dry-run"], threads, "true", "127.0.0.1", str(rank), "2"]
        assert reports()[rank]["value"] == expected
    assert out.splitlines()[-1] == "out 0"  # gloo of torch 2.9 prints a line of its own before it
    assert "out 1" not in out
    assert "err 0" in err
    assert "err 1" not in err
    assert err.count("OMP_NUM_THREADS=") == 1


def test_a_killed_rank_is_named_by_a_launcher_that_notices_late(start, script):
    """As on an overloaded machine: before the launcher runs again, the other rank has failed as a consequence."""
    body = """
import signal, time
import torch.distributed as dist, torch
dist.init_process_group("gloo")
dist.barrier()
if rank == 1:
    os.kill(os.getppid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))
"""
    launch = start("--nproc-per-node", "2", "--cpu", "--quiet", script(body), forked=True)
    launcher = psutil.Process(launch.process.pid)
    deadline = time.monotonic() + 40
    while launcher.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(3.5)  # the times in the agent's report are whole seconds
    launch.signal(signal.SIGCONT)
    code, _, err = launch.finish()
    assert "rank 1 failed first: ended by SIGKILL" in err
    assert "then rank 0: exit code 1" in err
    assert code == 137


def test_the_exit_code_is_that_of_the_rank_that_failed_first(start, script):
    body = """
import torch.distributed as dist, torch
dist.init_process_group("gloo")
if rank == 1:
    print("about to fail")
    raise SystemExit(7)
dist.all_reduce(torch.ones(1))
"""
    code, _, err = start("--nproc-per-node", "3", "--quiet", script(body), forked=True).finish()
    assert code == 7, err
    assert "neuron-accel: rank 1 failed first: exit code 7" in err


@pytest.mark.parametrize(
    ("leaves", "how"),
    [
        ("raise SystemExit", r"sys\.exit at .*, line \d+ \(exit code 0\)"),
        ("os._exit(0)", r"exit code 0 without reaching the end of the script"),
    ],
)
def test_a_rank_that_left_is_named_before_the_one_that_waited_for_it(start, script, leaves, how):
    body = f"""
import torch.distributed as dist, torch
dist.init_process_group("gloo")
if rank == 1:
    {leaves}
dist.all_reduce(torch.ones(1))
"""
    code, _, err = start("--nproc-per-node", "2", "--quiet", script(body), forked=True).finish()
    assert code == 1, err
    first, second = err[err.index("neuron-accel: ") :].splitlines()[:2]
    host = re.escape(socket.gethostname())
    assert re.match(rf"neuron-accel: rank 1 on {host} ended before the others: {how}", first)
    assert second.startswith("rank 0 failed first: exit code 1, ")


def test_a_rank_that_is_gone_is_named_while_the_others_wait(start, script):
    body = """
if rank == 1:
    os._exit(0)
time.sleep(0 if rank == 2 else 10)  # 2 reaches the end, which is no departure
"""
    code, _, err = start("--nproc-per-node", "3", "--quiet", script(body)).finish()
    assert code == 0, err
    (line,) = err.splitlines()
    assert re.match(r"neuron-accel: rank 1 on \S+ ended before the end of the script without an error", line)


def test_the_traceback_of_a_rank_whose_output_is_not_shown_is_shown(start, script):
    body = "if rank == 1:\n    raise ValueError('boom')\ntime.sleep(60)\n"
    code, _, err = start("--nproc-per-node", "2", "--quiet", script(body)).finish()
    assert code == 1
    assert "rank 1 failed first: exit code 1, ValueError: boom" in err
    assert "  | ValueError: boom" in err
    folder = err.partition("its output is in ")[2].partition(";")[0]
    with open(os.path.join(folder, "stderr.log")) as log:
        assert "raise ValueError('boom')" in log.read()


def test_a_signal_that_ends_a_rank_becomes_the_exit_code_of_a_shell(start, script):
    body = "if rank == 0:\n    os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)\n"
    code, _, err = start("--nproc-per-node", "2", "--quiet", script(body)).finish()
    assert code == 128 + signal.SIGKILL
    assert "rank 0 failed first: ended by SIGKILL" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_every_rank(start, script, reports, number):
    launch = start("--nproc-per-node", "2", "--quiet", script("report('here')\ntime.sleep(60)\n"))
    until(lambda: len(reports()) == 2)
    launch.signal(number)
    code, _, err = launch.finish(timeout=15)
    assert code == 128 + number
    assert f"ended by {number.name}" in err
    assert alive(entry["pid"] for entry in reports().values()) == []


def test_a_rank_that_ignores_signals_is_killed_after_the_grace(start, script, reports):
    body = "signal.signal(signal.SIGTERM, lambda *_: report('asked'))\nreport('here')\nwhile True: time.sleep(1)\n"
    launch = start("--nproc-per-node", "1", "--quiet", "--grace", "1", script(body))
    until(lambda: len(reports()) == 1)
    launch.signal(signal.SIGTERM)
    assert launch.finish()[0] == 128 + signal.SIGTERM
    assert reports()[0]["value"] == "asked"
    assert alive(entry["pid"] for entry in reports().values()) == []


def test_a_rank_that_does_not_see_an_interrupt_is_terminated(start, script, reports):
    """A rank like one inside a collective, where Python's signal handlers do not run."""
    body = "signal.signal(signal.SIGINT, signal.SIG_IGN)\nreport('here')\ntime.sleep(60)\n"
    launch = start("--nproc-per-node", "1", "--quiet", script(body))
    until(lambda: len(reports()) == 1)
    launch.signal(signal.SIGINT)
    assert launch.finish(timeout=20)[0] == 128 + signal.SIGINT
    assert alive(entry["pid"] for entry in reports().values()) == []


def test_an_interrupt_ends_a_launcher_that_waits_for_another_machine(start, script):
    port = free_port()
    launch = start("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), script("report(1)"))
    until(lambda: listens(port))
    launch.signal(signal.SIGINT)
    assert launch.finish(timeout=10)[0] == -signal.SIGINT


def test_a_second_signal_does_not_wait(start, script, reports):
    body = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
report("here")
time.sleep(60)
"""
    launch = start("--nproc-per-node", "1", "--quiet", script(body))
    until(lambda: len(reports()) == 1)
    launch.signal(signal.SIGINT)
    time.sleep(0.5)
    assert launch.process.is_alive()
    launch.signal(signal.SIGINT)
    assert launch.finish(timeout=10)[0] == 128 + signal.SIGINT
    assert alive(entry["pid"] for entry in reports().values()) == []


def test_no_rank_outlives_a_launcher_that_is_killed(start, script, reports):
    launch = start("--nproc-per-node", "2", "--quiet", script("report('here')\ntime.sleep(60)\n"))
    until(lambda: len(reports()) == 2)
    launch.signal(signal.SIGKILL)
    until(lambda: alive(entry["pid"] for entry in reports().values()) == [], timeout=5)


def test_logs_are_kept_and_shown_with_the_rank_in_front(start, script, tmp_path):
    body = "print('out', rank)\nprint('err', rank, file=sys.stderr)\n"
    logs = tmp_path / "logs"
    code, out, err = start("--nproc-per-node", "2", "--tee", "--log-dir", str(logs), script(body)).finish()
    assert code == 0, err
    for rank in (0, 1):
        assert (logs / f"rank_{rank}" / "stdout.log").read_text() == f"out {rank}\n"
        assert (logs / f"rank_{rank}" / "stderr.log").read_text() == f"err {rank}\n"
        assert f"[rank {rank}] out {rank}" in out.splitlines()
        assert f"[rank {rank}] err {rank}" in err.splitlines()


def test_ranks_are_restarted_as_often_as_asked(start, script, reports, tmp_path):
    body = (
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\nreport(attempt)\nsys.exit(0 if attempt == 1 else 5)\n"
    )
    code, _, err = start("--max-restarts", "1", "--quiet", "--log-dir", str(tmp_path / "logs"), script(body)).finish()
    assert code == 0, err
    assert reports()[0]["value"] == 1
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"rank_0", "rank_0_attempt_1"}


LISTENING = """
import psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
side = dist.new_group([0, 1])
total = torch.full((1,), float(rank + 1))
dist.all_reduce(total, group=side)
both = [psutil.Process(pid) for pid in (os.getpid(), os.getppid())]
found = [c.laddr.ip for process in both for c in process.net_connections() if c.status == "LISTEN"]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.barrier()
if attempt == 0:
    sys.exit(5)
report([total.item(), found, os.environ["MASTER_PORT"]])
wait_for(0, 1)
"""


@pytest.mark.parametrize("with_port", [False, True], ids=["free port", "given port"])
def test_one_machine_listens_on_the_loopback_only_also_after_a_restart(start, script, reports, with_port):
    port = str(free_port())
    options = ["--master-port", port] if with_port else []
    launch = start("--nproc-per-node", "2", "--max-restarts", "1", *options, "--quiet", script(LISTENING))
    code, _, err = launch.finish()
    assert code == 0, err
    for rank in (0, 1):
        total, addresses, used = reports()[rank]["value"]
        assert total == 3
        assert set(addresses) == {"127.0.0.1"}, addresses
        assert len(addresses) >= 2  # the store of the launcher, and gloo
        assert used == port or not with_port


def test_two_machines_meet(start, script, reports):
    body = """
import torch, torch.distributed as dist
from neuron_accel.backends.process_group import let_threads_finish
dist.init_process_group("gloo")
total = torch.full((1,), float(rank + 1))
dist.all_reduce(total)
let_threads_finish()
report([total.item(), os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"]])
"""
    port = free_port()
    common = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), "--quiet", script(body)]
    machines = [start("--node-rank", str(machine), *common, forked=True) for machine in (0, 1)]
    for machine in machines:
        code, _, err = machine.finish()
        assert code == 0, err
    assert {rank: entry["value"] for rank, entry in reports().items()} == {
        0: [3.0, "0", "0"],
        1: [3.0, "0", "1"],
    }
