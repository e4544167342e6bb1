# SPDX-License-Identifier: Apache-2.0
"""A trace of a run's steps, in the format that Perfetto and Chrome read: ranks are processes, on one clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from neuron_accel.errors import ConfigurationError
from neuron_accel_report.records import Range, RankReport, RunReport, Step

STEPS, HOST = 0, 1
"""Threads of each rank in the trace: its steps, and what the host does in them."""

RESOLUTION = 477
"""Nanoseconds: twice the distance of two numbers of Unix time, of which a range's start is one."""


def trace(run: RunReport, steps: Iterable[int] | None = None) -> dict[str, Any]:
    """Returns the trace of some steps as an object to write as JSON.

    Every event has a phase, a time and duration in microseconds since the first one, the rank as its process, a thread
    and a name. Ranges of steps that the run did not trace are left out; the steps themselves are there, with counters
    of memory and loss. Arrows lead between the ranks of a collective, from the one that called it last, for which the
    others waited.

    Args:
        run: the run.
        steps: numbers of the steps; None: those whose ranges were written, or all if there are none.

    Raises:
        ConfigurationError: if the run has none of these steps.
    """
    traced = traced_steps(run)
    known = set(run.by_step)
    wanted = set(steps) if steps is not None else traced or known
    if not wanted & known:
        there = f"{min(known)} to {max(known)}" if known else "none"
        raise ConfigurationError(
            "The run has none of these steps.",
            where=str(run.folder),
            why=f"its steps are {there}",
            fix="choose others, or leave --steps out",
        )
    chosen = [
        (
            each,
            [step for step in each.steps if step.step in wanted],
            [span for span in each.ranges if span.step in wanted],
        )
        for each in run.ranks
    ]
    origin = min(
        [step.time for _, found, _ in chosen for step in found] + [r.start for _, _, found in chosen for r in found]
    )
    events = [event for each, found, ranges in chosen for event in _events(each, found, ranges, origin)]
    events += _flows([(each.rank, ranges) for each, _, ranges in chosen], origin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run.header.run,
            "started": origin,
            "mesh": dict(run.header.mesh),
            "clock_error": max(each.header.clock_error for each in run.ranks),
        },
    }


def traced_steps(run: RunReport) -> set[int]:
    """Returns the numbers of the steps whose ranges were written."""
    return {span.step for each in run.ranks for span in each.ranges}


def _events(rank: RankReport, steps: list[Step], ranges: list[Range], origin: float) -> Iterator[dict[str, Any]]:
    pid = rank.rank
    place = ", ".join(f"{axis} {index}" for axis, index in rank.header.coordinates.items())
    yield _about("process_name", pid, STEPS, name=f"rank {pid}" + (f" ({place})" if place else ""))
    yield _about("process_sort_index", pid, STEPS, sort_index=pid)
    yield _about("thread_name", pid, STEPS, name="steps")
    yield _about("thread_name", pid, HOST, name="host")
    ends = [_nanoseconds(after.time, origin) for after in steps[1:]]
    for step, end in zip_longest(steps, ends):
        begin = _nanoseconds(step.time, origin)
        own = begin + round(step.seconds * 1e9)
        arguments: dict[str, Any] = {
            "parts": {part: round(seconds, 6) for part, seconds in step.parts.items() if seconds}
        }
        if step.loss is not None:
            arguments["loss"] = _number(step.loss)
        yield _span(f"step {step.step}", "step", pid, STEPS, begin, own if end is None else min(own, end), arguments)
        yield from _counters(step, pid, own if end is None else min(own, end))
    open_ends: list[int] = []
    for span in sorted(ranges, key=lambda each: (each.start, -each.seconds)):
        begin = _nanoseconds(span.start, origin)
        if open_ends and begin < open_ends[-1] <= begin + RESOLUTION:
            begin = open_ends[-1]
        while open_ends and open_ends[-1] <= begin:
            open_ends.pop()
        end = max(begin, _nanoseconds(span.start, origin) + round(span.seconds * 1e9))
        end = min([end, *open_ends[-1:]])
        open_ends.append(end)
        yield _span(span.name, span.category, pid, HOST, begin, end, dict(span.arguments))


def _nanoseconds(time: float, origin: float) -> int:
    """Whole nanoseconds since the first event.

    Numbers of Unix time are far apart (:data:`RESOLUTION`), so that the end of a step, its start and duration, may be
    later than the start of the next. Perfetto discards events that overlap.
    """
    return round((time - origin) * 1e9)


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def _counters(step: Step, pid: int, at: int) -> Iterator[dict[str, Any]]:
    """Counters with the values at the end of a step."""
    memory = {name: value for name, value in vars(step.memory).items() if value is not None}
    loss = {} if step.loss is None or not math.isfinite(step.loss) else {"loss": step.loss}
    for name, values in (("memory in bytes", memory), ("loss", loss)):
        if values:
            yield {"ph": "C", "ts": at / 1e3, "pid": pid, "tid": STEPS, "name": name, "args": values}


def _flows(ranks: list[tuple[int, list[Range]]], origin: float) -> Iterator[dict[str, Any]]:
    """Arrows of the collectives of traced steps: the n-th of a step over a group is one call on all its ranks."""
    calls: dict[tuple[Any, ...], list[tuple[int, Range]]] = {}
    for rank, ranges in ranks:
        count: dict[tuple[Any, ...], int] = {}
        for span in sorted(ranges, key=lambda each: each.start):
            members = span.arguments.get("ranks")
            if span.category != "collective" or not members:
                continue
            key = span.step, span.name, tuple(members)
            count[key] = count.get(key, 0) + 1
            calls.setdefault((*key, count[key]), []).append((rank, span))
    for number, ((_, name, _, _), found) in enumerate(calls.items()):
        last, call = max(found, key=lambda each: each[1].start)
        for at, (rank, span) in enumerate(found):
            if rank == last:
                continue
            arrow = {"cat": "collective", "name": name, "id": f"{number}.{at}", "tid": HOST}
            yield {"ph": "s", "ts": _nanoseconds(call.start, origin) / 1e3, "pid": last, **arrow}
            end = max(_nanoseconds(span.start + span.seconds, origin), _nanoseconds(call.start, origin))
            yield {"ph": "f", "bp": "e", "ts": end / 1e3, "pid": rank, **arrow}


def _about(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": arguments}


def _span(
    name: str, category: str, pid: int, tid: int, begin: int, end: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A complete event, from and to a nanosecond."""
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {"ph": "X", **times, "pid": pid, "tid": tid, "name": name, "cat": category, "args": arguments}
