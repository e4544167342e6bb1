"""Runs a command, injects faults into its processes at named points, and says what was lost.

How a fault is injected is in tests/injector.py. This module starts the command (again after it has failed, as a
scheduler would), and reads the state of steps and checkpoints from the journal.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from neuron_accel.launch.signals import HANDLED
from tests.forked_launch import adopting
from tests.injector import DONE, JOURNAL, KILL, PLAN, STOP, VARIABLE

LEFT_SECONDS = 10.0
"""How long processes may take to notice that their parent has ended, as data loading workers do."""
_PDEATHSIG = 1  # prctl(2)
SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to a process when it reaches a point.

    Args:
        point: the point, or the part of its name before a dot.
        count: the number of times that the process has reached it then, since its start or the fault before.
        rank: the rank; None: whichever is first.
        action: see :data:`~tests.injector.ACTIONS`.
        seconds: of an action that ends.
        at: the point that was reached; None if it was not.
        when: when it was, in seconds since the epoch.
        rank_hit: the rank that it was injected into.
        named: the rank that the launcher named as the one that failed first; None if it named none.
        resumed: the checkpoint that was resumed after it; None: there was no further start, or it resumed nothing.
        started_again: whether there was a further start.
        steps_lost: optimizer steps that the further start had to repeat.
        is_older: whether the checkpoint that was resumed is older than the last one whose save had returned.
    """

    point: str
    count: int
    rank: int | None
    action: str = KILL
    seconds: float = SECONDS
    at: str | None = None
    when: float | None = None
    rank_hit: int | None = None
    named: int | None = None
    resumed: str | None = None
    started_again: bool = False
    steps_lost: int = 0
    is_older: bool = False

    @property
    def was_reached(self) -> bool:
        return self.at is not None


# ---- Running ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a command with injected faults.

    Args:
        faults: the faults, each with its consequences.
        exit_code: of the last start of the command.
        starts: how often the command was started.
        steps: optimizer steps at the end, of those that the checkpoints account for.
        lost: checkpoints whose save had returned, and which are missing or damaged.
        processes: descriptions of processes that were left; they were then killed.
        shared_memory: files of shared memory that were left.
        signal: the signal that ended the runs.
        timed_out: whether a start took longer than it may.
        errors: standard error of all starts.
    """

    faults: Sequence[Fault]
    exit_code: int
    starts: int
    steps: int = 0
    lost: Sequence[str] = ()
    processes: Sequence[str] = ()
    shared_memory: Sequence[str] = ()
    signal: int | None = None
    timed_out: bool = False
    errors: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the command succeeded, and nothing but steps was lost."""
        older = any(fault.is_older for fault in self.faults)
        return not (self.exit_code or older or self.lost or self.processes or self.shared_memory or self.timed_out)

    @property
    def steps_lost(self) -> int:
        return sum(fault.steps_lost for fault in self.faults)


def make_plan(folder: Path, faults: Sequence[Fault], *, counts: bool = False) -> None:
    """Writes a plan: faults that are injected one after another, and whether to count all points that are reached."""
    folder.mkdir(exist_ok=True)
    (folder / PLAN).write_text(json.dumps({"faults": [asdict(fault) for fault in faults], "counts": counts}))
    (folder / JOURNAL).touch()


def run_command(
    words: Sequence[str],
    faults: Sequence[Fault],
    *,
    timeout: float | None = None,
) -> Outcome:
    """Runs a command of ``neuron-accel`` with faults, until it ends with success or fails without a fault.

    Args:
        words: the command and its arguments.
        faults: what is done, one after another.
        timeout: seconds after which a start of the command is ended.
    """
    # Processes whose parent was killed are found.
    with adopting(), tempfile.TemporaryDirectory(prefix="neuron_accel_chaos_") as name:
        folder = Path(name)
        make_plan(folder, faults)
        shared, began = _shared_memory(), time.time()
        runs = [Command(words, folder, faults).run(timeout)]
        while runs[-1].failed_by_fault and len(runs) <= len(faults):
            runs.append(Command(words, folder, faults).run(timeout))
        journal = read_journal(folder)
        history = History(faults, [named for each in runs for named in each.named]).follow(journal)
        last = runs[-1]
        processes = _left_processes(began)
        return Outcome(
            faults=history.faults,
            exit_code=last.exit_code,
            starts=len(runs),
            steps=history.position,
            lost=_lost(history.returned),
            processes=processes,
            shared_memory=_of_these(_shared_memory() - shared, {line["pid"] for line in journal}),
            signal=last.signal,
            timed_out=any(each.timed_out for each in runs),
            errors="".join(each.errors for each in runs),
        )


class Command:
    """One start of the command."""

    def __init__(self, words: Sequence[str], folder: Path, faults: Sequence[Fault]) -> None:
        self._words, self._folder, self._faults = words, folder, faults
        self.exit_code, self.timed_out, self.errors = 0, False, ""
        self.signal: int | None = None
        self.named: list[tuple[float, int]] = []
        """When the launcher has named a rank that failed first, in seconds since the epoch, and the rank."""
        self._before = self._done()
        self._signals: list[int] = []

    @property
    def failed_by_fault(self) -> bool:
        ended = self.signal is not None or self.timed_out
        return self.exit_code != 0 and not ended and self._done() > self._before

    def _done(self) -> int:
        return sum((self._folder / DONE.format(number)).exists() for number in range(len(self._faults)))

    def run(self, timeout: float | None) -> Command:
        """Starts the command and waits for it. Signals to this process are passed on to it, once each."""
        process = subprocess.Popen(
            [sys.executable, "-m", "neuron_accel.cli.main", *self._words],
            env={**os.environ, VARIABLE: str(self._folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_this_process,
        )
        previous = {number: signal.signal(number, lambda got, _: self._signals.append(got)) for number in HANDLED}
        assert process.stderr is not None
        reader = threading.Thread(target=self._forward, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            self._wait(process, timeout)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            reader.join(timeout=5)
        self.exit_code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        return self

    def _wait(self, process: subprocess.Popen[bytes], timeout: float | None) -> None:
        began, killed_at = time.monotonic(), None
        stopped = Stopped(self._folder, self._faults)
        while process.poll() is None:
            time.sleep(0.05)
            stopped.go_on()
            while self._signals:
                self.signal = self._signals.pop(0)
                process.send_signal(self.signal)
            if timeout is not None and time.monotonic() - began > timeout and not self.timed_out:
                self.timed_out, killed_at = True, time.monotonic()
                process.send_signal(signal.SIGTERM)
            if killed_at is not None and time.monotonic() - killed_at > 60:
                process.kill()

    def _forward(self, stream: IO[bytes]) -> None:
        """Reads the messages of the command, and which ranks it names."""
        for line in stream:
            self.errors += line.decode(errors="replace")
            if found := re.match(rb"(?:neuron-accel: )?rank (\d+) failed first:", line):
                self.named.append((time.time(), int(found[1])))


class Stopped:
    """Continues stopped processes after their time."""

    def __init__(self, folder: Path, faults: Sequence[Fault]) -> None:
        self._folder, self._faults = folder, faults
        self._continued: set[int] = set()

    def go_on(self) -> None:
        if not any(fault.action == STOP for fault in self._faults):
            return
        for line in read_journal(self._folder):
            if line["event"] != "fault" or line["number"] in self._continued:
                continue
            fault = self._faults[line["number"]]
            if fault.action == STOP and time.time() > line["time"] + fault.seconds:
                self._continued.add(line["number"])
                with contextlib.suppress(ProcessLookupError):
                    os.kill(line["pid"], signal.SIGCONT)


def _end_with_this_process() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


# ---- What came of it -------------------------------------------------------------------------------------------------
Line = Mapping[str, Any]
"""A line of the journal."""


def read_journal(folder: Path) -> list[Line]:
    """The lines of the journal, in the order in which they were written."""
    lines = (folder / JOURNAL).read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


class History:
    """What has happened so far, according to the journal.

    Attributes:
        position: optimizer steps that the run is away from where it was first started, as of rank 0.
        returned: the last checkpoint whose save has returned.
        faults: the faults, each with its consequences.
    """

    def __init__(self, faults: Sequence[Fault] = (), named: Sequence[tuple[float, int]] = ()) -> None:
        self.position = 0
        self.returned: str | None = None
        self.faults = list(faults)
        self._named = named
        self._saved: dict[str, int] = {}
        self._start: str | None = None
        self._starts: list[str] = []
        self._pending: list[int] = []  # faults after which nothing was resumed so far
        self._injected: list[int] = []  # faults of this start
        self._ended_at: int | None = None  # position when the start of the first of them ended

    def follow(self, journal: Sequence[Line]) -> History:
        self._starts = list(dict.fromkeys(line["start"] for line in journal))
        for line in journal:
            self._follow(line)
        self._name(math.inf)
        return self

    def _follow(self, line: Line) -> None:
        if line["start"] != self._start:
            self._name(line["time"])
            self._start = line["start"]
            if self._pending and self._ended_at is None:
                self._ended_at = self.position
            self.position = 0
        event = line["event"]
        key: str = line.get("checkpoint", "")
        if event == "fault":
            number = line["number"]
            self._pending.append(number)
            self._injected.append(number)
            self._set(number, at=line["point"], rank_hit=line["rank"], when=line["time"])
        elif event == "saving":
            self._saved[key] = self.position
        elif event == "saved":
            self.returned = key
        elif event == "loaded":
            self.position = self._saved.get(key, 0)
            self._settle(key)
        elif event == "stepped":
            self._settle(None)
            self.position += 1

    def _settle(self, resumed: str | None) -> None:
        """Records which checkpoint was resumed after the faults before this start."""
        if self._ended_at is None:
            return
        back = 0 if resumed is None else self._saved.get(resumed, 0)
        last = 0 if self.returned is None else self._saved.get(self.returned, 0)
        for number in self._pending:
            lost = max(0, self._ended_at - back) if number == self._pending[0] else 0
            name = None if resumed is None else Path(resumed).name
            self._set(number, started_again=True, resumed=name, steps_lost=lost, is_older=back < last)
        self._pending, self._ended_at = [], None

    def _name(self, until: float) -> None:
        """Records which rank the launcher named after each fault of the start that ended at ``until``.

        The launcher names one for each start that fails. The times are those at which its messages were read, and may
        be later than the next start; they are used only if there are not as many messages as starts that have failed.
        """
        in_turn = len(self._starts) - len(self._named) in (0, 1)  # the last start may have succeeded
        for number in self._injected if self.faults else ():
            when = self.faults[number].when or 0.0
            if in_turn and self._start is not None:
                named = [rank for _, rank in self._named][self._starts.index(self._start) :]
            else:
                named = [rank for at, rank in self._named if when <= at < until]
            self._set(number, named=named[0] if named else None)
        self._injected = []

    def _set(self, number: int, **came: Any) -> None:
        if self.faults:
            self.faults[number] = dataclasses.replace(self.faults[number], **came)


def _lost(returned: str | None) -> list[str]:
    """The last checkpoint whose save has returned, if it is not there or is damaged."""
    from neuron_accel.checkpoint.format.manifest import has_manifest
    from neuron_accel.checkpoint.tools.report import verify
    from neuron_accel.errors import CheckpointError

    if returned is None:
        return []
    folder = Path(returned)
    if not has_manifest(folder):
        return [f"{folder} (is not there)"]
    try:
        problems = verify(folder)
    except CheckpointError as error:
        problems = [str(error.what)]
    return [f"{folder} ({problems[0]})"] if problems else []


def _left_processes(began: float) -> list[str]:
    """Processes that were started since ``began`` and still run, some time after the end of the command. They are
    killed.

    Args:
        began: seconds since the epoch.
    """
    import psutil

    me = psutil.Process()
    deadline = time.monotonic() + LEFT_SECONDS
    while left := list(_running(me, began)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    found = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            found.append(f"process {process.pid} ({' '.join(process.cmdline())[:60]})")
            process.kill()
    return found


def _running(me: Any, began: float) -> Iterator[Any]:
    import psutil

    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.create_time() < began - 1:
                continue
            if child.status() != psutil.STATUS_ZOMBIE:
                yield child
            elif child.ppid() == me.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _of_these(names: set[str], pids: set[int]) -> list[str]:
    """The files of shared memory that have the id of one of these processes in their name."""
    return sorted(f"/dev/shm/{name}" for name in names if pids & {int(n) for n in re.findall(r"\d+", name)})
