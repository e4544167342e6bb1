# SPDX-License-Identifier: Apache-2.0
"""A page that shows what layouts need: memory by part, the step over time, traffic by axis, time against memory.

The page is one file, with pictures as inline SVG and without scripts: it needs no network and no library.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from neuron_accel.commands import colour, document, format_bytes, format_seconds, pairs, table
from neuron_accel_plan.layout import LayoutCount
from neuron_accel_plan.memory import PARTS
from neuron_accel_plan.plan_text import published_text
from neuron_accel_plan.published import Interval
from neuron_accel_plan.time import Span, StepTime

_WIDTH, _LEFT, _RIGHT, _ROW = 960, 190, 90, 30
_STYLE = """
svg { width: 100%; height: auto; }
@media screen and (max-width: 640px) { svg { width: 960px; } .picture { overflow-x: auto; } }
"""


@dataclass(frozen=True)
class Entry:
    """A layout in a report.

    Args:
        label: what the layout is called.
        counted: what it needs.
        time: the predicted time of its step; None without an instance or a calibration.
        published: what published runs say of that time; None if it is not of an instance's own constants.
    """

    label: str
    counted: LayoutCount
    time: StepTime | None = None
    published: Interval | None = None


class _Colours(dict[str, str]):
    """The colours of a page, by what they stand for: in all pictures the same."""

    def __missing__(self, name: str) -> str:
        self[name] = colour(len(self))
        return self[name]


def html_report(entries: Sequence[Entry]) -> str:
    """Returns a page about layouts of one model; the first is shown in detail, all are compared.

    Args:
        entries: one layout or more.
    """
    first = entries[0]
    counted, time = first.counted, first.time
    title, colours = f"{counted.model} on {counted.mesh}", _Colours()
    body = [f"<h1>{escape(title)}</h1>", _facts(first)]
    if len(entries) > 1:
        body += [
            "<h2>Layouts</h2>",
            _layouts(entries),
            '<p class="note">The numbers above and below are those of the first layout.</p>',
        ]
    body += ["<h2>Memory of a rank at the peak of a step</h2>", _memory(entries, colours)]
    body.append("<h2>A step over time</h2>")
    if time is None:
        body.append('<p class="note">No instance or calibration was given, so that no time is predicted.</p>')
    else:
        body += [_timeline(time, colours), _parts(time.parts, time.seconds, colours)]
        if counted.extrapolated:
            body.append(
                '<p class="note">The picture shows the few blocks that were run; the times in the bar below it '
                "are those of all blocks.</p>"
            )
    if counted.passes:
        body += ["<h2>The stages of the pipeline</h2>", _stages(counted, colours)]
    body += ["<h2>Sent by a rank in a step</h2>", _traffic(counted, colours)]
    if len(entries) > 1:
        body += ["<h2>Time against memory</h2>", _frontier(entries)]
    if time is not None:
        rows = [(what, source) for what, source in time.sources.items()]
        body += ["<h2>Constants of the prediction</h2>", pairs(rows)]
    return document(title, body, style=_STYLE)


def _facts(entry: Entry) -> str:
    counted, time = entry.counted, entry.time
    rows = [
        ("plugins", ", ".join(counted.plugins) or "none"),
        ("parameters", f"{counted.parameters:,}"),
        ("batch of a data-parallel rank", counted.batch),
        ("operations of a rank in a step", f"{counted.step.operations / 1e12:,.2f} T"),
        ("memory", f"{format_bytes(counted.step.peak.total)}, reached in {counted.step.peak.moment}"),
    ]
    if counted.core_bytes is not None:
        reserve = f"of which {format_bytes(counted.reserve)} are reserved"
        rows.append(
            (f"a core of {counted.instance}", f"{counted.verdict}: {format_bytes(counted.core_bytes)}, {reserve}")
        )
    if time is not None:
        rows += [
            ("predicted time of a step", format_seconds(time.seconds)),
            ("by its assumptions", f"between {format_seconds(time.low)} and {format_seconds(time.high)}"),
        ]
    if entry.published is not None:
        rows.append(("by published runs", published_text(entry.published)))
    return pairs(rows)


def _layouts(entries: Sequence[Entry]) -> str:
    head = ("", "mesh", "memory of a rank", "time of a step", "strategies")
    rows = []
    for number, entry in enumerate(entries, start=1):
        time = "" if entry.time is None else format_seconds(entry.time.seconds)
        memory = format_bytes(entry.counted.step.peak.total)
        rows.append((str(number), entry.counted.mesh, memory, time, entry.label))
    return table(head, rows)


# ---- pictures --------------------------------------------------------------------------------------------------------
def _svg(height: float, parts: Iterable[str], label: str) -> str:
    inside = "".join(parts)
    svg = f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{inside}</svg>'
    return f'<div class="picture">{svg}</div>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.1):.2f}" height="{height:g}" fill="{fill}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _legend(names: Sequence[str], colours: _Colours, y: float) -> list[str]:
    found, x = [], float(_LEFT)
    for name in names:
        width = 26 + 7 * len(name)
        if x + width > _WIDTH:
            x, y = float(_LEFT), y + 18
        found += [_rect(x, y, 11, 11, colours[name], name), _text(x + 16, y + 10, name)]
        x += width
    return found


def _legend_height(names: Sequence[str]) -> int:
    return 18 * (1 + sum(26 + 7 * len(name) for name in names) // (_WIDTH - _LEFT - 60)) + 8


def _bars(
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    names: Sequence[str],
    label: str,
    colours: _Colours,
    mark: float = 0,
) -> str:
    """Stacked bars, one row each, with a total behind it and a line at ``mark``."""
    longest = max([mark, *(sum(parts.values()) for _, parts, _ in rows)]) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    found, y = [], 4.0
    for name, parts, total in rows:
        x = float(_LEFT)
        found.append(_text(_LEFT - 8, y + 16, _short(name), "end"))
        for part in names:
            size = parts.get(part, 0.0) * scale
            if size > 0:
                found.append(_rect(x, y, size, _ROW - 8, colours[part], f"{name}: {part}"))
            x += size
        found.append(_text(x + 6, y + 16, total))
        y += _ROW
    if mark:
        at = _LEFT + mark * scale
        found.append(f'<path d="M{at:.1f} 0V{y:.1f}" stroke="var(--warn)" stroke-dasharray="4 3" fill="none"/>')
    return _svg(y + _legend_height(names) + 6, [*found, *_legend(names, colours, y + 6)], label)


def _short(name: str) -> str:
    return name if len(name) <= 27 else name[:26] + "…"


def _memory(entries: Sequence[Entry], colours: _Colours) -> str:
    shown = entries[:12]
    names = [f"{number}: {entry.counted.mesh}" for number, entry in enumerate(shown, start=1)]
    names = names if len(shown) > 1 else [shown[0].counted.mesh]
    rows = [
        (name, entry.counted.step.peak.parts, format_bytes(entry.counted.step.peak.total))
        for name, entry in zip(names, shown, strict=True)
    ]
    core = shown[0].counted.core_bytes or 0
    picture = _bars(rows, PARTS, "memory by part", colours, core)
    return picture + (f'<p class="note">The line is the {format_bytes(core)} of a core.</p>' if core else "")


def _timeline(time: StepTime, colours: _Colours) -> str:
    """Lanes of a rank: what it computes, and what travels meanwhile."""
    spans = time.spans
    end = max((span.end for span in spans), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - 20) / end
    labels = sorted({span.label for span in spans}, key=[span.label for span in spans].index)
    found = []
    for row, lane in enumerate(("compute", "communication")):
        y = 4 + row * (_ROW + 6)
        found.append(_text(_LEFT - 8, y + 18, lane, "end"))
        found.append(_rect(_LEFT, y, end * scale, _ROW - 2, "var(--pale)", "idle"))
        for span in _merged([span for span in spans if span.lane == lane], 0.25 / scale):
            title = f"{span.label}, {format_seconds(span.start)} to {format_seconds(span.end)}"
            x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
            found.append(_rect(x, y, width, _ROW - 2, colours[span.label], title))
    y = 4 + 2 * (_ROW + 6)
    found += [_text(_LEFT, y + 8, "0"), _text(_WIDTH - 20, y + 8, format_seconds(end), "end")]
    return _svg(y + 18 + _legend_height(labels), [*found, *_legend(labels, colours, y + 18)], "the step over time")


def _stages(counted: LayoutCount, colours: _Colours) -> str:
    """A lane for each stage: what its ranks compute over a step."""
    end = max(end for passes in counted.passes for _, _, end in passes)
    scale = (_WIDTH - _LEFT - 20) / end
    labels = list(dict.fromkeys(label for passes in counted.passes for label, _, _ in passes))
    height = 22 if len(counted.passes) <= 16 else 8
    found, y = [], 4.0
    for stage, passes in enumerate(counted.passes):
        found.append(_rect(_LEFT, y, end * scale, height - 2, "var(--pale)", "idle"))
        for label, start, stop in passes:
            width = (stop - start) * scale
            title, edge = f"{label}, {start:g} to {stop:g}", min(1.0, width / 8)
            found.append(_rect(_LEFT + start * scale, y, width - edge, height - 2, colours[label], title))
        if height > 10 or stage % 4 == 0:
            found.append(_text(_LEFT - 8, y + height / 2 + 4, f"stage {stage}", "end"))
        y += height
    note = (
        f"The ranks wait for {counted.bubble:.0%} of the time. Passes of all stages are drawn equally long, a backward "
        "pass twice as long as a forward pass, and transfers take no time."
    )
    picture = _svg(y + _legend_height(labels) + 8, [*found, *_legend(labels, colours, y + 8)], "the stages over a step")
    return f'{picture}<p class="note">{note}</p>'


def _merged(spans: Sequence[Span], gap: float) -> list[Span]:
    """Spans of a lane; those of one label that are less than ``gap`` seconds apart are one."""
    found: list[Span] = []
    for span in spans:
        if found and found[-1].label == span.label and span.start - found[-1].end < gap:
            found[-1] = Span(span.lane, span.label, found[-1].start, max(found[-1].end, span.end))
        elif span.end > span.start:
            found.append(span)
    return found


def _parts(parts: Mapping[str, float], total: float, colours: _Colours) -> str:
    names = sorted(parts, key=lambda part: -parts[part])
    return _bars([("time of the step", parts, format_seconds(total))], names, "what the time is spent on", colours)


def _traffic(counted: LayoutCount, colours: _Colours) -> str:
    by_axis: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for flow in counted.step.flows:
        by_axis[f"{flow.axis} ({flow.ranks} ranks)"][flow.op] += flow.sent
    sent = {axis: ops for axis, ops in by_axis.items() if sum(ops.values())}
    if not sent:
        return '<p class="note">Nothing.</p>'
    names = sorted({op for ops in sent.values() for op in ops})
    rows = [(axis, ops, f"{sum(ops.values()) / 2**20:,.1f} MiB") for axis, ops in sent.items()]
    return _bars(sorted(rows, key=lambda row: -sum(row[1].values())), names, "traffic by axis", colours)


def _ticks(most: float, base: int) -> list[float]:
    """At most five round numbers up to ``most``: multiples of a power of ``base``."""
    step = float(base) ** math.floor(math.log(most / 5, base))
    step *= next(times for times in (1, 2, 5, 10) if most / (step * times) <= 5)
    return [step * number for number in range(1, int(most / step) + 1)]


def _frontier(entries: Sequence[Entry]) -> str:
    """Layouts by memory and time; the Pareto-optimal ones are joined by a line."""
    points = [(e.counted.step.peak.total, e.time.seconds, e) for e in entries if e.time is not None]
    if not points:
        return '<p class="note">No time is predicted.</p>'
    height, bottom = 320, 280
    most = max([*(memory for memory, _, _ in points), entries[0].counted.core_bytes or 0]) * 1.05
    slowest = max(time.high for e in entries if (time := e.time)) * 1.05

    def place(memory: float, seconds: float) -> tuple[float, float]:
        return _LEFT / 2 + memory / most * (_WIDTH - _LEFT / 2 - 40), bottom - seconds / slowest * (bottom - 20)

    left, right = place(0, 0)[0], place(most, 0)[0]
    found = [f'<path d="M{left:.1f} 10V{bottom}H{right:.1f}" stroke="var(--grey)" fill="none"/>']
    found += [_text(right, bottom + 30, "memory of a rank", "end"), _text(left + 6, 18, "time of a step")]
    for memory in _ticks(most, 2):
        found.append(_text(place(memory, 0)[0], bottom + 16, format_bytes(memory), "middle"))
    for seconds in _ticks(slowest, 10):
        found.append(_text(left - 6, place(0, seconds)[1] + 4, format_seconds(seconds), "end"))
    core = entries[0].counted.core_bytes
    if core:
        x = place(core, 0)[0]
        found.append(f'<path d="M{x:.1f} 10V{bottom}" stroke="var(--warn)" stroke-dasharray="4 3" fill="none"/>')
        found.append(_text(x - 4, 22, "a core", "end"))
    best = [p for p in points if not any(q[0] <= p[0] and q[1] <= p[1] and q[:2] != p[:2] for q in points)]
    line = " ".join(
        "{:.1f},{:.1f}".format(*place(memory, seconds)) for memory, seconds, _ in sorted(best, key=lambda p: p[0])
    )
    found.append(f'<polyline points="{line}" fill="none" stroke="var(--c0)"/>')
    for number, (memory, seconds, entry) in enumerate(points, start=1):
        assert entry.time is not None
        x, y = place(memory, seconds)
        top, low = place(memory, entry.time.high)[1], place(memory, entry.time.low)[1]
        found.append(f'<path d="M{x:.1f} {top:.1f}V{low:.1f}" stroke="var(--c6)" fill="none"/>')
        title = f"{entry.label}: {format_bytes(memory)}, {format_seconds(seconds)}"
        found += [_text(x + 7, y - 5, str(number))] if len(points) > 1 else []
        fill = colour(0 if (memory, seconds, entry) in best else 6)
        found.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"><title>{escape(title)}</title></circle>')
    return _svg(height, found, "time against memory")
