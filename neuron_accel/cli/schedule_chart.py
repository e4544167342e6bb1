"""When each action of a pipeline schedule happens, as a chart for the terminal and as SVG. Without torch."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from neuron_accel.errors import ConfigurationError
from neuron_accel.strategies.pipeline.schedules import Action, Kind, Schedule, needs

# ---- When each action of a schedule happens, if computing takes this long and transfers take no time. Without torch
UNIT_COSTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
"""A backward pass takes about twice as long as a forward pass: it makes gradients of inputs and of weights."""


@dataclass(frozen=True)
class Span:
    """An action on a rank, from ``start`` to ``end``, in the units of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a schedule looks like in time.

    Args:
        schedule: the schedule.
        spans: its computations, by rank and time.
    """

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def duration(self) -> float:
        return max(span.end for span in self.spans)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    @property
    def bubble(self) -> float:
        """How long the busiest rank does not compute."""
        return self.duration - max(self.busy(rank) for rank in range(self.schedule.ranks))

    @property
    def bubble_share(self) -> float:
        """The fraction of time, 0 to 1, in which the busiest rank does not compute."""
        return self.bubble / self.duration


def make_timeline(schedule: Schedule, costs: Mapping[Kind, float] | None = None) -> Timeline:
    """Plays a schedule through.

    Args:
        schedule: the schedule.
        costs: duration of each kind of computation; :data:`UNIT_COSTS` by default.

    Raises:
        ConfigurationError: if one takes no time, or forever.
    """
    costs = {**UNIT_COSTS, **(costs or {})}
    for kind, cost in costs.items():
        if not 0 < cost < math.inf:
            raise ConfigurationError(
                f"A {COLOURS[kind][1]} pass cannot take {cost:g} forward passes.",
                where="costs",
                fix="give a number above 0; 2 is usual for a backward pass",
            )
    lists = [schedule.compute(rank) for rank in range(schedule.ranks)]
    ends: dict[Action, float] = {}
    free, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    spans: list[Span] = []
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
                spans.append(Span(rank, action, start, free[rank]))
                position[rank] += 1
        if len(spans) == before:
            raise ValueError("the schedule waits for itself")
    return Timeline(schedule, tuple(sorted(spans, key=lambda span: (span.rank, span.start))))


def in_flight(schedule: Schedule, rank: int) -> int:
    """The largest number of forward passes whose activations a rank keeps at a time, over all its stages."""
    kept = most = 0
    ends = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
    for action in schedule.compute(rank):
        kept += (action.kind is Kind.FORWARD) - (action.kind in ends)
        most = max(most, kept)
    return most


# ---- Pictures of schedules: a Gantt chart for the terminal, and one as SVG. Without torch ----------------------------
COLOURS = {
    Kind.FORWARD: ("#4c78a8", "forward"),
    Kind.BACKWARD: ("#f58518", "backward"),
    Kind.BACKWARD_INPUT: ("#eeca3b", "backward, activations"),
    Kind.BACKWARD_WEIGHT: ("#72b7b2", "backward, weights"),
}
"""Fill colour and name of each kind of computation; told apart by lightness, too."""

_CELL, _ROW, _LEFT, _TOP = 26, 30, 64, 44


def summary(timeline: Timeline) -> str:
    """One line with what a schedule costs."""
    schedule = timeline.schedule
    most = max(in_flight(schedule, rank) for rank in range(schedule.ranks))
    virtual = f" x {schedule.virtual_stages} virtual" if schedule.virtual_stages > 1 else ""
    return (
        f"{schedule.name}: {schedule.ranks} stages{virtual}, {schedule.microbatches} micro-batches, "
        f"bubble {timeline.bubble_share:.1%}, at most {most} micro-batches in flight"
    )


MOST_BANDS = 12


def text(timeline: Timeline, width: int = 10_000) -> str:
    """A Gantt chart of characters, one line a rank. ``F3`` is the forward pass of micro-batch 3, ``B`` a backward pass,
    ``I`` and ``W`` its two halves; where ranks have several stages, their number on the rank follows (``F3.1``). Dots
    are idle time.

    Args:
        timeline: what to draw.
        width: columns that there are. Where labels do not fit, computations are letters without numbers; where those do
            not fit either, the chart goes on below.
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
    advice = "for a picture with the numbers of micro-batches use --svg"
    if columns > MOST_BANDS * room:
        return textwrap.fill(f"{columns} columns are too many to draw here; {advice}", width, break_on_hyphens=False)
    rows = [_row(timeline, rank, 1, unit, labelled=False) for rank in range(schedule.ranks)]
    lines = []
    for begin in range(0, columns, room):
        lines += [f"rank {rank}".ljust(left) + row[begin : begin + room].rstrip() for rank, row in enumerate(rows)]
        lines.append("")
    kinds = sorted({span.action.kind for span in timeline.spans}, key=list(COLOURS).index)
    letters = ", ".join(f"{kind.value} {COLOURS[kind][1]}" for kind in kinds)
    return "\n".join([*lines, textwrap.fill(f"{letters}, . idle; {advice}", width, break_on_hyphens=False)])


def _row(timeline: Timeline, rank: int, cell: int, unit: float, *, labelled: bool) -> str:
    """One rank's line. A computation has as many characters as it takes time, and the shortest ``cell``."""
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
    """The column at which a time is drawn; two times at least ``1 / scale`` apart have different ones."""
    return math.floor(time * scale + 0.5 + 1e-6)


def svg(timeline: Timeline) -> str:
    """The same as a picture: one row a rank, time to the right, numbers are micro-batches."""
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


def _box(span: Span, schedule: Schedule, y: float, scale: float) -> str:
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


def _of(timeline: Timeline, rank: int) -> list[Span]:
    return [span for span in timeline.spans if span.rank == rank]


def _label(span: Span, schedule: Schedule) -> str:
    chunk = f".{span.action.stage // schedule.ranks}" if schedule.virtual_stages > 1 else ""
    return f"{span.action.kind.value}{span.action.microbatch}{chunk}"
