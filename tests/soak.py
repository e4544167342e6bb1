"""Trains for as long as one likes, with saves, loads, evaluations and restarts, and checks that nothing grows.

    python -m tests.soak --minutes 60 [--backend xla] [--ranks 4]

Every start of the ranks continues from the latest checkpoint of the one before, with the next of several
compositions, and repeats a few rounds: train, evaluate, save (every other time while training goes on), and load,
which goes back some steps. A step that is repeated must have the loss that it had. After every other round a rank
writes down what it uses: memory that malloc has handed out, file descriptors, threads, process groups, and, on XLA,
compiled graphs. After some rounds to warm up none of it may grow. On XLA memory grows with torch_xla alone, too: with
each graph that is executed, and with each tensor that is copied to the host, as a save does with all of them. Both are
measured with torch_xla alone, and memory may grow by no more than that. Between starts no process, temporary file,
shared memory or old checkpoint may be left.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from neuron_accel.testing import run_ranks
from neuron_accel.testing.resources import allocated_bytes

COMPOSITIONS: Mapping[str, tuple[str, list[Any]]] = {
    "zero1": ("", ["zero1"]),
    "tp2 x dp + zero1": ("", [{"tensor_parallel": {"tensor_parallel_size": 2}}, "zero1"]),
    "fully sharded": ("", ["fully_sharded"]),
    "pp2 x dp": ("gloo", [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}]),
    "data parallel": ("", []),
}
"""By name: the only backend that it exists on, or "", and the plugins."""

SAMPLES = 8  # of a step, over all ranks
STEPS = 4  # of a round
KEPT = 2  # checkpoints
LOSS_TOLERANCE = 1e-5  # relative: a step is repeated on the same ranks from bits that are the same
MARGIN = 1.75
"""By how much more memory may grow for each execution or copy than with torch_xla alone, whose graphs are smaller."""
MEMORY = 96 * 1024
"""Bytes by which memory may grow after the warm-up: malloc counts pieces that it caches for threads as handed out."""


@dataclass(frozen=True)
class Round:
    """What a rank uses at the end of a round. ``memory`` is in bytes, the others are numbers of things; ``executions``
    are those of graphs so far, and ``copies`` those of tensors to the host, by all ranks of the process."""

    executions: int
    copies: int
    memory: int
    descriptors: int
    threads: int
    groups: int
    graphs: int

    @classmethod
    def now(cls) -> Round:
        import torch.distributed as dist

        gc.collect()
        process = psutil.Process()
        groups = len(dist.distributed_c10d._world.pg_map) if dist.is_available() and dist.is_initialized() else 0
        return cls(
            executions=_count("UncachedCompile") + _count("CachedCompile"),
            copies=_samples("TransferFromDeviceTime"),
            memory=allocated_bytes(),
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            groups=groups,
            graphs=_count("UncachedCompile"),
        )


def _count(name: str) -> int:
    """A counter of torch_xla: graphs that it has compiled in this process, or executed again."""
    metrics = sys.modules.get("torch_xla.debug.metrics")
    return int(metrics.counter_value(name) or 0) if metrics else 0


def _samples(name: str) -> int:
    """How often torch_xla has measured something in this process."""
    metrics = sys.modules.get("torch_xla.debug.metrics")
    data = metrics.metric_data(name) if metrics else None
    return int(data[0]) if data else 0


def settle_interned_strings() -> None:
    """Lets CPython's table of interned strings reach its size, which is several times that of its contents.

    Names of attributes that come and go use it up even if their number stays the same, and then it doubles, once: by
    4 MB after a few thousand steps of a process that has imported torch and transformers.
    """
    for number in range(400_000):
        sys.intern(f"neuron_accel {number}")


def by_hand(steps: int, every: int) -> tuple[list[Round], list[Round]]:
    """What a rank uses that trains with torch_xla alone, and without collectives, after each ``every`` steps; and then,
    after it has copied all parameters to the host, as often."""
    import torch

    from neuron_accel.backends.xla import XlaBackend
    from neuron_accel.testing.xla_ranks import one_at_a_time
    from tests.distributed.models import VOCABULARY, llama

    backend, trained, copied = XlaBackend.connect(), list[Round](), list[Round]()

    def measure(found: list[Round]) -> None:
        backend.barrier()
        with one_at_a_time():
            found.append(Round.now())
        backend.barrier()

    with one_at_a_time():
        settle_interned_strings()
        torch.manual_seed(0)
        model = llama().to(backend.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        tokens = torch.randint(VOCABULARY, (2, 16)).to(backend.device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        backend.step_boundary()
        if step % every == every - 1:
            measure(trained)
    for _ in range(steps // every):
        for parameter in model.parameters():
            parameter.detach().cpu()
        measure(copied)
    return trained, copied


@dataclass
class Start:
    """What the ranks of one start did.

    Args:
        composition: its name.
        first_step: number of optimizer steps that the checkpoint it continued from had seen.
        steps: that it took itself, repeated ones included.
        rounds: what each rank used at the end of each round.
        faults: what was wrong.
    """

    composition: str
    first_step: int
    steps: int
    rounds: list[list[Round]] = field(repr=False)
    faults: list[str] = field(default_factory=list)


def train(folder: str, plugins: list[Any], backend: str, rounds: int) -> tuple[int, list[Round], list[str]]:
    """Continues the training in ``folder``; called on every rank.

    Returns:
        number of steps that were done before, what this rank used after each round, and faults.
    """
    import torch
    from accelerate.utils import ProjectConfiguration
    from torch.utils.data import DataLoader

    from neuron_accel import NeuronAccelerator
    from neuron_accel.testing.xla_ranks import one_at_a_time
    from tests.distributed.models import VOCABULARY, llama

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=KEPT)
    config = {"plugins": plugins, "backend": "xla" if backend == "xla" else "torch"}
    accelerator = NeuronAccelerator(config=config, project_config=project)
    to_host = accelerator.run.backend.to_host  # item() of a tensor of XLA ranks would abort their process
    with one_at_a_time():
        settle_interned_strings()
        torch.manual_seed(0)
        model = llama()
        tokens = torch.randint(VOCABULARY, (SAMPLES * 6, 16), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step > 4 else 0.5)
    batch = SAMPLES // accelerator.data_parallel_size
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens]
    loader: Any = DataLoader(rows, batch_size=batch, shuffle=True)
    held_out: Any = DataLoader(rows[:SAMPLES], batch_size=batch)
    model, optimizer, schedule, loader, held_out = accelerator.prepare(model, optimizer, schedule, loader, held_out)
    count = _Count()
    accelerator.register_for_checkpointing(count)
    accelerator.load_state(resume="latest")
    first, found, faults, losses = count.steps, [], [], Losses()
    for number in range(rounds):
        taken = 0
        while taken < STEPS:
            for inputs in loader:
                model.train()
                loss = model(**inputs).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                count.steps, taken = count.steps + 1, taken + 1
                value = float(to_host(accelerator.reduce(loss.detach(), "mean")))
                faults += losses.check(count.steps, value)
                if taken == STEPS:
                    break
                if taken == STEPS // 2:  # the steps after it are repeated when it is loaded
                    accelerator.save_state(async_save=number % 2 == 1)
        model.eval()
        with torch.no_grad():
            for inputs in held_out:
                each = to_host(accelerator.gather_for_metrics(model(**inputs).loss.reshape(1)))
                if not bool(each.isfinite().all()):
                    faults.append(f"the evaluation of round {number} is not finite")
        if number % 3 == 2:
            accelerator.load_state(resume="latest")
        accelerator.wait_for_everyone()
        if number % 2 == 0:  # nothing is being written
            with one_at_a_time():  # counting descriptors opens one
                found.append(Round.now())
        accelerator.wait_for_everyone()
    accelerator.end_training()
    if rounds > 3 and not losses.repeated:
        faults.append("no step was repeated")
    return first, found, faults


class _Count:
    """The number of optimizer steps, saved with the state."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class Losses:
    """The loss of each of the last steps, which must be the same when the step is repeated after a load."""

    kept = 16 * STEPS  # a load goes back to one of the last checkpoints; all losses would themselves be what grows

    def __init__(self) -> None:
        self._first: dict[int, float] = {}
        self.repeated = 0

    def check(self, step: int, loss: float) -> list[str]:
        """Records the loss of a step; returns a fault if it was another one before."""
        if step not in self._first:
            self._first[step] = loss
            self._first.pop(step - self.kept, None)
            return []
        self.repeated += 1
        before = self._first[step]
        if math.isclose(before, loss, rel_tol=LOSS_TOLERANCE):
            return []
        return [f"step {step} had loss {before:.7g}, and {loss:.7g} when it was repeated"]


# ---- What must not grow ----------------------------------------------------------------------------------------------


def growth(
    rounds: Sequence[Round], memory: int = MEMORY, per_execution: float = 0.0, per_copy: float = 0.0
) -> list[str]:
    """Describes each resource that grew in the second half of the rounds: the median of the last third is above that
    of the first.

    Args:
        memory: bytes by which memory may grow.
        per_execution: further bytes for each graph that was executed.
        per_copy: further bytes for each tensor that was copied to the host.
    """
    first, last = _ends(rounds)
    memory += round(per_execution * _more(first, last, "executions") + per_copy * _more(first, last, "copies"))
    faults = []
    for name in ("memory", "descriptors", "threads", "groups", "graphs"):
        before, after = (statistics.median(getattr(r, name) for r in part) for part in (first, last))
        if after > before + (memory if name == "memory" else 0):
            count = len(rounds) - len(rounds) // 2
            faults.append(f"{name} grew from {before:,.0f} to {after:,.0f} in {count} measurements")
    return faults


def growth_per(what: str, rounds: Sequence[Round]) -> float:
    """Bytes by which memory grew in the second half of the rounds, for each of the ``"executions"`` or ``"copies"``."""
    first, last = _ends(rounds)
    return max(0.0, _more(first, last, "memory") / max(1, _more(first, last, what)))


def _ends(rounds: Sequence[Round]) -> tuple[Sequence[Round], Sequence[Round]]:
    """The first and the last third of the second half."""
    kept = rounds[len(rounds) // 2 :]
    third = max(1, len(kept) // 3)
    return kept[:third], kept[-third:]


def _more(first: Sequence[Round], last: Sequence[Round], name: str) -> float:
    """By how much a number was larger at the end."""
    before, after = (statistics.median(getattr(r, name) for r in part) for part in (first, last))
    return after - before


class Leftovers:
    """Finds processes, temporary files and shared memory that a start has left.

    Args:
        folder: for temporary files of ranks; empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._before = self._now()
        self._seen = set[str]()

    def _now(self) -> set[str]:
        servers = psutil.Process().children()  # what run_ranks keeps to fork ranks from
        ranks = {f"process {c.pid} ({c.name()})" for server in servers for c in server.children(recursive=True)}
        files = {*self._folder.iterdir(), *Path(tempfile.gettempdir()).glob(f"neuron-accel-*-{os.getpid()}-*")}
        shared = Path("/dev/shm")
        files |= set(shared.iterdir()) if shared.is_dir() else set()
        return ranks | {str(path) for path in files}

    def found(self, *, last: bool = False) -> list[str]:
        """What is left. Shared memory is reported if it is there at two calls, or at the last: other programs have some
        for a while."""
        deadline = time.monotonic() + 5  # a process that was just reaped may still be listed
        while (left := self._now() - self._before) and time.monotonic() < deadline:
            time.sleep(0.1)
        shared = {each for each in left if each.startswith("/dev/shm/")}
        left -= set() if last else shared - self._seen
        self._seen = shared
        return [f"left behind: {each}" for each in sorted(left)]


def checkpoints_left(folder: Path) -> list[str]:
    """What is in the project's folder beside the checkpoints that are kept."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    whole = [name for name in names if name.startswith("checkpoint_")]
    faults = [f"in the folder of checkpoints: {name}" for name in names if name not in whole]
    if not 1 <= len(whole) <= KEPT:
        faults.append(f"{len(whole)} checkpoints instead of {KEPT}: {', '.join(whole)}")
    return faults


# ---- Starts ----------------------------------------------------------------------------------------------------------


def soak(
    folder: Path,
    *,
    minutes: float,
    backend: str,
    ranks: int,
    rounds: int,
    memory: int = MEMORY,
    names: Iterable[str] = tuple(COMPOSITIONS),
) -> list[Start]:
    """Starts ranks again and again until the time is over; every composition gets a start at least.

    Args:
        folder: of the project.
        minutes: for how long.
        backend: of ``run_ranks``.
        ranks: 2, 4 or 8.
        rounds: of a start.
        memory: bytes by which the memory of a rank may grow.
        names: of compositions; those that the backend does not have are left out.

    Raises:
        RanksError: if a rank fails.
    """
    chosen = [name for name in names if COMPOSITIONS[name][0] in ("", backend)]
    end, starts = time.monotonic() + 60 * minutes, list[Start]()
    run_ranks(_nothing, 1, backend=backend, timeout=120)  # starts the server, which stays
    per_execution = per_copy = 0.0
    if backend == "xla":
        trained, copied = run_ranks(by_hand, ranks, 400, 10, backend="xla", timeout=600)[0]
        per_execution, per_copy = growth_per("executions", trained), growth_per("copies", copied)
        print(
            f"     with torch_xla alone memory grows by {per_execution:.0f} bytes for each graph that is executed, and "
            f"by {per_copy:.0f} for each tensor that is copied to the host",
            flush=True,
        )
    temporary = folder / "tmp"
    temporary.mkdir()
    leftovers, threads = Leftovers(temporary), threading.active_count()
    while len(starts) < len(chosen) or time.monotonic() < end:
        name = chosen[len(starts) % len(chosen)]
        results = run_ranks(
            train,
            ranks,
            str(folder),
            COMPOSITIONS[name][1],
            backend,
            rounds,
            backend=backend,
            timeout=60.0 * rounds,
            env={"TMPDIR": str(temporary)},
        )
        start = Start(name, results[0][0], rounds * STEPS, [found for _, found, _ in results])
        if starts and start.first_step <= starts[-1].first_step:
            start.faults.append(f"it continued from step {start.first_step}, and the one before had done more")
        for rank, (_, found, faults) in enumerate(results):
            start.faults += [
                f"rank {rank}: {fault}"
                for fault in (*faults, *growth(found, memory, MARGIN * per_execution, MARGIN * per_copy))
            ]
        start.faults += [*leftovers.found(), *checkpoints_left(folder)]
        if threading.active_count() > threads:
            start.faults.append(f"{threading.active_count() - threads} more threads in the process that starts ranks")
        starts.append(start)
        last = start.rounds[0][-1]
        print(
            f"{len(starts):4} {name:18} from step {start.first_step:6,}  {last.memory / 2**20:7.2f} MiB  "
            f"{last.descriptors:3} descriptors {last.threads:3} threads {last.groups:2} groups {last.graphs:3} graphs",
            *(f"\n     {fault}" for fault in start.faults),
            flush=True,
        )
    starts[-1].faults += leftovers.found(last=True)
    return starts


def _nothing() -> None:
    pass


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description="Trains for long, and checks that nothing grows."
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for how long (default: %(default)s)")
    parser.add_argument("--backend", choices=("gloo", "xla"), default="gloo")
    parser.add_argument(
        "--ranks", type=int, choices=(2, 4, 8), default=4, help="number of ranks (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=150, help="of a start (default: %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        starts = soak(
            Path(folder),
            minutes=options.minutes,
            backend=options.backend,
            ranks=options.ranks,
            rounds=options.rounds,
        )
    faults = sum(len(start.faults) for start in starts)
    steps = sum(start.steps for start in starts)
    what = f"{faults} faults, see above" if faults else "nothing grew and nothing was left"
    print(f"{len(starts)} starts, {steps:,} steps on {options.ranks} ranks ({options.backend}): {what}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
