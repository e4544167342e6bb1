"""Timelines of pipeline schedules, and charts of them for the terminal and as SVG. Without torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from neuron_accel.errors import ConfigurationError
from neuron_accel.strategies.pipeline.schedules import Action, Kind, Schedule, needs

# ---- Timelines: when each action of a schedule happens, with transfers that take no time -----------------------------
UNIT_COSTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
"""Relative durations. A backward pass takes about twice as long as a forward pass, as it computes the gradients of
inputs and of weights."""


@dataclass(frozen=True)
class TimedAction:
    """A computation on a rank from ``start`` to ``end``, in units of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with the time of each computation.

    Args:
        schedule: the schedule.
        spans: its computations, sorted by rank and time.
    """

    schedule: Schedule
    spans: tuple[TimedAction, ...]

    @property
    def duration(self) -> float:
        """When the last computation ends."""
        return max(span.end for span in self.spans)

    def busy(self, rank: int) -> float:
        """For how long a rank computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    @property
    def bubble(self) -> float:
        """For how long the rank that computes longest is idle."""
        return self.duration - max(self.busy(rank) for rank in range(self.schedule.ranks))

    @property
    def bubble_share(self) -> float:
        """The fraction of time, from 0 to 1, in which the rank that computes longest is idle."""
        return self.bubble / self.duration


def make_timeline(schedule: Schedule, costs: Mapping[Kind, float] | None = None) -> Timeline:
    """Simulates a schedule: each rank computes its actions in order, each as soon as its inputs are available.

    Args:
        schedule: the schedule.
        costs: duration of each kind of computation; :data:`UNIT_COSTS` by default.

    Raises:
        ConfigurationError: if a cost is not a finite number above 0.
        ValueError: if the schedule deadlocks.
    """
    costs = {**UNIT_COSTS, **(costs or {})}
    for kind, cost in costs.items():
        if not 0 < cost < math.inf:
            raise ConfigurationError(
                f"A {COLOURS[kind][1]} pass cannot take {cost:g} forward passes.",
                where="costs",
                fix="pass a number above 0; 2 is usual for a backward pass",
            )
    lists = [schedule.compute(rank) for rank in range(schedule.ranks)]
    ends: dict[Action, float] = {}
    free, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    spans: list[TimedAction] = []
    while any(p < len(actions) for p, actions in zip(position, lists, strict=True)):
        before = len(spans)
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                inputs = needs(action, schedule.stages)
                if not all(needed in ends for needed in inputs):
                    break
                start = max([free[rank], *(ends[needed] for needed in inputs)])
                ends[action] = free[rank] = start + costs[action.kind]
                spans.append(TimedAction(rank, action, start, free[rank]))
                position[rank] += 1
        if len(spans) == before:
            raise ValueError("the schedule deadlocks: an action waits for a later one")
    return Timeline(schedule, tuple(sorted(spans, key=lambda span: (span.rank, span.start))))


def in_flight(schedule: Schedule, rank: int) -> int:
    """The largest number of forward passes whose activations a rank keeps at the same time, over all its stages."""
    kept = most = 0
    ends = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
    for action in schedule.compute(rank):
        kept += (action.kind is Kind.FORWARD) - (action.kind in ends)
        most = max(most, kept)
    return most


# ---- Charts: a Gantt chart for the terminal, and one as SVG ----------------------------------------------------------
COLOURS = {
    Kind.FORWARD: ("#4c78a8", "forward"),
    Kind.BACKWARD: ("#f58518", "backward"),
    Kind.BACKWARD_INPUT: ("#eeca3b", "backward, activations"),
    Kind.BACKWARD_WEIGHT: ("#72b7b2", "backward, weights"),
}
"""Fill colour and name of each kind of computation. The colours also differ in lightness."""

_CELL, _ROW, _LEFT, _TOP = 26, 30, 64, 44


def summary(timeline: Timeline) -> str:
    """One line with the number of stages and micro-batches, the bubble, and the micro-batches in flight."""
    schedule = timeline.schedule
    most = max(in_flight(schedule, rank) for rank in range(schedule.ranks))
    virtual = f" x {schedule.virtual_stages} virtual" if schedule.virtual_stages > 1 else ""
    return (
        f"{schedule.name}: {schedule.ranks} stages{virtual}, {schedule.microbatches} micro-batches, "
        f"bubble {timeline.bubble_share:.1%}, at most {most} micro-batches in flight"
    )


MAX_BANDS = 12


def text(timeline: Timeline, width: int = 10_000) -> str:
    """Draws a Gantt chart of characters, with one line per rank.

    ``F3`` is the forward pass of micro-batch 3, ``B`` a backward pass, ``I`` and ``W`` the computation of the gradients
    of inputs and of weights; with several stages per rank, the index of the stage on its rank follows (``F3.1``). Dots
    are idle time.

    Args:
        timeline: what to draw.
        width: number of columns. If labels do not fit, computations are letters without numbers; if these do not fit
            either, the chart continues below, or is left out.
    """
    schedule = timeline.schedule
    unit = min(span.end - span.start for span in timeline.spans)
    label = max(len(_label(span, schedule)) for span in timeline.spans)
    left = len(f"rank {schedule.ranks - 1}  ")
    room = max(20, width - left)
    for cell in (label + 1, label):
        if _at(timeline.duration, cell / unit) <= room:
            rows = [_row(timeline, rank, cell, unit, labelled=True) for rank in range(schedule.ranks)]
            return "\n".join(f"rank {rank}".ljust(left) + row.rstrip() for rank, row in enumerate(rows))
    columns = _at(timeline.duration, 1 / unit)
    advice = "use --svg for a chart with the numbers of micro-batches"
    if columns > MAX_BANDS * room:
        return textwrap.fill(f"{columns} columns are too many to draw; {advice}", width, break_on_hyphens=False)
    rows = [_row(timeline, rank, 1, unit, labelled=False) for rank in range(schedule.ranks)]
    lines = []
    for begin in range(0, columns, room):
        lines += [f"rank {rank}".ljust(left) + row[begin : begin + room].rstrip() for rank, row in enumerate(rows)]
        lines.append("")
    kinds = sorted({span.action.kind for span in timeline.spans}, key=list(COLOURS).index)
    letters = ", ".join(f"{kind.value} {COLOURS[kind][1]}" for kind in kinds)
    return "\n".join([*lines, textwrap.fill(f"{letters}, . idle; {advice}", width, break_on_hyphens=False)])


def _row(timeline: Timeline, rank: int, cell: int, unit: float, *, labelled: bool) -> str:
    """The line of one rank. The width of a computation is proportional to its duration; the shortest has ``cell``
    characters."""
    scale = cell / unit
    row = [character for _ in range(_at(timeline.duration, scale) // cell + 1) for character in "." + " " * (cell - 1)]
    for span in _of(timeline, rank):
        start, stop = _at(span.start, scale), _at(span.end, scale)
        name = _label(span, timeline.schedule) if labelled else span.action.kind.value
        gap = 1 if cell > len(name) and labelled else 0
        more = stop - start - cell
        if more % cell and labelled:
            name, more = name.ljust(stop - start - gap, "-"), 0
        shown = name.ljust(cell) + ("-" * (more - gap) + " " * gap if more > 0 else "")
        row[start:stop] = shown[: stop - start].ljust(stop - start)
    return "".join(row)[: _at(timeline.duration, scale)]


def _at(time: float, scale: float) -> int:
    """The column at which a time is drawn; times at least ``1 / scale`` apart are drawn in different columns."""
    return math.floor(time * scale + 0.5 + 1e-6)


def svg(timeline: Timeline) -> str:
    """Draws a Gantt chart as SVG, with one row per rank and the numbers of micro-batches."""
    schedule = timeline.schedule
    unit = min(span.end - span.start for span in timeline.spans)
    scale = _CELL / unit
    width = max(_LEFT + timeline.duration * scale + 16, 640)
    height = _TOP + schedule.ranks * _ROW + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="14">{escape(summary(timeline))}</text>',
    ]
    for rank in range(schedule.ranks):
        y = _TOP + rank * _ROW
        parts.append(f'<text x="12" y="{y + 18:g}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y:g}" width="{timeline.duration * scale:g}" height="{_ROW - 4}" fill="#eeeeee"/>'
        )
        parts += [_box(span, schedule, y, scale) for span in _of(timeline, rank)]
    parts += [*_legend(timeline, _TOP + schedule.ranks * _ROW + 14), "</svg>"]
    return "\n".join(parts) + "\n"


def _box(span: TimedAction, schedule: Schedule, y: float, scale: float) -> str:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    colour, name = COLOURS[span.action.kind]
    # Later stages of a rank are paler.
    chunk = span.action.stage // schedule.ranks
    opacity = 1 - 0.55 * chunk / max(1, schedule.virtual_stages - 1) if schedule.virtual_stages > 1 else 1
    title = f"{name} of micro-batch {span.action.microbatch}, stage {span.action.stage}, {span.start:g} to {span.end:g}"
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:g}" y="{y:g}" width="{width:g}" height="{_ROW - 4}" '
        f'fill="{colour}" fill-opacity="{opacity:g}" stroke="#ffffff"/>'
        f'<text x="{x + width / 2:g}" y="{y + 17:g}" text-anchor="middle">{span.action.microbatch}</text></g>'
    )


def _legend(timeline: Timeline, y: float) -> list[str]:
    parts = []
    x = float(_LEFT)
    for kind in sorted({span.action.kind for span in timeline.spans}, key=list(COLOURS).index):
        colour, name = COLOURS[kind]
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20:g}" y="{y + 12:g}">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts


def _of(timeline: Timeline, rank: int) -> list[TimedAction]:
    return [span for span in timeline.spans if span.rank == rank]


def _label(span: TimedAction, schedule: Schedule) -> str:
    chunk = f".{span.action.stage // schedule.ranks}" if schedule.virtual_stages > 1 else ""
    return f"{span.action.kind.value}{span.action.microbatch}{chunk}"
