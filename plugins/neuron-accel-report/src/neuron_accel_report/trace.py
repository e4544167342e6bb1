# SPDX-License-Identifier: Apache-2.0
"""A trace of a run's steps, in the format that Perfetto and Chrome read: ranks are processes, on one clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from neuron_accel.errors import ConfigurationError
from neuron_accel_report.records import Range, RankReport, RunReport, Step

STEPS, HOST = 0, 1
"""Threads of each rank in the trace: its steps, and what the host does in them."""


def trace(run: RunReport, steps: Iterable[int] | None = None) -> dict[str, Any]:
    """Returns the trace of some steps as an object to write as JSON.

    Every event has a phase, a time and duration in microseconds since the run began, the rank as its process, a thread
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
    events = [event for each, found, ranges in chosen for event in _events(each, found, ranges)]
    events += _flows([(each.rank, ranges) for each, _, ranges in chosen])
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "run": run.header.run,
            "started": run.header.started,
            "mesh": dict(run.header.mesh),
            "clock_error": max(each.header.clock_error for each in run.ranks),
        },
    }


def traced_steps(run: RunReport) -> set[int]:
    """Returns the numbers of the steps whose ranges were written."""
    return {span.step for each in run.ranks for span in each.ranges}


def _events(rank: RankReport, steps: list[Step], ranges: list[Range]) -> Iterator[dict[str, Any]]:
    pid = rank.rank
    place = ", ".join(f"{axis} {index}" for axis, index in rank.header.coordinates.items())
    yield _about("process_name", pid, STEPS, name=f"rank {pid}" + (f" ({place})" if place else ""))
    yield _about("process_sort_index", pid, STEPS, sort_index=pid)
    yield _about("thread_name", pid, STEPS, name="steps")
    yield _about("thread_name", pid, HOST, name="host")
    for step in steps:
        arguments: dict[str, Any] = {
            "parts": {part: round(seconds, 6) for part, seconds in step.parts.items() if seconds}
        }
        if step.loss is not None:
            arguments["loss"] = _number(step.loss)
        yield _span(f"step {step.step}", "step", pid, STEPS, step.begin, step.end, arguments)
        yield from _counters(step, pid)
    for span in sorted(ranges, key=lambda each: (each.begin, -each.end)):
        yield _span(span.name, span.category, pid, HOST, span.begin, span.end, dict(span.arguments))


def _microseconds(nanoseconds: int) -> float:
    """A time or a duration of an event. Perfetto multiplies it by 1000 and drops the fraction, and discards events that
    overlap: so it is the next number where the product would be less than what was measured."""
    found = nanoseconds / 1e3
    return found if int(found * 1e3) == nanoseconds else math.nextafter(found, math.inf)


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if math.isfinite(value) else str(value)


def _counters(step: Step, pid: int) -> Iterator[dict[str, Any]]:
    """Counters with the values at the end of a step."""
    memory = {name: value for name, value in vars(step.memory).items() if value is not None}
    loss = {} if step.loss is None or not math.isfinite(step.loss) else {"loss": step.loss}
    for name, values in (("memory in bytes", memory), ("loss", loss)):
        if values:
            yield {"ph": "C", "ts": _microseconds(step.end), "pid": pid, "tid": STEPS, "name": name, "args": values}


def _flows(ranks: list[tuple[int, list[Range]]]) -> Iterator[dict[str, Any]]:
    """Arrows of the collectives of traced steps: the n-th of a step over a group is one call on all its ranks.

    Each end of an arrow belongs to the innermost range that is open at its time, so an arrow begins with the call that
    was last, and ends in the last nanosecond of the other rank's: of its wait if it waited, which is apart from the
    call if the collective was started before. There is none to a rank that had gone on before the last one called,
    because it did not wait in a traced step or because clocks of machines differ.
    """
    calls: dict[tuple[Any, ...], list[tuple[int, Range, Range]]] = {}
    for rank, ranges in ranks:
        count: dict[tuple[Any, ...], int] = {}
        waits = {
            each.arguments["call"]: each for each in ranges if each.category == "wait" and "call" in each.arguments
        }
        for span in sorted(ranges, key=lambda each: each.begin):
            members = span.arguments.get("ranks")
            if span.category != "collective" or not members:
                continue
            key = span.step, span.name, tuple(members)
            count[key] = count.get(key, 0) + 1
            calls.setdefault((*key, count[key]), []).append((rank, span, waits.get(span.arguments.get("call"), span)))
    number = 0
    for (_, name, _, _), found in calls.items():
        last, call, _ = max(found, key=lambda each: each[1].begin)
        for rank, _, until in found:
            if rank == last or until.end <= max(call.begin, until.begin):
                continue
            number += 1  # Perfetto reads integers, and text as hexadecimal numbers
            arrow = {"cat": "collective", "name": name, "id": number, "tid": HOST}
            yield {"ph": "s", "ts": _microseconds(call.begin), "pid": last, **arrow}
            yield {"ph": "f", "bp": "e", "ts": _microseconds(until.end - 1), "pid": rank, **arrow}


def _about(kind: str, pid: int, tid: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": arguments}


def _span(
    name: str, category: str, pid: int, tid: int, begin: int, end: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    """A complete event, from and to a nanosecond."""
    times = {"ts": _microseconds(begin), "dur": _microseconds(end - begin)}
    return {"ph": "X", **times, "pid": pid, "tid": tid, "name": name, "cat": category, "args": arguments}
