# SPDX-License-Identifier: Apache-2.0
"""A trace of a run's steps, in the format that Perfetto and Chrome read: ranks are processes, on one clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from neuron_accel.errors import ConfigurationError
from neuron_accel_report.records import Range, RankReport, RunReport, Step

STEPS, HOST = 0, 1
"""Threads of each rank in the trace: its steps, and what the host does in them."""


def trace(run: RunReport, steps: Iterable[int] | None = None) -> dict[str, Any]:
    """Returns the trace of some steps as an object to write as JSON.

    Every event has a phase, a time and duration in microseconds since the first one, the rank as its process, a thread
    and a name. Ranges of steps that the run did not trace are left out; the steps themselves are there.

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
    starts = [step.time for _, found, _ in chosen for step in found] + [
        r.start for _, _, found in chosen for r in found
    ]
    origin = min(starts)
    events = [event for each, found, ranges in chosen for event in _events(each, found, ranges, origin)]
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
    for step in steps:
        arguments = {
            "parts": {part: round(seconds, 6) for part, seconds in step.parts.items() if seconds},
            **({} if step.loss is None else {"loss": str(step.loss)}),
        }
        yield _span(f"step {step.step}", "step", pid, STEPS, step.time - origin, step.seconds, arguments)
    for span in sorted(ranges, key=lambda each: (each.start, -each.seconds)):
        start = span.start - origin
        yield _span(span.name, span.category, pid, HOST, start, span.seconds, dict(span.arguments))


def _about(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": arguments}


def _span(
    name: str, category: str, pid: int, tid: int, start: float, seconds: float, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A complete event. Its times are whole nanoseconds, so that rounding does not let nested ranges overlap."""
    begin, end = round(start * 1e9), round((start + seconds) * 1e9)
    times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
    return {"ph": "X", **times, "pid": pid, "tid": tid, "name": name, "cat": category, "args": arguments}
