"""Runs that were never trained: folders of a run report, with known numbers, as the plugin would write them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from neuron_accel_report.records import (
    Collectives,
    End,
    Header,
    Line,
    Memory,
    Prediction,
    Step,
    rank_file,
    to_line,
)

MIB = 2**20
SECOND = 10**9
TRAFFIC = (
    Collectives(op="all_reduce", group="tp", count=24, bytes=6 * MIB),
    Collectives(op="reduce_scatter", group="dp", count=2, bytes=3 * MIB),
    Collectives(op="all_gather", group="dp", count=2, bytes=3 * MIB),
)


def write_run(
    folder: Path,
    *,
    ranks: int = 4,
    steps: int = 60,
    speed: float = 1.0,
    seed: int = 0,
    ended: bool = True,
    change: Callable[[int, int, Step], Step] | None = None,
    **header,
) -> Path:
    """Writes the folder of a run.

    Args:
        folder: where; it is made.
        ranks, steps: their numbers.
        speed: steps take this much less time.
        seed: of losses and times.
        ended: whether the run ends in order.
        change: gives another record for a rank, a step and its record.
        header: other values of the header.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        lines: list[Line] = [_header(rank, ranks, **header)]
        for number in range(steps):
            step = _step(rank, number, speed, seed)
            lines.append(step if change is None else change(rank, number, step))
        if ended:
            lines.append(End(time=steps * SECOND, steps=steps))
        (folder / rank_file(rank)).write_text("".join(f"{to_line(line)}\n" for line in lines))
    return folder


def late(rank: int, number: int, seconds: float = 0.05, part: str = "loader"):
    """A change of :func:`write_run`: in a step, a rank is busy for longer, and the others wait for it."""

    def change(at: int, step: int, record: Step) -> Step:
        if step != number:
            return record
        grown = part if at == rank else "communication"
        parts = {**record.parts, grown: record.parts[grown] + seconds}
        return replace(record, end=record.end + round(seconds * SECOND), parts=parts)

    return change


def _header(rank: int, ranks: int, **other) -> Header:
    tp = 2 if ranks % 2 == 0 else 1
    return Header(
        **{
            "run": "a-run",
            "rank": rank,
            "world_size": ranks,
            "mesh": {"dp": ranks // tp, "tp": tp},
            "coordinates": {"dp": rank // tp, "tp": rank % tp},
            "plugins": ("tensor_parallel", "zero1", "run_report"),
            "host": f"node-{rank // 32}",
            "device": "cpu",
            "backend": "torch",
            "parameters": 3_407_872,
            "torch": "2.13.0",
            "neuron_accel": "0.1.0",
            "started": 1.8e9,
            "predicted": Prediction(traffic=TRAFFIC),
            **other,
        }
    )


def _step(rank: int, number: int, speed: float, seed: int) -> Step:
    common, own = random.Random(1000 * seed + number), random.Random(7919 * rank + number)
    jitter = 0.0015 * own.random()
    parts = {
        "loader": 0.002 + jitter,
        "forward": 0.030 / speed,
        "backward": 0.058 / speed,
        "optimizer": 0.012 / speed,
        "communication": 0.020 - jitter,
        "other": 0.003,
    }
    warm = 0.4 if number == 0 else 0.0
    parts["forward"] += warm
    return Step(
        step=number,
        begin=number * SECOND,
        end=number * SECOND + round(sum(parts.values()) * SECOND),
        samples=8,
        tokens=8 * 512,
        micro_batches=2,
        parts=parts,
        waiting=0.01,
        collectives=TRAFFIC,
        memory=Memory(
            device_peak=(620 + (4 if rank == 1 else 0)) * MIB + number % 7 * MIB,
            device=400 * MIB,
            host=900 * MIB + number * 2048,
            parameters=130 * MIB,
            gradients=130 * MIB,
            optimizer=65 * MIB,
        ),
        loss=2.2 + 8.4 * math.exp(-number / 18) + 0.15 * common.random() + 0.01 * own.random() - 0.05 * seed,
        grad_norm=1.0 + 4 * math.exp(-number / 10) + 0.2 * common.random(),
        lr=(3e-4 * min(1.0, (number + 1) / 10),),
    )
