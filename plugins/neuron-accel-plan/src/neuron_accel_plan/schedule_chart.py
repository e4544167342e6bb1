# SPDX-License-Identifier: Apache-2.0
"""Charts of pipeline schedules for the terminal and as SVG."""

from __future__ import annotations

import math
import textwrap
from xml.sax.saxutils import escape

from neuron_accel_plan.timeline import NAMES, Kind, Schedule, TimedAction, Timeline, in_flight

COLOURS = {
    Kind.FORWARD: "#4c78a8",
    Kind.BACKWARD: "#f58518",
    Kind.BACKWARD_INPUT: "#eeca3b",
    Kind.BACKWARD_WEIGHT: "#72b7b2",
}
"""Fill colour of each kind of computation. The colours also differ in lightness."""

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
    letters = ", ".join(f"{kind.value} {NAMES[kind]}" for kind in kinds)
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
    colour, name = COLOURS[span.action.kind], NAMES[span.action.kind]
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
        colour, name = COLOURS[kind], NAMES[kind]
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20:g}" y="{y + 12:g}">{escape(name)}</text>')
        x += 40 + 7 * len(name)
    return parts


def _of(timeline: Timeline, rank: int) -> list[TimedAction]:
    return [span for span in timeline.spans if span.rank == rank]


def _label(span: TimedAction, schedule: Schedule) -> str:
    chunk = f".{span.action.stage // schedule.ranks}" if schedule.virtual_stages > 1 else ""
    return f"{span.action.kind.value}{span.action.microbatch}{chunk}"
