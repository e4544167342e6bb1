"""Kills ranks and `consolidate` at every point of tests/injector.py, some hundred times. Nothing may be lost.

    python -m tests.kills --kills 400

One training after another is launched, killed, and launched again, hundreds of times, always in a place that is drawn
from all that a start of it reaches. Each launch is one of the project's launcher, which has to end it. After each: the
place was reached; the launcher has named the rank that was killed as the first that failed, and has ended with its exit
code; the newest complete checkpoint is undamaged and not older than the last whose save had returned; no process, no
temporary file and no shared memory is left; a step that is repeated has the loss that it had. `consolidate` is
killed before each of its operations on files, and run again.

Ranks of these launches are forked from a process that has imported torch (tests/forked_launch.py). The last part runs
`neuron-accel launch --max-restarts` as it is, with workers of a data loader and restarts by the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from neuron_accel.checkpoint.format.manifest import NAME, latest
from neuron_accel.checkpoint.tools.consolidate import consolidate
from neuron_accel.checkpoint.tools.report import verify
from tests.faults import LEFT_SECONDS, Fault, History, make_plan, read_journal, run_command
from tests.forked_launch import Ended, adopting, launch
from tests.injector import DONE, POINTS, PREAMBLE, VARIABLE, FaultInjector
from tests.soak import Leftovers

RANKS = 2
COMPOSITIONS: Mapping[str, tuple[int, list[Any]]] = {
    "zero1": (RANKS, ["zero1"]),
    "fully sharded": (RANKS, [{"fully_sharded": {"modules": ["0", "2"]}}]),
    "data parallel": (RANKS, []),
    "tp2 x dp2": (4, [{"tensor_parallel": {"tensor_parallel_size": 2}}]),
    "pp2": (2, [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}]),
}
"""By name: the number of ranks, and the plugins. Those that divide the model train a Llama."""
TOOL = "consolidate"
LOOKED_AT = 4  # steps of the start in which points are counted; a checkpoint a step, of which two are kept
TOLERANCE = 1e-5  # relative, of the loss of a repeated step


@dataclass
class Report:
    """What was done, and what was wrong.

    Args:
        kills: number of kills by point.
        named: kills after which the launcher ended with the exit code of the rank that was killed, and named it.
        problems: what was wrong.
        steps_lost: that had to be repeated.
        resumed: starts that continued from a checkpoint.
        repeated: steps whose loss was compared with that of an earlier start.
    """

    kills: Counter[str] = field(default_factory=Counter)
    named: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    steps_lost: int = 0
    resumed: int = 0
    repeated: int = 0

    def add(self, other: Report) -> None:
        self.kills += other.kills
        self.named += other.named
        self.problems += other.problems
        self.steps_lost += other.steps_lost
        self.resumed += other.resumed
        self.repeated += other.repeated

    def __str__(self) -> str:
        rows = [f"{point:20} {self.kills[point]:4}" for point in POINTS if self.kills[point]]
        missed = [point for point in POINTS if not self.kills[point]]
        total = f"{sum(self.kills.values())} kills, {len(rows)} of {len(POINTS)} points"
        total += f" (not: {', '.join(missed)})" if missed else ""
        ranks = sum(count for point, count in self.kills.items() if not point.startswith(TOOL))
        rows += [total, f"{ranks} of ranks under the launcher, which named the rank after {self.named.total()}"]
        rows.append(f"{self.resumed} starts resumed, {self.steps_lost} steps lost, {self.repeated} repeated")
        return "\n".join([*rows, f"{len(self.problems)} problems", *self.problems])


# ---- A training that is killed ---------------------------------------------------------------------------------------
SCRIPT = (
    PREAMBLE
    + """
import json, sys

import torch
from accelerate.utils import ProjectConfiguration
from neuron_accel import NeuronAccelerator

folder, steps = sys.argv[1], float(sys.argv[2])
given = {"plugins": ["zero1"], "workers": 1, "saves_in_background": False, "text": False}
given.update(json.loads(sys.argv[3]) if len(sys.argv) > 3 else {})
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
faults.reach("rendezvous")
accelerator = NeuronAccelerator(project_config=project, config={"plugins": given["plugins"]})
faults.reach("rendezvous")
faults.watch(accelerator)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
if given["text"]:
    from tests.distributed.models import VOCABULARY, llama

    model, data = llama(), torch.randint(VOCABULARY, (96, 6), generator=generator)
else:
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    data = torch.randn(96, 6, generator=generator)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=given["workers"])
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.load_state(resume="latest")
done = accelerator.save_iteration
while done < steps:
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss if given["text"] else model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        value, done = accelerator.reduce(loss.detach(), "mean").item(), done + 1
        if accelerator.is_main_process:
            with open(f"{folder}/losses", "a") as file:
                file.write(f"{done} {value!r}\\n")
        accelerator.save_state(async_save=given["saves_in_background"] and done % 3 == 0)
        if done >= steps:
            break
accelerator.end_training()
"""
)


class Training:
    """A training that is launched, again and again.

    Args:
        folder: for its checkpoints and losses; it may exist.
        ranks: how many there are.
        plugins: its strategies.
    """

    def __init__(self, folder: Path, ranks: int, plugins: list[Any]) -> None:
        self.folder, self.ranks = folder, ranks
        self.temporary = Path(f"{folder}-tmp")
        self._logs, self._script = Path(f"{folder}-logs"), Path(f"{folder}.py")
        options = {"plugins": plugins, "workers": 0, "saves_in_background": True, "text": "parallel" in str(plugins)}
        self._options = json.dumps(options)
        folder.mkdir(exist_ok=True)
        self.temporary.mkdir()
        self._script.write_text(SCRIPT)

    def start(self, chaos: Path, steps: float) -> Ended:
        """Launches it with the faults of the plan in ``chaos``, until it has done so many steps."""
        shutil.rmtree(self._logs, ignore_errors=True)
        words = ["--nproc-per-node", str(self.ranks), "--cpu", "--quiet", "--grace", "5", "--log-dir", str(self._logs)]
        words += [str(self._script), str(self.folder), str(steps), self._options]
        environ = {VARIABLE: str(chaos), "TMPDIR": str(self.temporary)}
        return launch(words, environ, Path(f"{self.folder}.output"), timeout=90)


def places(folder: Path, ranks: int, plugins: list[Any]) -> list[Fault]:
    """Every place that a start which resumes reaches on any rank until it has done some steps."""
    training = Training(folder, ranks, plugins)
    for name, steps in (("first", 2), ("second", 2 + LOOKED_AT)):
        make_plan(folder / name, [], counts=True)
        ended = training.start(folder / name, steps)
        if ended.exit_code != 0:
            raise RuntimeError(f"the training fails by itself: {ended.output[-4000:]}")
    counts = Counter((r["point"], r["rank"]) for r in read_journal(folder / "second") if r["event"] == "point")
    return [
        Fault(point=point, rank=rank, count=number)
        for (point, rank), count in sorted(counts.items())
        for number in range(1, count + 1)
    ]


def choose(found: Iterable[Fault], number: int, seed: int) -> list[Fault]:
    """Chooses places, as many of each point as possible, of each rank in turn, and then in the order that the seed
    says."""
    random_, points = random.Random(seed), dict[str, dict[int | None, list[Fault]]]()
    for fault in found:
        points.setdefault(fault.point, {}).setdefault(fault.rank, []).append(fault)
    turns = {
        point: deque(random_.sample(sorted(ranks.items(), key=str), len(ranks))) for point, ranks in points.items()
    }
    chosen: list[Fault] = []
    while len(chosen) < number and any(turns.values()):
        for turn in filter(None, turns.values()):
            rank, group = turn.popleft()
            chosen.append(group.pop(random_.randrange(len(group))))
            if group:
                turn.append((rank, group))
    chosen = chosen[:number]
    random_.shuffle(chosen)
    chosen.sort(key=lambda fault: fault.point in ("load", "save.remove"))  # after there are checkpoints
    return chosen


def kill_training(folder: Path, name: str, number: int, seed: int) -> Report:
    """Launches and kills a training of one of the :data:`COMPOSITIONS` ``number`` times."""
    report = Report()
    with adopting():
        faults = choose(places(Path(f"{folder}-places"), *COMPOSITIONS[name]), number, seed)
        chaos, training = Path(f"{folder}-chaos"), Training(folder, *COMPOSITIONS[name])
        make_plan(chaos, faults)
        leftovers, processes = Leftovers(training.temporary), Processes()
        for index, fault in enumerate(faults):
            where = f"{folder.name}, kill {index + 1}, {fault.point}:{fault.count} on rank {fault.rank}"
            ended = training.start(chaos, math.inf)
            if not (chaos / DONE.format(index)).exists():
                report.problems.append(f"{where}: not reached: {ended.output[-2000:]}")
                (chaos / DONE.format(index)).write_text("not reached")
                continue
            report.kills[fault.point] += 1
            wrong = how_it_ended(ended, fault)
            report.named[fault.point] += not wrong
            wrong += processes.left() + _checkpoints(folder, chaos)
            wrong += [each for each in leftovers.found(last=index == len(faults) - 1) if not is_in_use(each)]
            report.problems += [f"{where}: {problem}" for problem in wrong]
            for path in training.temporary.iterdir():  # what a rank that was killed could not remove
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    history = History(faults).follow(read_journal(chaos))
    report.problems += [f"{f.point}:{f.count}: an older checkpoint was resumed" for f in history.faults if f.is_older]
    report.steps_lost = sum(fault.steps_lost for fault in history.faults)
    report.resumed = sum(line["event"] == "loaded" for line in read_journal(chaos))
    problems, report.repeated = check_losses(folder / "losses")
    report.problems += problems
    return report


def how_it_ended(ended: Ended, fault: Fault) -> list[str]:
    """What is wrong with the end of a launch of which a rank was killed."""
    problems = []
    if ended.exit_code is None:
        problems.append("the launcher did not end")
    elif ended.exit_code != 128 + signal.SIGKILL:
        problems.append(f"the launcher ended with exit code {ended.exit_code}")
    named = re.findall(r"^(?:neuron-accel: )?rank (\d+) failed first: (.*)$", ended.output, re.MULTILINE)
    if named != [(str(fault.rank), "ended by SIGKILL")]:
        problems.append(f"the launcher has named {named}: {ended.output[-2000:]}")
    return problems


class Processes:
    """Finds processes below this one that were started after this object was created. This process has to adopt those
    whose parent has ended."""

    def __init__(self) -> None:
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}

    def left(self) -> list[str]:
        """Those that still run, some seconds after they should have ended. They are killed."""
        deadline = time.monotonic() + LEFT_SECONDS
        while (left := list(self._running())) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = []
        for process in left:
            with contextlib.suppress(psutil.Error):
                found.append(f"left behind: process {process.pid} ({' '.join(process.cmdline())[:60]})")
                process.kill()
        return found

    def _running(self) -> Iterator[psutil.Process]:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if child.pid in self._before:
                    continue
                if child.status() != psutil.STATUS_ZOMBIE:
                    yield child
                elif child.ppid() == os.getpid():
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(child.pid, os.WNOHANG)


def is_in_use(left: str) -> bool:
    """Whether shared memory that was found is open in some process: it is that of another program, since no process of
    this one is left."""
    name = left.rpartition(" ")[2]
    for process in Path("/proc").glob("[0-9]*") if name.startswith("/dev/shm/") else ():
        with contextlib.suppress(OSError):
            opened = [os.readlink(link) for link in (process / "fd").iterdir()]
            if any(path.startswith(name) for path in opened) or name in (process / "maps").read_text():
                return True
    return False


def _checkpoints(folder: Path, chaos: Path) -> list[str]:
    """What is wrong with the checkpoints after a kill."""
    returned = History().follow(read_journal(chaos)).returned
    newest = latest(folder / "checkpoints")
    if newest is None:
        return [] if returned is None else [f"there is no checkpoint, and {returned} had been saved"]
    problems = [f"{newest.name} is damaged: {problem}" for problem in verify(newest)]
    if returned is not None and number_of(newest) < number_of(Path(returned)):
        problems.append(f"the newest is {newest.name}, and {returned} had been saved")
    return problems


def number_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def check_losses(path: Path) -> tuple[list[str], int]:
    """Compares the losses of steps that were repeated; returns problems and the number of steps compared."""
    first: dict[int, float] = {}
    problems, repeated = [], 0
    for line in path.read_text().splitlines() if path.exists() else []:
        step, loss = int(line.split()[0]), float(line.split()[1])
        if step in first:
            repeated += 1
            if not math.isclose(first[step], loss, rel_tol=TOLERANCE):
                problems.append(f"step {step} had loss {first[step]}, and {loss} when it was repeated")
        first.setdefault(step, loss)
    return problems, repeated


# ---- A tool that is killed -------------------------------------------------------------------------------------------
def run_tool(checkpoint: Path, output: Path) -> None:
    consolidate(checkpoint, output, max_shard_size=400)


def run_killed(checkpoint: Path, output: Path, chaos: Path) -> int:
    """Runs a tool in a process of its own, with the faults of the plan in ``chaos``; returns its exit code."""
    child = os.fork()
    if child == 0:
        try:
            FaultInjector(str(chaos)).watch_files(TOOL)
            run_tool(checkpoint, output)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def kill_tool(checkpoint: Path, folder: Path, *, every: int = 1) -> Report:
    """Kills a tool before each of its operations on files, or each ``every``-th, and runs it again; then the same for
    the run that finds what the first has left."""
    folder.mkdir()
    report = Report()
    run_tool(checkpoint, folder / "expected")
    expected = contents(folder / "expected")
    make_plan(folder / "chaos", [], counts=True)
    if run_killed(checkpoint, folder / "counted", folder / "chaos"):
        report.problems.append(f"{TOOL} fails")
    points = [line["point"] for line in read_journal(folder / "chaos") if line["event"] == "point"]
    for number in range(1, len(points) + 1, every):
        again = None
        for second in (None, number):  # the second run is killed too, perhaps while it removes what the first has left
            where = f"{TOOL}, operation {number}" + (f", run again and killed at {second}" if second else "")
            output = folder / f"{number}-{second}"
            kills = [Fault(point=TOOL, rank=None, count=n) for n in (number, second) if n]
            make_plan(folder / f"chaos-{number}-{second}", kills)
            chaos = folder / f"chaos-{number}-{second}"
            for _ in kills:
                code = run_killed(checkpoint, output, chaos)
                if code != -signal.SIGKILL:
                    report.problems.append(f"{where}: exit code {code}")
            again = run_killed(checkpoint, output, chaos)
            if again:
                report.problems.append(f"{where}: the next run ended with {again}")
            elif without_manifest(contents(output)) != without_manifest(expected):
                report.problems.append(f"{where}: the next run wrote something else: {sorted(contents(output))}")
            report.kills += Counter(r["point"] for r in read_journal(chaos) if r["event"] == "fault")
    return report


def without_manifest(files: dict[str, bytes]) -> dict[str, bytes]:
    """The manifest says when it was written."""
    return {name: data for name, data in files.items() if name != NAME}


# ---- The launcher ----------------------------------------------------------------------------------------------------
LAUNCHED = [
    *("worker:1", "start:1", "rendezvous:1", "rendezvous:2", "load:2", "worker:3"),
    *("forward:3", "backward:4", "collective:30", "step:2", "save.write:9", "save.fsync:4", "save.rename:2"),
]
"""Points of the part with the launcher, in turn."""
ONE_RANK = ("save.mkdir", "save.lock", "save.rename", "save.remove")
"""Those that only the main process reaches."""


def kill_launches(folder: Path, number: int, seed: int) -> Report:
    """Kills ranks of a launch that restarts them, one after another."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    random_ = random.Random(seed)
    places = [point.split(":") for point in ["step:3", *LAUNCHED]]  # a checkpoint first
    faults = []
    for index in range(number):
        point, count = places[index % len(places)]
        rank = None if point in ONE_RANK else random_.randrange(RANKS)
        faults.append(Fault(point=point, count=int(count), rank=rank))
    words = ["launch", "--nproc-per-node", str(RANKS), "--cpu", "--quiet", "--grace", "5"]
    words += ["--max-restarts", str(number - number // 4), str(folder / "train.py"), str(folder), str(4 * number)]
    outcome, report = run_command(words, faults, timeout=1200), Report()
    for fault in outcome.faults:
        where = f"launch, {fault.point}:{fault.count} on rank {fault.rank}"
        if fault.at is None:
            report.problems.append(f"{where}: not reached")
            continue
        report.kills[fault.at] += 1
        report.named[fault.at] += fault.named == fault.rank_hit
        if fault.named != fault.rank_hit:
            report.problems.append(f"{where}: rank {fault.rank_hit} was killed, rank {fault.named} is named")
        if fault.is_older:
            report.problems.append(f"{where}: an older checkpoint was resumed")
        report.resumed += fault.resumed is not None
    report.steps_lost = outcome.steps_lost
    report.problems += [f"launch: {each}" for each in (*outcome.lost, *outcome.processes, *outcome.shared_memory)]
    if not outcome.is_good:
        report.problems.append(f"launch: exit code {outcome.exit_code}: {outcome.errors[-2000:]}")
    problems, report.repeated = check_losses(folder / "losses")
    report.problems += problems
    return report


# ---- All of it -------------------------------------------------------------------------------------------------------
def kill_all(folder: Path, *, kills: int, launches: int, seed: int = 0, names: Iterable[str] = COMPOSITIONS) -> Report:
    """Kills trainings ``kills`` times, `consolidate` at every operation, and executed ranks ``launches`` times."""
    report, names = Report(), list(names)
    for index, name in enumerate(names):
        began = time.monotonic()
        number = kills // len(names) + (index < kills % len(names))
        found = kill_training(folder / name.replace(" ", "-"), name, number, seed + index)
        report.add(found)
        print(
            f"{name}: {sum(found.kills.values())} kills in {time.monotonic() - began:.0f} s", *found.problems, sep="\n"
        )
        sys.stdout.flush()
    checkpoint = latest(folder / names[0].replace(" ", "-") / "checkpoints")
    if checkpoint is None:
        report.problems.append("there is no checkpoint for consolidate")
        return report
    found = kill_tool(checkpoint, folder / TOOL)
    report.add(found)
    print(f"{TOOL}: {sum(found.kills.values())} kills", *found.problems, sep="\n", flush=True)
    if launches:
        report.add(kill_launches(folder / "launched", launches, seed))
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Kills, and checks what is lost.")
    parser.add_argument("--kills", type=int, default=420, help="of ranks that are forked (default: %(default)s)")
    parser.add_argument(
        "--launches", type=int, default=28, help="further kills, of ranks that are executed (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        report = kill_all(Path(folder), kills=options.kills, launches=options.launches, seed=options.seed)
    print(report)
    return 1 if report.problems or not all(report.kills[point] for point in POINTS) else 0


if __name__ == "__main__":
    sys.exit(main())
