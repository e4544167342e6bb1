"""Kills ranks and tools at every point of ``neuron-accel chaos``, some hundred times, and checks that nothing is lost.

    python -m tests.kills --kills 400

One training after another is killed again and again, always in a place that is drawn from all that a start of it
reaches, and resumed from its latest checkpoint. After each kill: the place was reached; the rank that was killed is
named; the newest complete checkpoint is undamaged and not older than the last whose save had returned; no process and
no shared memory is left; a step that is repeated has the loss that it had. `consolidate` and `reshard` are killed
before each of their operations on files, and run again.

Most ranks are forked by ``run_ranks`` from a process that has imported torch. The last part uses the launcher itself,
with workers of a data loader.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neuron_accel.checkpoint.format.manifest import NAME, has_manifest
from neuron_accel.checkpoint.state.resume import latest
from neuron_accel.checkpoint.tools.consolidate import consolidate
from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.checkpoint.tools.reshard import Sharding, reshard
from neuron_accel.cli import _chaos_points
from neuron_accel.cli._chaos_points import DONE, JOURNAL, PLAN, POINTS
from neuron_accel.cli.chaos import History, Strike, read_journal
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.testing import RanksError, run_ranks
from tests.soak import Leftovers

RANKS = 2
COMPOSITIONS: Mapping[str, list[Any]] = {
    "zero1": ["zero1"],
    "fully sharded": [{"fully_sharded": {"modules": ["0", "2"]}}],
    "data parallel": [],
}
LOOKED_AT = 4  # steps of the start in which points are counted; a checkpoint a step, of which two are kept
FIRST = ("start", "rendezvous", "load", "save.remove")
"""Points that a start may not reach before there are some checkpoints, or only at its beginning."""
TOLERANCE = 1e-5  # relative, of the loss of a repeated step


@dataclass
class Report:
    """What was done, and what was wrong.

    Args:
        kills: number of kills by point.
        faults: what was wrong.
        steps_lost: that had to be repeated.
        resumed: starts that continued from a checkpoint.
        repeated: steps whose loss was compared with that of an earlier start.
    """

    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    steps_lost: int = 0
    resumed: int = 0
    repeated: int = 0

    def add(self, other: Report) -> None:
        self.kills += other.kills
        self.faults += other.faults
        self.steps_lost += other.steps_lost
        self.resumed += other.resumed
        self.repeated += other.repeated

    def __str__(self) -> str:
        rows = [f"{point:20} {self.kills[point]:4}" for point in POINTS if self.kills[point]]
        missed = [point for point in POINTS if not self.kills[point]]
        total = f"{sum(self.kills.values())} kills, {len(rows)} of {len(POINTS)} points"
        total += f" (not: {', '.join(missed)})" if missed else ""
        rows.append(f"{total}; {self.resumed} starts resumed, {self.steps_lost} steps lost, {self.repeated} repeated")
        return "\n".join([*rows, f"{len(self.faults)} faults", *self.faults])


# ---- A training that is killed ---------------------------------------------------------------------------------------
def train(root: str, chaos: str, plugins: list[Any], steps: float) -> None:
    """Continues the training in ``root``, struck by the plan in ``chaos``; called on every rank."""
    _chaos_points.install(chaos).reach("start")
    import torch
    from accelerate.utils import ProjectConfiguration

    from neuron_accel import NeuronAccelerator

    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = NeuronAccelerator(project_config=project, config={"plugins": plugins})
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.003)
    data: Any = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.load_state(resume="latest")
    done = accelerator.save_iteration
    while done < steps:
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            value, done = accelerator.reduce(loss.detach(), "mean").item(), done + 1
            if accelerator.is_main_process:
                with open(Path(root, "losses"), "a") as file:
                    file.write(f"{done} {value!r}\n")
            accelerator.save_state(async_save=done % 3 == 0)
            if done >= steps:
                break
    accelerator.end_training()


def make_plan(folder: Path, strikes: Sequence[Strike], *, counts: bool = False) -> None:
    folder.mkdir()
    (folder / PLAN).write_text(json.dumps({"strikes": [asdict(strike) for strike in strikes], "counts": counts}))
    (folder / JOURNAL).touch()


def places(folder: Path, plugins: list[Any]) -> list[Strike]:
    """Every place that a start which resumes reaches on either rank until it has done some steps."""
    folder.mkdir()
    make_plan(folder / "first", [])
    run_ranks(train, RANKS, str(folder), str(folder / "first"), plugins, 2, backend=None)
    make_plan(folder / "second", [], counts=True)
    run_ranks(train, RANKS, str(folder), str(folder / "second"), plugins, 2 + LOOKED_AT, backend=None)
    counts = Counter((r["point"], r["rank"]) for r in read_journal(folder / "second") if r["event"] == "point")
    return [
        Strike(point=point, rank=rank, count=number)
        for (point, rank), count in sorted(counts.items())
        for number in range(1, count + 1)
    ]


def choose(found: Iterable[Strike], number: int, seed: int) -> list[Strike]:
    """Chooses places, as many of each point and rank as possible, and then in the order that the seed says."""
    random_, groups = random.Random(seed), dict[tuple[str, int | None], list[Strike]]()
    for strike in found:
        groups.setdefault((strike.point, strike.rank), []).append(strike)
    for group in groups.values():
        random_.shuffle(group)
    chosen: list[Strike] = []
    while len(chosen) < number and any(groups.values()):
        chosen += [group.pop() for group in groups.values() if group]
    chosen = chosen[:number]
    random_.shuffle(chosen)
    chosen.sort(key=lambda strike: strike.point in ("load", "save.remove"))  # after there are checkpoints
    return chosen


def kill_training(folder: Path, plugins: list[Any], number: int, seed: int) -> Report:
    """Kills a training ``number`` times."""
    strikes = choose(places(Path(f"{folder}-places"), plugins), number, seed)
    chaos = Path(f"{folder}-chaos")
    folder.mkdir()
    make_plan(chaos, strikes)
    report, temporary = Report(), Path(f"{folder}-tmp")
    temporary.mkdir()
    leftovers = Leftovers(temporary)
    for index, strike in enumerate(strikes):
        where = f"{folder.name}, kill {index + 1}, {strike.point}:{strike.count} on rank {strike.rank}"
        env = {"TORCHELASTIC_RESTART_COUNT": str(index), "TMPDIR": str(temporary)}
        try:
            run_ranks(
                train, RANKS, str(folder), str(chaos), plugins, math.inf, backend=None, env=env, timeout=60, grace=3
            )
        except RanksError as error:
            if f"rank {strike.rank} of {RANKS}: RankExit: ended with signal SIGKILL" not in str(error).splitlines()[0]:
                report.faults.append(f"{where}: another rank is named: {str(error)[:2000]}")
        if not (chaos / DONE.format(index)).exists():
            report.faults.append(f"{where}: not reached")
            (chaos / DONE.format(index)).write_text("not reached")
            continue
        report.kills[strike.point] += 1
        report.faults += [
            f"{where}: {fault}"
            for fault in (*leftovers.found(last=index == len(strikes) - 1), *_checkpoints(folder, chaos))
        ]
        for path in temporary.iterdir():  # what a rank that was killed could not remove
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    history = History(strikes).follow(read_journal(chaos))
    report.faults += [f"{s.point}:{s.count}: an older checkpoint was resumed" for s in history.strikes if s.is_older]
    report.steps_lost = sum(strike.steps_lost for strike in history.strikes)
    report.resumed = sum(line["event"] == "loaded" for line in read_journal(chaos))
    faults, report.repeated = check_losses(folder / "losses")
    report.faults += faults
    return report


def _checkpoints(folder: Path, chaos: Path) -> list[str]:
    """What is wrong with the checkpoints after a kill."""
    returned = History().follow(read_journal(chaos)).returned
    newest = latest(folder / "checkpoints")
    if newest is None:
        return [] if returned is None else [f"there is no checkpoint, and {returned[0]} had been saved"]
    faults = [f"{newest.name} is damaged: {problem}" for problem in verify(newest)]
    if returned is not None and number_of(newest) < number_of(Path(returned[0])):
        faults.append(f"the newest is {newest.name}, and {returned[0]} had been saved")
    return faults


def number_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def check_losses(path: Path) -> tuple[list[str], int]:
    """Compares the losses of steps that were repeated; returns faults and the number of steps compared."""
    first: dict[int, float] = {}
    faults, repeated = [], 0
    for line in path.read_text().splitlines() if path.exists() else []:
        step, loss = int(line.split()[0]), float(line.split()[1])
        if step in first:
            repeated += 1
            if not math.isclose(first[step], loss, rel_tol=TOLERANCE):
                faults.append(f"step {step} had loss {first[step]}, and {loss} when it was repeated")
        first.setdefault(step, loss)
    return faults, repeated


# ---- Tools that are killed -------------------------------------------------------------------------------------------
MESH = Mesh.build([AxisSpec(name="dp", degree=2, kind=AxisKind.DATA)], 2)


def run_tool(tool: str, checkpoint: Path, output: Path) -> None:
    if tool == "consolidate":
        consolidate(checkpoint, output, max_shard_size=400)
    else:
        reshard(checkpoint, output, Sharding(mesh=MESH, shard_optimizer=True))


def run_killed(tool: str, checkpoint: Path, output: Path, chaos: Path) -> int:
    """Runs a tool in a process of its own, struck by the plan in ``chaos``; returns its exit code."""
    child = os.fork()
    if child == 0:
        try:
            _chaos_points.install(str(chaos))
            run_tool(tool, checkpoint, output)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def kill_tool(tool: str, checkpoint: Path, folder: Path, *, every: int = 1) -> Report:
    """Kills a tool before each of its operations on files, or each ``every``-th, and runs it again; then the same for
    the run that finds what the first has left."""
    folder.mkdir()
    report = Report()
    run_tool(tool, checkpoint, folder / "expected")
    expected = contents(folder / "expected")
    make_plan(folder / "chaos", [], counts=True)
    if run_killed(tool, checkpoint, folder / "counted", folder / "chaos"):
        report.faults.append(f"{tool} fails")
    points = [line["point"] for line in read_journal(folder / "chaos") if line["event"] == "point"]
    for number in range(1, len(points) + 1, every):
        again = None
        for second in (None, number):  # the second run is killed too, perhaps while it removes what the first has left
            where = f"{tool}, operation {number}" + (f", run again and killed at {second}" if second else "")
            output = folder / f"{number}-{second}"
            kills = [Strike(point=tool, rank=None, count=n) for n in (number, second) if n]
            make_plan(folder / f"chaos-{number}-{second}", kills)
            chaos = folder / f"chaos-{number}-{second}"
            for _ in kills:
                code = run_killed(tool, checkpoint, output, chaos)
                if code != -signal.SIGKILL:
                    report.faults.append(f"{where}: exit code {code}")
                if tool == "reshard" and has_manifest(output) and (problems := verify(output)):
                    report.faults.append(f"{where}: looks complete, and is not: {problems[0]}")
            again = run_killed(tool, checkpoint, output, chaos)
            if again:
                report.faults.append(f"{where}: the next run ended with {again}")
            elif without_manifest(contents(output)) != without_manifest(expected):
                report.faults.append(f"{where}: the next run wrote something else: {sorted(contents(output))}")
            report.kills += Counter(r["point"] for r in read_journal(chaos) if r["event"] == "strike")
    return report


def without_manifest(files: dict[str, bytes]) -> dict[str, bytes]:
    """The manifest says when it was written."""
    return {name: data for name, data in files.items() if name != NAME}


# ---- The launcher ----------------------------------------------------------------------------------------------------
SCRIPT = """
import sys

import torch
from accelerate.utils import ProjectConfiguration
from neuron_accel import NeuronAccelerator

project = ProjectConfiguration(project_dir=sys.argv[1], automatic_checkpoint_naming=True, total_limit=2)
accelerator = NeuronAccelerator(project_config=project, config={"plugins": ["zero1"]})
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
data = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, num_workers=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.load_state(resume="latest")
while accelerator.save_iteration < int(sys.argv[2]):
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        value = accelerator.reduce(loss.detach(), "mean").item()
        if accelerator.is_main_process:
            with open(f"{sys.argv[1]}/losses", "a") as file:
                file.write(f"{accelerator.save_iteration + 1} {value!r}\\n")
        accelerator.save_state()
        if accelerator.save_iteration >= int(sys.argv[2]):
            break
accelerator.end_training()
"""

LAUNCHED = [
    *("worker:1", "start:1", "rendezvous:1", "rendezvous:2", "load:2", "worker:3"),
    *("forward:3", "backward:4", "collective:30", "step:2", "save.write:9", "save.fsync:4", "save.rename:2"),
]
"""Points of the part with the launcher, in turn."""


def kill_launches(folder: Path, number: int, seed: int) -> Report:
    """Runs ``neuron-accel chaos`` with a script that it does not know."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    points = [word for point in LAUNCHED for word in ("--point", point)]
    points = ["--point", "step:3", *points[: 2 * (number - 1)]]  # a checkpoint first
    command = ["chaos", "--kills", str(number), "--seed", str(seed), "--json", *points, "--timeout", "1200", "--"]
    command += ["launch", "--nproc-per-node", str(RANKS), "--cpu", "--quiet", "--grace", "5"]
    command += ["--max-restarts", str(number - number // 4), str(folder / "train.py"), str(folder), str(4 * number)]
    done = subprocess.run(
        [sys.executable, "-m", "neuron_accel.cli.main", *command], capture_output=True, text=True, timeout=3600
    )
    report = Report()
    try:
        outcome = json.loads(done.stdout)
    except ValueError:
        report.faults.append(f"chaos ended with {done.returncode}: {done.stderr[-4000:]}")
        return report
    for strike in outcome["strikes"]:
        where = f"launch, {strike['point']}:{strike['count']} on rank {strike['rank']}"
        if strike["at"] is None:
            report.faults.append(f"{where}: not reached")
            continue
        report.kills[strike["at"]] += 1
        if strike["named"] != strike["struck"]:
            report.faults.append(f"{where}: rank {strike['struck']} was struck, rank {strike['named']} is named")
        if strike["is_older"]:
            report.faults.append(f"{where}: an older checkpoint was resumed")
        report.resumed += strike["resumed"] is not None
    report.steps_lost = outcome["steps_lost"]
    report.faults += [f"launch: {each}" for name in ("lost", "processes", "shared_memory") for each in outcome[name]]
    if not outcome["is_good"] or done.returncode:
        report.faults.append(f"launch: exit code {outcome['exit_code']}: {done.stderr[-2000:]}")
    faults, report.repeated = check_losses(folder / "losses")
    report.faults += faults
    return report


# ---- All of it -------------------------------------------------------------------------------------------------------
def kill_all(folder: Path, *, kills: int, launches: int, seed: int = 0, names: Iterable[str] = COMPOSITIONS) -> Report:
    """Kills trainings ``kills`` times, tools at every operation, and ``launches`` times under the launcher."""
    report, names = Report(), list(names)
    for index, name in enumerate(names):
        began = time.monotonic()
        number = kills // len(names) + (index < kills % len(names))
        found = kill_training(folder / name.replace(" ", "-"), COMPOSITIONS[name], number, seed + index)
        report.add(found)
        print(f"{name}: {sum(found.kills.values())} kills in {time.monotonic() - began:.0f} s", *found.faults, sep="\n")
        sys.stdout.flush()
    checkpoint = latest(folder / names[0].replace(" ", "-") / "checkpoints")
    if checkpoint is None:
        report.faults.append("there is no checkpoint for the tools")
        return report
    for tool in ("consolidate", "reshard"):
        found = kill_tool(tool, checkpoint, folder / tool)
        report.add(found)
        print(f"{tool}: {sum(found.kills.values())} kills", *found.faults, sep="\n", flush=True)
    if launches:
        report.add(kill_launches(folder / "launched", launches, seed))
    return report


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description="Kills, and checks what is lost.")
    parser.add_argument("--kills", type=int, default=320, help="of ranks that are forked (default: %(default)s)")
    parser.add_argument("--launches", type=int, default=40, help="of ranks of a launcher (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        report = kill_all(Path(folder), kills=options.kills, launches=options.launches, seed=options.seed)
    print(report)
    return 1 if report.faults or not all(report.kills[point] for point in POINTS) else 0


if __name__ == "__main__":
    sys.exit(main())
