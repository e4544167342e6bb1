# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel chaos``: runs a command, injects faults into its processes at named points, and reports what was lost.

How a fault is injected without a change of the script is in ``_chaos_points.py``. This module draws the faults from a
seed, starts the command (again after it has failed, as a scheduler would), and reads the state of steps and checkpoints
from the journal.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from neuron_accel.cli import launch
from neuron_accel.cli._chaos_points import ACTIONS, DONE, JOURNAL, KILL, PLAN, POINTS, STOP, VARIABLE, install
from neuron_accel.cli.escalation import HANDLED
from neuron_accel.cli.parser import Parser
from neuron_accel.cli.terminal import format_pairs, format_table, show, table_width
from neuron_accel.errors import UsageError

TOOLS = ("consolidate", "reshard")
"""Commands beside launch that faults can be injected into. They run in one process."""
COMMANDS = ("launch", *TOOLS)
WITHIN = 32
SECONDS = 5.0
LEFT_SECONDS = 10.0
"""How long processes may take to notice that their parent has ended, as data loading workers do."""
_PDEATHSIG, _SUBREAPER = 1, 36  # prctl(2)
_ONE_RANK = ("save.mkdir", "save.lock", "save.rename", "save.remove")
_DRAWN = ("start", "rendezvous", "forward", "backward", "collective", "step", "load", "save")
_MOST = {"start": 1, "rendezvous": 2, "load": 3, "save.mkdir": 8, "save.lock": 3, "save.open": 8, "save.rename": 3}

DESCRIPTION = """\
Run a command and inject faults into its processes at named points, chosen by a seed, without a change of the script.
If the command fails after a fault and its own launcher does not restart it, it is started again, as a scheduler would.
At the end a table shows what was lost: optimizer steps since the checkpoint that was resumed, and checkpoints (none
should be lost).

The command is launch, consolidate or reshard. A script has to resume by itself, as with
accelerator.load_state(resume="latest"). Use a copy of your data: this trains, and writes where the script writes.

Actions: kill (SIGKILL); stop (SIGSTOP, and SIGCONT after --seconds); slow (sleeps at each point for --seconds);
memory (at most 16 MiB more than in use), descriptors (at most one more than in use); cpu (one core for all threads,
lowest priority).

The exit code is 1 if the command did not succeed, if a checkpoint was lost, or if a process or shared memory was left
behind.
"""
EXAMPLES = """\
examples:
  three ranks killed, one after another, wherever the seed says:
    neuron-accel chaos --kills 3 --seed 7 -- launch --nproc-per-node 4 --max-restarts 3 train.py
  in the second write of a save, on rank 1:
    neuron-accel chaos --point save.write:2 --rank 1 -- launch --nproc-per-node 2 train.py
  a rank that stops for a minute in a collective:
    neuron-accel chaos --action stop --seconds 60 --point collective -- launch --nproc-per-node 4 train.py
  how often each point is reached, without a fault:
    neuron-accel chaos --count -- launch --nproc-per-node 2 train.py
  twenty seeds, one run each:
    neuron-accel chaos --repeat 20 --json -- launch --nproc-per-node 2 train.py
  a tool, killed while it writes:
    neuron-accel chaos --point consolidate.write -- consolidate checkpoint my-model
"""


def add_arguments(parser: Parser) -> None:
    parser.rest, parser.rest_usage = "words", "-- COMMAND ..."
    what = parser.add_argument_group("faults")
    what.add_argument("--kills", type=_positive, metavar="N", help="number of faults (default: one for each --point)")
    what.add_argument(
        "--point",
        action="append",
        default=[],
        metavar="NAME[:N]",
        help="inject a fault when a process reaches this point for the N-th time since its start or the fault before; "
        "repeated: one after another, or in turn; save means every save.* (default: drawn)",
    )
    what.add_argument("--rank", type=int, metavar="R", help="the rank that a fault is injected into (default: drawn)")
    what.add_argument(
        "--action",
        action="append",
        default=[],
        choices=ACTIONS,
        metavar="NAME",
        help=f"{', '.join(ACTIONS)}; repeated: drawn (default: kill)",
    )
    what.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="of stop and slow (default: 5)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn (default: 0)")
    what.add_argument(
        "--within", type=_positive, default=WITHIN, metavar="N", help=f"largest N that is drawn (default: {WITHIN})"
    )
    runs = parser.add_argument_group("runs and output")
    runs.add_argument("--repeat", type=_positive, default=1, metavar="N", help="run N times, each with the next seed")
    runs.add_argument("--timeout", type=float, metavar="S", help="end the command S seconds after a start of it")
    runs.add_argument("--list", action="store_true", help="list the points")
    runs.add_argument("--count", action="store_true", help="inject nothing, and count how often points are reached")
    runs.add_argument("--json", action="store_true", help="print JSON")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def install_faults(environ: Mapping[str, str]) -> None:
    """Installs the injector of faults if ``neuron-accel chaos`` has started this process."""
    if folder := environ.get(VARIABLE):
        install(folder)


def run(args: argparse.Namespace) -> int:
    if args.list:
        table = format_table(("point", "a process"), list(POINTS.items()), table_width())
        print(json.dumps(POINTS, indent=2) if args.json else table)
        return 0
    words: list[str] = args.words
    if not words or words[0] not in COMMANDS:
        raise UsageError(
            f"Faults cannot be injected into {words[0]!r}." if words else "A command is missing.",
            where="neuron-accel chaos",
            fix=f"write it after --, as `-- launch train.py`; possible are {', '.join(COMMANDS)}",
        )
    ranks = _ranks(words)
    points = [_parse_point(text, words[0]) for text in args.point]
    outcomes, output = [], sys.stderr if args.json else sys.stdout
    for seed in range(args.seed, args.seed + args.repeat):
        faults = [] if args.count else draw(seed, args, words[0], points, ranks)
        outcome = run_command(words, faults, counts=args.count, timeout=args.timeout, output=output)
        outcome = dataclasses.replace(outcome, seed=seed)
        outcomes.append(outcome)
        if not args.json:
            show(outcome.explain(table_width()))
        if outcome.signal is not None:
            break
    if args.json:
        found = [outcome.to_dict() for outcome in outcomes]
        print(json.dumps(found[0] if args.repeat == 1 else found, indent=2))
    elif args.repeat > 1:
        good = sum(outcome.is_good for outcome in outcomes)
        reached = sum(fault.was_reached for outcome in outcomes for fault in outcome.faults)
        show(f"{good} of {len(outcomes)} runs ended with success and without a loss but of steps, {reached} faults")
    if outcomes[-1].signal is not None:
        return 128 + outcomes[-1].signal
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


# ---- Drawing ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to a process when it reaches a point.

    Args:
        point: the point, or the part of its name before a dot.
        count: the number of times that the process has reached it then, since its start or the fault before.
        rank: the rank; None: whichever is first.
        action: see :data:`~neuron_accel.cli._chaos_points.ACTIONS`.
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


def draw(
    seed: int, args: argparse.Namespace, command: str, points: Sequence[tuple[str, int | None]], ranks: int | None
) -> list[Fault]:
    """The faults of one run, which depend on the arguments only."""
    random_ = random.Random(seed)
    number = args.kills or max(1, len(points))
    faults = []
    for index in range(number):
        if points:
            point, count = points[index % len(points)]
        else:
            point, count = _draw_point(random_, command, ranks, is_first=index == 0), None
        drawn = min(args.within, _MOST.get(point, args.within))
        drawn = int((drawn + 1) ** random_.random())  # as often from 1 to 2 as from 16 to 32
        rank = random_.randrange(ranks or 1)
        if args.rank is not None:
            rank = args.rank
        action = random_.choice(args.action or [KILL])
        anyone = args.rank is None and (point in _ONE_RANK or ranks is None)
        faults.append(
            Fault(
                point=point,
                count=drawn if count is None else count,
                rank=None if anyone else rank,
                action=action,
                seconds=args.seconds,
            )
        )
    return faults


def _draw_point(random_: random.Random, command: str, ranks: int | None, *, is_first: bool) -> str:
    """A point that every command of this name reaches."""
    if command != "launch":
        return random_.choice([point for point in POINTS if point.startswith(command) and "remove" not in point])
    drawn = [name for name in _DRAWN if not (name == "load" and is_first)]
    if ranks == 1:
        drawn = [name for name in drawn if name not in ("rendezvous", "collective")]
    point = random_.choice(drawn)
    if point != "save":
        return point
    return random_.choice([name for name in POINTS if name.startswith("save.") and name != "save.remove"])


def _parse_point(text: str, command: str) -> tuple[str, int | None]:
    name, _, count = text.partition(":")
    known = {*POINTS, *(point.partition(".")[0] for point in POINTS)}
    if name not in known:
        raise UsageError(
            f"There is no point {name!r}.", where="--point", fix="`neuron-accel chaos --list` shows all points"
        )
    if count and not (count.isdigit() and int(count)):
        raise UsageError(f"{count!r} is not a count.", where=f"--point {text}", fix=f"write --point {name}:1 or more")
    if (name.partition(".")[0] in TOOLS) and name.partition(".")[0] != command:
        raise UsageError(f"{command} does not reach point {name!r}.", where=f"--point {text}")
    if command in TOOLS and name.partition(".")[0] != command:
        raise UsageError(
            f"{command} does not reach point {name!r}.", where=f"--point {text}", fix=f"its points are {command}.*"
        )
    return name, int(count) if count else None


def _ranks(words: Sequence[str]) -> int | None:
    """The number of ranks that a command starts; None if it is determined later."""
    if words[0] in TOOLS:
        return 1
    parser = Parser(prog="neuron-accel launch", description=launch.DESCRIPTION, epilog=launch.EXAMPLES)
    launch.add_arguments(parser)
    args = parser.parse_args(words[1:])
    return None if args.nproc_per_node == launch.AUTO or (args.nnodes or 1) > 1 else int(args.nproc_per_node)


# ---- Running ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a command with injected faults.

    Args:
        faults: the faults, each with its consequences.
        exit_code: of the last start of the command.
        starts: how often the command was started.
        counts: with ``counts``: how often a rank reached each point at most, in one start of the ranks.
        steps: optimizer steps at the end, of those that the checkpoints account for.
        lost: checkpoints whose save had returned, and which are missing or damaged.
        processes: descriptions of processes that were left; they were then killed.
        shared_memory: files of shared memory that were left.
        signal: the signal that ended the runs.
        timed_out: whether a start took longer than it may.
        seed: of the faults.
    """

    faults: Sequence[Fault]
    exit_code: int
    starts: int
    counts: Mapping[str, int] = field(default_factory=dict)
    steps: int = 0
    lost: Sequence[str] = ()
    processes: Sequence[str] = ()
    shared_memory: Sequence[str] = ()
    signal: int | None = None
    timed_out: bool = False
    seed: int = 0

    @property
    def is_good(self) -> bool:
        """Whether the command succeeded, and nothing but steps was lost."""
        older = any(fault.is_older for fault in self.faults)
        return not (self.exit_code or older or self.lost or self.processes or self.shared_memory or self.timed_out)

    @property
    def steps_lost(self) -> int:
        return sum(fault.steps_lost for fault in self.faults)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "steps_lost": self.steps_lost, "is_good": self.is_good}

    def explain(self, width: int | None = None) -> str:
        """The outcome as text."""
        if self.counts:
            rows = [(point, str(self.counts.get(point, 0)), what) for point, what in POINTS.items()]
            rows = [row for row in rows if self.counts.get(row[0])]
            return format_table(("point", "times", "a process"), rows, width)
        headers = ("", "point", "rank", "action", "launcher named", "resumed", "steps lost")
        table = format_table(headers, [_row(number, fault) for number, fault in enumerate(self.faults, 1)], width)
        reached, older = sum(f.was_reached for f in self.faults), sum(f.is_older for f in self.faults)
        how = "success" if self.exit_code == 0 else f"exit code {self.exit_code}"
        how += ", ended since it took too long" if self.timed_out else ""
        lines = [
            ("faults", f"{reached} of {len(self.faults)} reached, seed {self.seed}"),
            ("command", f"{how}, started {self.starts} time{'s' * (self.starts != 1)}"),
            ("steps", f"{self.steps} done in the end, {self.steps_lost} of them more than once"),
            ("checkpoints", ", ".join(f"lost: {each}" for each in self.lost) or "none lost"),
            ("older", f"{older} resumed that are older than the last one saved"),
            ("left", ", ".join([*self.processes, *self.shared_memory]) or "no process, no shared memory"),
        ]
        return f"\n{table}\n\n{format_pairs(lines, indent='', width=width)}"


def _row(number: int, fault: Fault) -> tuple[str, ...]:
    where = f"{fault.at or fault.point}:{fault.count}"
    if not fault.was_reached:
        return (str(number), where, "-", fault.action, "not reached", "", "")
    named = "-" if fault.named is None else f"rank {fault.named}"
    resumed = fault.resumed or ("nothing" if fault.started_again else "-")
    if fault.is_older:
        resumed += ", which is older than the last one saved"
    return (str(number), where, str(fault.rank_hit), fault.action, named, resumed, str(fault.steps_lost))


def run_command(
    words: Sequence[str],
    faults: Sequence[Fault],
    *,
    counts: bool = False,
    timeout: float | None = None,
    output: TextIO,
) -> Outcome:
    """Runs a command of ``neuron-accel`` with faults, until it ends with success or fails without a fault.

    Args:
        words: the command and its arguments.
        faults: what is done, one after another.
        counts: whether all points that are reached are counted.
        timeout: seconds after which a start of the command is ended.
        output: a file for the standard output of the command.
    """
    if sys.platform == "linux":  # so that processes whose parent was killed are found
        ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="neuron_accel_chaos_") as name:
        folder = Path(name)
        plan = {"faults": [dataclasses.asdict(fault) for fault in faults], "counts": counts}
        (folder / PLAN).write_text(json.dumps(plan))
        (folder / JOURNAL).touch()
        shared, began = _shared_memory(), time.time()
        runs = [Command(words, folder, faults).run(timeout, output)]
        while runs[-1].failed_by_fault and len(runs) <= len(faults):
            runs.append(Command(words, folder, faults).run(timeout, output))
        journal = read_journal(folder)
        history = History(faults, [named for each in runs for named in each.named]).follow(journal)
        last = runs[-1]
        processes = _left_processes(began)
        return Outcome(
            faults=history.faults,
            exit_code=last.exit_code,
            starts=len(runs),
            counts=_counted(journal),
            steps=history.position,
            lost=_lost(history.returned),
            processes=processes,
            shared_memory=_of_these(_shared_memory() - shared, {line["pid"] for line in journal}),
            signal=last.signal,
            timed_out=any(each.timed_out for each in runs),
        )


class Command:
    """One start of the command."""

    def __init__(self, words: Sequence[str], folder: Path, faults: Sequence[Fault]) -> None:
        self._words, self._folder, self._faults = words, folder, faults
        self.exit_code, self.timed_out = 0, False
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

    def run(self, timeout: float | None, output: TextIO) -> Command:
        """Starts the command, with its standard output in ``output``, and waits for it. Signals to this process are
        passed on to it, once each."""
        process = subprocess.Popen(
            [sys.executable, "-m", "neuron_accel.cli.main", *self._words],
            env={**os.environ, VARIABLE: str(self._folder)},
            stdout=output,
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
        """Shows the output of the command, and reads from it which ranks it names."""
        for line in stream:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
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
Checkpoint = tuple[str, int]
"""Folder and generation of a checkpoint."""


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
        self.returned: Checkpoint | None = None
        self.faults = list(faults)
        self._named = named
        self._saved: dict[Checkpoint, int] = {}
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
        key: Checkpoint = tuple(line.get("checkpoint", ()))  # type: ignore[assignment]
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

    def _settle(self, resumed: Checkpoint | None) -> None:
        """Records which checkpoint was resumed after the faults before this start."""
        if self._ended_at is None:
            return
        back = 0 if resumed is None else self._saved.get(resumed, 0)
        last = 0 if self.returned is None else self._saved.get(self.returned, 0)
        for number in self._pending:
            lost = max(0, self._ended_at - back) if number == self._pending[0] else 0
            name = None if resumed is None else Path(resumed[0]).name
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


def _counted(journal: Sequence[Line]) -> dict[str, int]:
    """Returns how often each point was reached, by the process that reached it most often."""
    counts = Counter((line["point"], line["pid"]) for line in journal if line["event"] == "point")
    return {point: max(n for (name, _), n in counts.items() if name == point) for point in {p for p, _ in counts}}


def _lost(returned: Checkpoint | None) -> list[str]:
    """The last checkpoint whose save has returned, if it is not there or is damaged."""
    from neuron_accel.checkpoint.format.manifest import has_manifest, read_manifest
    from neuron_accel.checkpoint.tools.report import verify
    from neuron_accel.errors import CheckpointError

    if returned is None:
        return []
    folder = Path(returned[0])
    if not has_manifest(folder):
        return [f"{folder} (is not there)"]
    try:
        if read_manifest(folder).generation < returned[1]:
            return [f"{folder} (an older one is there)"]
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
