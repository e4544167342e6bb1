"""Running a function on several ranks: results, every kind of failure, and no process or file left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist

from neuron_accel.doors import TEST_DEVICES
from neuron_accel.errors import CommunicationError, LayoutError, UsageError
from neuron_accel.testing import RankExit, RanksError, RankTimeout, ranks, run_ranks

MARK = "neuron-accel-ranks-"


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No process of a rank, no thread, file or open descriptor survives a test."""
    with contextlib.suppress(RanksError):
        run_ranks(rank_number, 1)  # starts the process that ranks are forked from, which is to stay
    before = leftovers()
    yield
    deadline = time.monotonic() + 5
    while leftovers() != before and time.monotonic() < deadline:
        time.sleep(0.02)  # the kernel takes its time to forget a killed process
    assert leftovers() == before


def leftovers() -> dict[str, set]:
    descendants = psutil.Process().children(recursive=True)
    return {
        "processes": {p.pid for p in descendants},
        "folders": {p.name for p in Path(tempfile.gettempdir()).glob(f"{MARK}{os.getpid()}-*")},
        "descriptors": set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set(),
        "threads": {t.ident for t in threading.enumerate()},
    }


# ---- success ---------------------------------------------------------------------------------------------------------
def rank_number() -> int:
    return dist.get_rank()


def add_over_ranks(x: torch.Tensor, factor: int = 1) -> torch.Tensor:
    x *= factor * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("n", [1, 2, 4])
def test_results_come_in_the_order_of_ranks(n):
    assert run_ranks(rank_number, n) == list(range(n))


def test_arguments_are_copies():
    x = torch.ones(3)
    results = run_ranks(add_over_ranks, 2, x, factor=10)
    assert [r.tolist() for r in results] == [[30.0] * 3] * 2
    assert x.tolist() == [1.0] * 3


def large(megabytes: int) -> bytes:
    return bytes([dist.get_rank()]) * (megabytes << 20)


def test_large_results():
    results = run_ranks(large, 2, 8)
    assert [len(r) for r in results] == [8 << 20] * 2
    assert [r[0] for r in results] == [0, 1]


def surroundings() -> dict:
    from accelerate import Accelerator

    accelerator = Accelerator()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "ACCELERATE_USE_CPU", "EXTRA")
    return {
        "environment": {name: os.environ.get(name) for name in names},
        "port": int(os.environ["MASTER_PORT"]),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "random": (random.random(), uuid.uuid4(), float(numpy.random.random())),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "processes": accelerator.num_processes,
        "device": accelerator.device.type,
        "others": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    }


def test_what_a_rank_finds(monkeypatch):
    monkeypatch.setenv("RANK", "17")
    first, second = run_ranks(surroundings, 2, env={"EXTRA": "yes"})
    for rank, found in enumerate((first, second)):
        assert found["environment"] == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "ACCELERATE_USE_CPU": "true",
            "EXTRA": "yes",
        }
        assert (found["backend"], found["threads"], found["processes"], found["device"]) == ("gloo", 1, 2, "cpu")
        assert found["others"] == ["watch-caller"]
    assert first["port"] == second["port"]
    assert first["seed"] == second["seed"]
    assert all(one != other for one, other in zip(first["random"], second["random"], strict=True))
    assert first["start method"] is None  # the platform's default, as in a rank that torchrun starts
    assert "EXTRA" not in os.environ


def environment_of(name: str) -> str | None:
    return os.environ.get(name)


def test_the_environment_is_the_callers_at_the_time_of_the_call(monkeypatch):
    monkeypatch.setenv("CHANGES", "1")
    assert run_ranks(environment_of, 1, "CHANGES") == ["1"]
    monkeypatch.setenv("CHANGES", "2")
    assert run_ranks(environment_of, 1, "CHANGES") == ["2"]
    monkeypatch.delenv("CHANGES")
    assert run_ranks(environment_of, 1, "CHANGES") == [None]


def state_of_the_world() -> tuple[bool, int]:
    import accelerate.state

    return dist.is_initialized(), len(accelerate.state.PartialState._shared_state)


def test_ranks_start_clean():
    assert run_ranks(state_of_the_world, 2, backend=None) == [(False, 0)] * 2
    assert run_ranks(state_of_the_world, 2) == [(True, 0)] * 2


def talk() -> None:
    print(f"out of {dist.get_rank()}")
    print("two\nlines", file=sys.stderr)
    os.write(1, b"from below\n")


def test_output_reaches_the_caller(capsys):
    run_ranks(talk, 2)
    out = capsys.readouterr().out
    for line in ("[rank 0] out of 0", "[rank 1] out of 1", "[rank 0] two", "[rank 1] lines", "[rank 0] from below"):
        assert line + "\n" in out


def finish_apart() -> int:
    """Rank 0 returns while rank 1 still receives from it."""
    payload = torch.ones(1 << 18)
    if dist.get_rank() == 1:
        time.sleep(0.2)
    dist.broadcast(payload, 0)
    return int(payload.sum())


def test_a_rank_that_is_done_does_not_disturb_the_others():
    assert run_ranks(finish_apart, 2) == [1 << 18] * 2


def load_data() -> list[int]:
    loader = torch.utils.data.DataLoader(range(8), batch_size=4, num_workers=2)
    return [int(batch.sum()) for batch in loader]


def test_ranks_may_have_workers():
    assert run_ranks(load_data, 2) == [[6, 22]] * 2


# ---- failure ---------------------------------------------------------------------------------------------------------
def fail_on(rank: int, others_wait: bool = False) -> None:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == rank:
        raise LayoutError("Dim 3 is odd.", where="layer 7", fix="pad it")
    if others_wait:
        dist.all_reduce(torch.ones(1))


def test_an_error_comes_with_rank_traceback_and_output():
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_on, 2, 1)
    error = caught.value
    assert set(error.errors) == {1}
    assert isinstance(error.__cause__, LayoutError)
    assert (error.__cause__.where, error.__cause__.fix) == ("layer 7", "pad it")
    for part in ("rank 1 of 2: LayoutError: Dim 3 is odd.", "in fail_on", "rank 1 was here"):
        assert part in str(error)
    assert "in fail_on" in error.tracebacks[1]
    assert error.outputs == {0: "rank 0 was here\n", 1: "rank 1 was here\n"}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_cause_is_the_error_that_the_others_follow_from(rank):
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_on, 2, rank, others_wait=True)
    assert isinstance(caught.value.__cause__, LayoutError)
    assert isinstance(caught.value.errors[1 - rank], RuntimeError)
    assert str(caught.value).startswith(f"rank {rank} of 2: LayoutError")


def fail_together() -> None:
    raise ValueError(f"number {dist.get_rank()}")


def test_every_error_is_there():
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_together, 3)
    assert {rank: str(error) for rank, error in caught.value.errors.items()} == {i: f"number {i}" for i in range(3)}


def test_errors_of_ranks_can_be_pickled():
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_on, 2, 0)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert isinstance(copy.__cause__, LayoutError)
    assert str(pickle.loads(pickle.dumps(RankExit(-9)))) == str(RankExit(-9))


class Stubborn(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one}{two}")


def fail_stubbornly() -> None:
    raise Stubborn("un", "picklable")


def test_errors_that_cannot_be_pickled():
    with pytest.raises(RanksError, match="Stubborn: unpicklable"):
        run_ranks(fail_stubbornly, 1)


def return_a_lambda():
    return lambda: None


def test_results_that_cannot_be_pickled():
    with pytest.raises(RanksError, match="lambda"):
        run_ranks(return_a_lambda, 1)


def leave(how: str) -> None:
    if dist.get_rank() == 1:
        sys.stdout.write("last words")
        sys.stdout.flush()
        {
            "exit": lambda: os._exit(3),
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "sys.exit": lambda: sys.exit(4),
            "abort": os.abort,
        }[how]()


@pytest.mark.parametrize(
    ("how", "words"),
    [("exit", "exit code 3"), ("kill", "signal SIGKILL"), ("sys.exit", "SystemExit: 4"), ("abort", "signal SIGABRT")],
)
def test_a_rank_that_dies(how, words):
    with pytest.raises(RanksError, match=words) as caught:
        run_ranks(leave, 2, how)
    assert set(caught.value.errors) == {1}
    assert caught.value.outputs[1].startswith("last words")
    if how == "abort":
        assert "in leave" in caught.value.outputs[1]  # where it was


def sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(300)


@pytest.mark.parametrize(("factor", "limit"), [("1", r"0\.5"), ("2.5", r"1\.25")])
def test_time_is_limited(monkeypatch, factor, limit):
    monkeypatch.setenv("NEURON_ACCEL_TIMEOUT_FACTOR", factor)
    with pytest.raises(RanksError, match=rf"rank 1 of 2: RankTimeout: still running after {limit} s") as caught:
        run_ranks(sleep_on, 2, 1, timeout=0.5)
    assert set(caught.value.errors) == {1}
    assert isinstance(caught.value.errors[1], RankTimeout)
    assert "in sleep_on" in caught.value.tracebacks[1]


def hang_in_a_collective() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(300)


def test_time_is_limited_in_collectives():
    with pytest.raises(RanksError) as caught:
        run_ranks(hang_in_a_collective, 2, timeout=0.5)
    assert "all_reduce" in caught.value.tracebacks[0]
    assert "in hang_in_a_collective" in caught.value.tracebacks[1]


def fail_and_sleep() -> None:
    if dist.get_rank() == 0:
        raise ValueError("first")
    time.sleep(300)


def test_the_others_have_a_grace_after_a_failure():
    with pytest.raises(RanksError) as caught:
        run_ranks(fail_and_sleep, 2, timeout=100, grace=0.3)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "after rank 0 had failed" in str(caught.value.errors[1])


def have_children(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    Path(folder, f"child{dist.get_rank()}").write_text(str(child.pid))
    if dist.get_rank() == 0:
        os._exit(1)
    time.sleep(300)


def test_what_ranks_started_ends_with_them(tmp_path):
    with pytest.raises(RanksError):
        run_ranks(have_children, 2, str(tmp_path), timeout=10, grace=0.3)
    children = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(children) == 2
    assert_gone(children)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while (alive := [p for p in pids if is_alive(p)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive


def is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# ---- interruption ----------------------------------------------------------------------------------------------------
def report_and_sleep(folder: str) -> None:
    Path(folder, f"rank{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(300)


def wait_for_ranks(caller: subprocess.Popen, folder: Path) -> list[int]:
    deadline = time.monotonic() + 90
    while len(found := [path.read_text() for path in folder.glob("rank*")]) < 2 or not all(found):
        assert caller.poll() is None, caller.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [int(pid) for pid in found]


def test_interruption_leaves_nothing(tmp_path):
    """A caller of its own, so that it can be interrupted, and then killed: first its ranks go and their files, then the
    process that they are forked from too."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # sockets are made in it, whose names have to be short
    script = (
        "import signal\n"
        "from contextlib import suppress\n"
        "from neuron_accel.testing import run_ranks\n"
        "from test_ranks import report_and_sleep\n"
        # started by a shell in the background, this process and all below it would ignore interrupts
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "with suppress(KeyboardInterrupt):\n"
        f"    run_ranks(report_and_sleep, 2, {str(first)!r}, timeout=200)\n"
        f"run_ranks(report_and_sleep, 2, {str(second)!r}, timeout=200)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "TMPDIR": str(temporary)}
    caller = subprocess.Popen([sys.executable, "-c", script], env=environ, stderr=subprocess.PIPE, text=True)
    try:
        interrupted = wait_for_ranks(caller, first)
        caller.send_signal(signal.SIGINT)
        killed = wait_for_ranks(caller, second)
        assert_gone(interrupted)
        assert len(list(temporary.glob(MARK + "*"))) == 1
        everybody = [p.pid for p in psutil.Process(caller.pid).children(recursive=True)]
        assert set(killed) <= set(everybody)
        caller.kill()
        caller.wait(30)
    finally:
        caller.kill()
        caller.wait()
        caller.stderr.close()
    assert_gone(everybody)
    assert not list(temporary.glob(MARK + "*"))
    shutil.rmtree(temporary)


# ---- wrong calls -----------------------------------------------------------------------------------------------------
def test_wrong_calls_say_so():
    with pytest.raises(UsageError, match="lambda") as caught:
        run_ranks(lambda: None, 2)
    assert "function of a module" in caught.value.fix
    with pytest.raises(UsageError, match="at least one"):
        run_ranks(rank_number, 0)
    with pytest.raises(UsageError, match="'mpi'"):
        run_ranks(rank_number, 2, backend="mpi")


class Renamed:
    """A device of another package: ranks that are connected by gloo, and have read a file."""

    library = "gloo"

    def prepare(self, folder):
        (folder / "name").write_text("Trainee")
        return {"NAME_OF_RANKS": "Rank"}

    def enter(self, folder):
        os.environ["NAME_OF_RANKS"] += f" of a {(folder / 'name').read_text()}"


class Counting:
    """A machine of another package, whose ranks are calls."""

    def run(self, fn, n, *args, timeout, grace, env, **kwargs):
        return [fn(*args, **kwargs)] * n


RENAMED, COUNTING = Renamed(), Counting()


def name_of_ranks():
    return os.environ["NAME_OF_RANKS"], "ACCELERATE_USE_CPU" in os.environ, dist.get_world_size()


def test_devices_of_other_packages(monkeypatch):
    points = [EntryPoint(name.lower(), f"{__name__}:{name}", TEST_DEVICES) for name in ("RENAMED", "COUNTING")]
    monkeypatch.setattr(ranks, "entry_points", {TEST_DEVICES: points}.__getitem__)
    assert run_ranks(name_of_ranks, 2, backend="renamed") == [("Rank of a Trainee", False, 2)] * 2
    assert run_ranks(len, 2, "abc", backend="counting") == [3, 3]
    with pytest.raises(UsageError, match='use "gloo", "xla", "cuda", "renamed", "counting", or None'):
        run_ranks(len, 2, "abc", backend="mpi")
    with pytest.raises(UsageError, match="install the package neuron-accel-emulation of this project"):
        run_ranks(len, 2, "abc", backend="native")


def test_lost_peers_are_consequences():
    for consequence in (
        CommunicationError("lost"),
        RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
        RankTimeout("still running"),
    ):
        error = RanksError(2, {0: consequence, 1: ValueError("boom")}, {}, {})
        assert str(error).startswith("rank 1 of 2: ValueError: boom")
    assert str(RanksError(2, {1: KeyError("b"), 0: ValueError("a")}, {}, {})).startswith("rank 1 of 2")


# ---- scripts ---------------------------------------------------------------------------------------------------------
SCRIPT = """
import sys
from neuron_accel.testing import run_ranks

def mine(x):
    return x + 1

if {guard}:
    print(run_ranks(mine, 2, 1, backend={backend}, timeout=60))
"""


def run_script(script: str, *, path: Path | None = None) -> subprocess.CompletedProcess:
    if path is not None:
        path.write_text(script)
    command = [sys.executable, str(path)] if path is not None else [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_function_of_a_script(tmp_path):
    script = SCRIPT.format(guard='__name__ == "__main__"', backend=None)
    assert run_script(script, path=tmp_path / "script.py").stdout.strip() == "[2, 2]"


def test_a_function_of_no_file_belongs_into_a_module():
    result = run_script(SCRIPT.format(guard=True, backend="'xla'"))
    assert "move it to a module" in result.stderr


def test_a_function_of_a_script_that_is_an_object(tmp_path):
    script = SCRIPT.format(guard='__name__ == "__main__"', backend=None).replace(
        "def mine", "@functools.cache\ndef mine"
    )
    assert run_script("import functools\n" + script, path=tmp_path / "script.py").stdout.strip() == "[2, 2]"


def test_a_text_about_main_needs_no_file():
    script = """from neuron_accel.testing import run_ranks; print(run_ranks(len, 1, "__main__", backend=None))"""
    assert run_script(script).stdout.strip() == "[8]"


def test_a_script_that_starts_ranks_whenever_it_is_imported(tmp_path):
    result = run_script(SCRIPT.format(guard=True, backend=None), path=tmp_path / "script.py")
    assert 'put the call under `if __name__ == "__main__":`' in result.stderr


# ---- what is said ----------------------------------------------------------------------------------------------------
def fail_alike() -> None:
    raise ValueError("as all do")


@pytest.mark.parametrize(("function", "times"), [(fail_alike, 1), (fail_together, 3)])
def test_what_all_ranks_say_is_said_once(function, times):
    with pytest.raises(RanksError) as caught:
        run_ranks(function, 3)
    text = str(caught.value)
    assert text.count("Traceback (most recent call last)") == times
    assert text.count(f"in {function.__name__}") == times
    assert "_rank.py" not in text
    assert len(caught.value.tracebacks) == 3


class Ended:
    """A process of which the system says that it does not exist, just before it says that it has ended."""

    pid, exitcode = 2**22 + 1, None

    def join(self, timeout):
        self.exitcode = 0


def test_a_rank_that_ends_while_it_is_asked_where_it_stands():
    from neuron_accel.testing.ranks import _Ranks

    ranks = _Ranks([])
    ranks.processes = [Ended()]
    ranks._check_ends(1.0)
