"""The harness of the benchmarks: peers run in turn, for several rounds in one invocation, and are compared in pairs.

A figure of one run says little on a machine that others use too. So every round runs each peer once, in fresh ranks,
and what is reported is the ratio to the first peer *of the same round*: its median over rounds, with the smallest and
largest beside it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuron_accel.testing import run_ranks

OVER_TCP = {"NEURON_ACCEL_SHARED_MEMORY": "0"}
"""Environment of ranks whose bytes the kernel counts: with neuron-accel-host they send none."""


@dataclass(frozen=True)
class Measurement:
    """The figures of one peer in one round.

    Args:
        rate: units of work per second, over all ranks.
        peak_bytes: highest resident memory of any rank above what it had before it built its model.
        counts: whatever else was counted, exact.
    """

    rate: float
    peak_bytes: int = 0
    counts: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Turn:
    """The time of one step of a peer, in one turn.

    Args:
        seconds: of the wall clock, from a barrier to a barrier.
        cpu_seconds: of the processor, summed over ranks and their threads.
    """

    seconds: float
    cpu_seconds: float


def rounds(
    peers: Mapping[str, Callable[..., Measurement | None]],
    ranks: int,
    *args: Any,
    repeat: int = 5,
    timeout: float = 600,
    library: str = "gloo",
) -> dict[str, list[Measurement]]:
    """Runs every peer on ``ranks`` ranks, in turn, ``repeat`` times.

    Args:
        peers: name to an importable function; called on every rank with ``args``, it returns a measurement on rank 0.
        library: torch's name of what connects the ranks of all peers, ours too.
    """
    results: dict[str, list[Measurement]] = {name: [] for name in peers}
    for i in range(repeat):
        for name, run in peers.items():
            note(f"round {i + 1}/{repeat}, {ranks} ranks: {name}")
            measured = [m for m in ranks_on(library, run, ranks, *args, timeout=timeout) if m is not None]
            results[name].append(
                Measurement(
                    rate=measured[0].rate,
                    peak_bytes=max(m.peak_bytes for m in measured),
                    counts=measured[0].counts,
                )
            )
    note("")
    return results


def race(
    peers: Mapping[str, Callable[..., Callable[[], Any]]],
    ranks: int,
    *args: Any,
    repeat: int,
    steps: int = 2,
    timeout: float = 900,
    library: str = "gloo",
) -> dict[str, list[Turn]]:
    """The time of a step of every peer in every round: all are built in the same ranks and take turns, a few steps
    each, in an order that changes from round to round. What else the machine does then hits all alike, which it does
    not where each peer has ranks, and minutes, of its own.

    Args:
        peers: name to an importable function; called on every rank with ``args``, it builds the peer and returns its
            step.
        library: torch's name of what connects the ranks of all peers, ours too.
    """
    note(f"{ranks} ranks: time")
    measured = ranks_on(library, _race, ranks, dict(peers), args, repeat, steps, timeout=timeout)
    note("")
    return {
        name: [
            Turn(turns[0].seconds, sum(turn.cpu_seconds for turn in turns))
            for turns in zip(*(rank[name] for rank in measured), strict=True)
        ]
        for name in peers
    }


def ranks_on(library: str, run: Callable[..., Any], ranks: int, *args: Any, timeout: float) -> list[Any]:
    """Calls ``run`` on ranks that a library connects, and returns the results by rank."""
    env = OVER_TCP if library == "gloo" else {}
    return run_ranks(_on, ranks, library, run, *args, timeout=timeout, backend=None, env=env)


def _on(library: str, run: Callable[..., Any], *args: Any) -> Any:
    import torch.distributed as dist

    libraries()  # registers them
    dist.init_process_group(library)
    return run(*args)


def _race(
    peers: Mapping[str, Callable[..., Callable[[], Any]]],
    args: tuple[Any, ...],
    repeat: int,
    steps: int,
) -> dict[str, list[Turn]]:
    import torch.distributed as dist

    built = {name: build(*args) for name, build in peers.items()}
    for step in built.values():
        for _ in range(2):
            step()
    turns: dict[str, list[Turn]] = {name: [] for name in built}
    order, names = random.Random(0), list(built)
    for _ in range(repeat):
        order.shuffle(names)
        for name in names:
            before = time.process_time()
            seconds = timed_steps(built[name], dist.barrier, warm_up=0, steps=steps)
            turns[name].append(Turn(seconds, (time.process_time() - before) / steps))
    return turns


def libraries() -> list[str]:
    """torch's names of what can connect CPU ranks here."""
    from neuron_accel.backends.process_group import installed_library

    return sorted({"gloo", installed_library()})


def quartiles(values: Sequence[float]) -> str:
    """The median and, in brackets, the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def note(text: str) -> None:
    """Progress on one line of stderr."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def ratios(results: Mapping[str, Sequence[Measurement]], reference: str) -> dict[str, tuple[float, float, float]]:
    """For each peer, its rate relative to ``reference`` round by round: median, smallest, largest."""
    answer = {}
    for name, measured in results.items():
        each = [m.rate / r.rate for m, r in zip(measured, results[reference], strict=True)]
        answer[name] = (statistics.median(each), min(each), max(each))
    return answer


def table(results: Mapping[str, Sequence[Measurement]], reference: str) -> str:
    """A table in Markdown: rate relative to ``reference``, memory relative to it, and counts."""
    names = list(dict.fromkeys(name for measured in results.values() for name in measured[0].counts or {}))
    head = ["peer", f"rate / {reference}", "min-max", f"peak memory / {reference}", *names]
    rows = [head]
    relative = ratios(results, reference)
    memory = statistics.median(m.peak_bytes for m in results[reference])
    for name, measured in results.items():
        middle, low, high = relative[name]
        peak = statistics.median(m.peak_bytes for m in measured)
        counts = measured[0].counts or {}
        rows.append(
            [
                name,
                f"{middle:.2f}",
                f"{low:.2f}-{high:.2f}",
                f"{peak / memory:.2f}" if memory else "-",
                *(f"{counts[n]:.3f}" if n in counts else "-" for n in names),
            ]
        )
    return in_table(rows)


def in_table(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its header."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def timed_steps(step: Callable[[], Any], barrier: Callable[[], Any], *, warm_up: int, steps: int) -> float:
    """Seconds per step, after ``warm_up`` steps that are not timed."""
    for _ in range(warm_up):
        step()
    barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    barrier()
    return (time.perf_counter() - begin) / steps


def parser(description: str | None, *, on_libraries: bool = False) -> argparse.ArgumentParser:
    """Options of all benchmarks, and of those that run on several libraries of collectives."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--repeat", type=int, default=5, help="rounds; each runs every peer once (default: 5)")
    result.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    if on_libraries:
        result.add_argument("--libraries", nargs="+", default=libraries(), help="what connects the ranks of all peers")
    result.add_argument("--small", action="store_true", help="a tiny model, to see that the benchmark runs")
    return result
