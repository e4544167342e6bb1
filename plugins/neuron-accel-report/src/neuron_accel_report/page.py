# SPDX-License-Identifier: Apache-2.0
"""The page of a run report, and a summary for a terminal.

The page is one file that needs no network. Its charts are drawn from thinned values by ``page.js``, a part of it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

from neuron_accel.commands import COLOURS, colour, document, format_bytes, format_seconds, table
from neuron_accel_report.records import Straggler, TrafficRow
from neuron_accel_report.summary import POINTS, ROWS, LateRank, RunSummary, Series, part_names

_STYLE = """
figure { position: relative; margin: 0.5em 0 1.2em; }
figure:focus-visible { outline: 2px solid var(--c0); outline-offset: 2px; }
.grid { stroke: var(--line); } .cross { stroke: var(--grey); stroke-dasharray: 3 3; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .band { opacity: 0.25; }
.area { stroke: var(--paper); stroke-width: 0.5; } .empty { fill: var(--pale); } .hot { fill: var(--warn); }
svg .quiet { fill: var(--grey); } svg .late { font-weight: 700; }
.tip { display: none; position: absolute; z-index: 1; pointer-events: none; max-width: 92%; padding: 0.4em 0.7em;
  font-size: 13px; background: var(--paper); border: 1px solid var(--line); border-radius: 6px;
  box-shadow: 0 2px 8px #0003; }
.swatch { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.45em; border-radius: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2em 1.2em; padding: 0; margin: 0.4em 0; list-style: none; }
.legend button { font: inherit; color: inherit; background: none; border: 1px solid var(--line); border-radius: 6px;
  padding: 0.1em 0.7em; cursor: pointer; } .legend button[aria-pressed=false] { opacity: 0.45; }
.key { vertical-align: middle; margin-right: 0.5em; display: inline-block; }
.log { float: right; font-size: 13px; color: var(--grey); } .log label { margin-left: 0.8em; white-space: nowrap; }
.log select { font: inherit; color: inherit; background: var(--paper); }
.raw { opacity: 0.3; }
.bars { display: grid; grid-template-columns: minmax(5em, max-content) 1fr; gap: 0.3em 0.8em; align-items: center; }
.bars .name { max-width: 16em; } .bar { display: flex; height: 1.35em; align-items: center; min-width: 0; }
.bar i { height: 100%; flex: none; min-width: 1px; }
.bar b { font-weight: 400; white-space: nowrap; font-size: 13px; margin-left: 0.5em; }
.warn { color: var(--warn); }
@media (max-width: 560px) { .bars { grid-template-columns: 1fr; gap: 0; } .bars .name { margin-top: 0.5em; } }
@media print { .log, .tip { display: none; } .bar i, .swatch, svg { print-color-adjust: exact; } }
"""
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 2")  # those of page.js
_LINES = {
    "loss": ("Loss", "", "mean of the ranks", False),
    "grad_norm": ("Gradient norm", "", "before clipping", False),
    "lr": ("Learning rate", "", "of the first parameter group", False),
    "tokens": ("Throughput", "", "tokens of a rank in a second, without checkpoints and evaluation", True),
    "samples": ("Throughput", "", "samples of a rank in a second, without checkpoints and evaluation", True),
    "mfu": ("Utilisation of the instance (MFU)", "%", "", True),
    "seconds": ("Time of a step", "s", "mean of the ranks", True),
    "device_peak": ("Memory of the device", "B", "the largest amount in a step, on the rank with the most", True),
    "host": ("Memory of the process", "B", "resident, on the rank with the most", True),
}
"""Heading, unit, note and whether the axis begins with zero, by name of a series."""
_LOGARITHMIC = ("loss", "grad_norm")
_OBJECTS = ("parameters", "gradients", "optimizer")


# ---- the page --------------------------------------------------------------------------------------------------------
@dataclass
class _Page:
    """What is collected while a page is written: its parts, and the charts that the program draws."""

    names: list[str]
    parts: list[str] = field(default_factory=list)
    charts: list[dict[str, Any]] = field(default_factory=list)
    _colours: dict[str, str] = field(default_factory=dict)

    def colour(self, name: str) -> str:
        """The colour of a part, which no other part, kind of memory or collective has; the first ones are of runs."""
        return self._colours.setdefault(name, colour(len(self.names) + len(self._colours)))

    def legend(self, names: Sequence[str]) -> None:
        entries = [
            f'<li><span class="swatch" style="background:{self.colour(name)}"></span>{escape(name)}</li>'
            for name in names
        ]
        self.parts.append(f'<ul class="legend">{"".join(entries)}</ul>')

    def bars(self, rows: Sequence[tuple[str, Mapping[str, float], str]], names: Sequence[str]) -> None:
        """Stacked bars, a row each, with a total behind it."""
        longest = max((sum(parts.values()) for _, parts, _ in rows), default=0) or 1
        lines = []
        for name, parts, total in rows:
            pieces = "".join(
                f'<i style="width:{66 * parts[part] / longest:.2f}%;background:{self.colour(part)}" '
                f'title="{escape(part)}"></i>'
                for part in names
                if parts.get(part, 0) > 0
            )
            bar = f'<div class="bar">{pieces}<b>{escape(total)}</b></div>'
            lines.append(f'<div class="name">{escape(name)}</div>{bar}')
        self.parts.append(f'<div class="bars">{"".join(lines)}</div>')

    def heading(self, text: str, note: str = "") -> None:
        self.parts.append(f"<h2>{escape(text)}</h2>")
        if note:
            self.parts.append(f'<p class="note">{escape(note[0].upper() + note[1:])}.</p>')

    def chart(self, chart: dict[str, Any], *, choices: str = "") -> None:
        label, choices = escape(chart["title"]), f'<div class="log">{choices}</div>' if choices else ""
        figure = f'<figure data-chart="{len(self.charts)}" tabindex="0" aria-label="{label}">{choices}</figure>'
        self.parts.append(figure)
        self.charts.append(chart)


def page(runs: Sequence[RunSummary]) -> str:
    """Returns a page about one run, or several that are overlaid.

    Args:
        runs: from :func:`~neuron_accel_report.summary.several`.
    """
    names = [run.name for run in runs]
    title = f"Run report: {', '.join(names)}"
    made = _Page(names)
    made.parts += [f"<h1>{escape(title)}</h1>", table(["", *names], facts(runs)), _notes(runs)]
    made.parts.append("<noscript><p class='note'>The charts need JavaScript, the tables do not.</p></noscript>")
    throughput = "tokens" if any("tokens" in run.series for run in runs) else "samples"
    for name in ("loss", throughput, "seconds"):
        _lines(made, runs, name)
    _parts(made, runs)
    _memory(made, runs)
    _traffic(made, runs)
    _ranks(made, runs)
    for name in ("grad_norm", "lr", "mfu"):
        _lines(made, runs, name)
    thinned = max((series.width for run in runs for series in run.series.values()), default=1)
    if thinned > 1:
        note = (
            f"Runs with more than {2 * POINTS} steps are thinned: a point is the mean of up to {thinned} steps, and "
            "the band around a line reaches from the lowest to the highest value."
        )
        made.parts.append(f'<p class="note">{note}</p>')
    script = resources.files("neuron_accel_report").joinpath("page.js").read_text(encoding="utf-8")
    return document(title, made.parts, style=_STYLE, script=script, data={"runs": names, "charts": made.charts})


def _notes(runs: Sequence[RunSummary]) -> str:
    prefix = len(runs) > 1
    lines = [f"{run.name}: {note}" if prefix else note for run in runs for note in run.notes]
    return "".join(f'<p class="warn">{escape(line)}</p>' for line in lines)


def _lines(made: _Page, runs: Sequence[RunSummary], name: str) -> None:
    title, unit, note, zero = _LINES[name]
    series = [
        {"run": number, "width": run.series[name].width, "points": _points(run.series[name])}
        for number, run in enumerate(runs)
        if name in run.series and len(run.series[name])
    ]
    if not series:
        return
    made.heading(title, note)
    if len(runs) > 1:
        made.parts.append(_run_legend(made.names))
    choices = _box("log", "logarithmic") if name in _LOGARITHMIC else ""
    if name == "loss":
        choices += _box("smooth", "smoothed")
        if against := _against(runs, series):
            options = "".join(f"<option>{escape(option)}</option>" for option in ("step", *against))
            choices += f"<label>by <select>{options}</select></label>"
    made.chart(
        {"kind": "lines", "title": title, "unit": unit, "zero": zero, "cut": name == "seconds", "series": series},
        choices=choices,
    )


_AGAINST = {"time": "seconds", "tokens of a rank": "step_tokens"}
"""What losses are drawn by besides steps, with the series that adds up to it."""


def _box(name: str, text: str) -> str:
    return f'<label><input type="checkbox" name="{name}"> {text}</label> '


def _against(runs: Sequence[RunSummary], series: Sequence[dict[str, Any]]) -> list[str]:
    """Adds to series where their points are by time and tokens, as ``at``; returns by which of the two all have."""
    against = [what for what, name in _AGAINST.items() if all(name in runs[each["run"]].series for each in series)]
    for each in series:
        found = {what: runs[each["run"]].series[_AGAINST[what]] for what in against}
        each["at"] = {what: _sums(of, [point[0] for point in each["points"]]) for what, of in found.items()}
    return against


def _sums(series: Series, steps: Sequence[float]) -> list[float]:
    """The sums of a series up to some steps, each that of all steps of its point."""
    totals = series.totals(series.width)
    firsts = sorted(totals)
    sums = [*itertools.accumulate((totals[first] for first in firsts), initial=0.0)]
    return [_round(sums[bisect.bisect_right(firsts, step)]) for step in steps]


def _run_legend(names: Sequence[str]) -> str:
    """Buttons that show and hide a run."""
    entries = []
    for number, name in enumerate(names):
        line = (
            f'<svg class="key" width="30" height="8" aria-hidden="true"><line x1="0" x2="30" y1="4" y2="4" '
            f'stroke="var(--c{number % COLOURS})" stroke-width="3" '
            f'stroke-dasharray="{_DASHES[number % len(_DASHES)]}"/></svg>'
        )
        button = f'<button type="button" data-run="{number}" aria-pressed="true">{line}{escape(name)}</button>'
        entries.append(f"<li>{button}</li>")
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _points(series: Series) -> list[list[float]]:
    return [[step, *map(_round, values)] for step, *values in series.points]


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _parts(made: _Page, runs: Sequence[RunSummary]) -> None:
    names = part_names(runs)
    if not names:
        return
    made.heading("Parts of a step", "mean of the ranks; what is called inside another part counts for itself only")
    made.legend(names)
    for run in runs:
        if run.steps == 0:
            continue
        if len(runs) > 1:
            made.parts.append(f"<h3>{escape(run.name)}</h3>")
        first = run.series["seconds"]
        sums = [run.parts[part].totals(first.width) if part in run.parts else {} for part in names]
        points = [
            [step, *(_round(each.get(step, 0.0) / count) for each in sums)] for step, count in first.counts.items()
        ]
        chart = {"kind": "areas", "title": f"Parts of a step: {run.name}", "unit": "s", "names": names}
        made.chart({**chart, "colours": [*map(made.colour, names)], "width": first.width, "points": points})
    rows = []
    for run in runs:
        parts = {part: run.part_seconds.get(part, 0.0) / max(run.steps, 1) for part in names}
        rows.append((run.name, parts, f"{format_seconds(sum(parts.values()))} a step"))
    made.bars(rows, names)
    made.parts.append(table(["a step on average", *made.names], part_rows(runs)))


def part_rows(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Cells of a table: each part of a step, and its time and share on average in each run."""
    return [
        [
            part,
            *(
                f"{format_seconds(seconds / max(run.steps, 1))}, {seconds / (run.seconds or 1):.1%}"
                for run in runs
                for seconds in [run.part_seconds.get(part, 0.0)]
            ),
        ]
        for part in part_names(runs)
    ]


def memory_parts(run: RunSummary) -> dict[str, int]:
    """Bytes by part of the rank with the most memory; without a count of the device those of objects alone."""
    if run.memory is None:
        return {}
    memory = run.memory[2]
    parts = {name: size for name in _OBJECTS if (size := getattr(memory, name)) is not None}
    device = _of_device(run)
    if device is not None and device > sum(parts.values()):
        parts["activations and other tensors"] = device - sum(parts.values())
    return parts


def _of_device(run: RunSummary) -> int | None:
    """Bytes of the device on the rank with the most memory, where they are counted."""
    if run.memory is None:
        return None
    memory = run.memory[2]
    return memory.device_peak if memory.device_peak is not None else memory.device


def _most_memory(run: RunSummary) -> str | None:
    """The most memory of a rank: of the device, or resident memory of the process."""
    if run.memory is None:
        return None
    device, host = _of_device(run), run.memory[2].host
    if device is not None:
        return f"{format_bytes(device)} of the device, on rank {run.memory[0]}"
    return None if host is None else f"{format_bytes(host)} of the process, on rank {run.memory[0]}"


def _memory(made: _Page, runs: Sequence[RunSummary]) -> None:
    found = {run.name: parts for run in runs if (parts := memory_parts(run))}
    if found:
        names = list(dict.fromkeys(part for parts in found.values() for part in parts))
        made.heading("Memory by part", "of the rank and the step with most memory")
        made.legend(names)
        rows = []
        for run in runs:
            if run.name in found:
                assert run.memory is not None
                at = f"rank {run.memory[0]}, step {run.memory[1]}"
                rows.append((f"{run.name}: {at}", found[run.name], format_bytes(sum(found[run.name].values()))))
        made.bars(rows, names)
        made.parts.append(
            table(
                ["part", *found],
                [
                    [part, *(format_bytes(parts[part]) if part in parts else "-" for parts in found.values())]
                    for part in names
                ],
            )
        )
    for name in ("device_peak", "host"):
        _lines(made, runs, name)


# ---- traffic ---------------------------------------------------------------------------------------------------------
def traffic_rows(rows: Sequence[TrafficRow]) -> list[list[str]]:
    """Cells of a table: group, collective, calls and bytes, predicted and measured, and whether these are equal."""
    verdicts = {None: "-", True: "equal", False: "differs"}
    return [
        [
            row.group,
            row.op,
            "-" if row.predicted_count is None else f"{row.predicted_count:,}",
            f"{row.count:,}",
            "-" if row.predicted_bytes is None else format_bytes(row.predicted_bytes),
            format_bytes(row.bytes),
            verdicts[row.is_equal],
        ]
        for row in sorted(rows, key=lambda row: -row.bytes)
    ]


TRAFFIC_HEAD = ("axes", "collective", "calls predicted", "calls measured", "bytes predicted", "bytes measured", "")


def _traffic(made: _Page, runs: Sequence[RunSummary]) -> None:
    if not any(run.traffic for run in runs):
        return
    rank = min(runs[0].headers)
    made.heading("Traffic by axis", f"sent by rank {rank} in the last step")
    ops = list(dict.fromkeys(row.op for run in runs for row in run.traffic))
    bars = []
    for run in runs:
        before = f"{run.name}, " if len(runs) > 1 else ""
        for group in dict.fromkeys(row.group for row in run.traffic):
            rows = [row for row in run.traffic if row.group == group]
            if any(row.predicted_bytes is not None for row in rows):
                predicted = {row.op: float(row.predicted_bytes or 0) for row in rows}
                bars.append((f"{before}{group}, predicted", predicted, format_bytes(sum(predicted.values()))))
            measured = {row.op: float(row.bytes) for row in rows}
            bars.append((f"{before}{group}, measured", measured, format_bytes(sum(measured.values()))))
    made.legend(ops)
    made.bars(bars, ops)
    for run in runs:
        if run.traffic:
            if len(runs) > 1:
                made.parts.append(f"<h3>{escape(run.name)}</h3>")
            made.parts.append(table(TRAFFIC_HEAD, traffic_rows(run.traffic)))


# ---- ranks -----------------------------------------------------------------------------------------------------------
def late_rows(late: Sequence[LateRank], run: RunSummary) -> list[list[str]]:
    """Cells of a table of the ranks that others waited for."""
    rows = []
    for each in late[:10]:
        place = ", ".join(f"{axis} {index}" for axis, index in each.coordinates.items()) or "-"
        part = max(each.parts, key=lambda part: each.parts[part])
        rows.append(
            [
                str(each.rank),
                each.host,
                place,
                f"{each.steps:,} of {run.steps:,}",
                format_seconds(each.seconds),
                part,
                f"step {each.worst.step}: {format_seconds(each.worst.seconds)} in {each.worst.part}",
            ]
        )
    return rows


def delay_rows(delays: Sequence[Straggler]) -> list[list[str]]:
    """Cells of a table of single delays."""
    return [[f"{each.step:,}", str(each.rank), format_seconds(each.seconds), each.part] for each in delays]


LATE_HEAD = ("rank", "host", "mesh", "late in steps", "total", "mostly in", "worst")


def _ranks(made: _Page, runs: Sequence[RunSummary]) -> None:
    shown = [run for run in runs if len(run.headers) > 1 and run.steps]
    if not shown:
        return
    made.heading(
        "Ranks that others waited for",
        "how much longer than the median rank each rank was busy, without collectives: the maximum over the steps of a "
        "cell. A rank is late in a step if that is over 10 % of its time, and over 10 ms",
    )
    for run in shown:
        if len(shown) > 1:
            made.parts.append(f"<h3>{escape(run.name)}</h3>")
        late = [each.rank for each in run.late]
        ranks = sorted(run.headers)
        if len(ranks) > ROWS:
            order = sorted(ranks, key=lambda rank: (late.index(rank) if rank in late else len(late), rank))
            made.parts.append(
                f'<p class="note">{ROWS} of {len(ranks)} ranks are shown, those that were late most among them.</p>'
            )
            ranks = sorted(order[:ROWS])
        made.chart(_map(run, ranks, late))
        if run.late:
            made.parts.append(table(LATE_HEAD, late_rows(run.late, run)))
            if len(run.late_steps) > len(run.late):
                made.parts.append("<p>The longest delays:</p>")
                made.parts.append(table(("step", "rank", "later by", "in"), delay_rows(run.late_steps)))
        else:
            made.parts.append("<p>No rank was late.</p>")


def _map(run: RunSummary, ranks: Sequence[int], late: Sequence[int]) -> dict[str, Any]:
    width = max(run.step_times[rank].width for rank in ranks)
    cells: dict[int, dict[int, float]] = {}
    for rank in ranks:
        row = cells.setdefault(rank, {})
        for step, _, _, high in run.step_times[rank].points:
            column = step // width * width
            row[column] = max(high, row.get(column, high))
    columns = sorted({column for row in cells.values() for column in row})
    values = [[None if (value := cells[rank].get(c)) is None else _round(value) for c in columns] for rank in ranks]
    # The faintest map is that of a run in which no rank is late; one very long delay does not hide the others.
    limit = max(0.01, 0.1 * (run.mean("seconds") or 0.0))
    peak = max((value for row in values for value in row if value is not None), default=0.0)
    return {
        "kind": "map",
        "title": f"Ranks by step: {run.name}",
        "ranks": list(ranks),
        "late": [rank for rank in ranks if rank in late],
        "columns": columns,
        "width": width,
        "values": values,
        "peak": min(max(peak, limit), 5 * limit),
    }


# ---- what is known of runs, as text ----------------------------------------------------------------------------------
def facts(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Rows of a table with a column for each run; what no run knows is left out."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        header = run.header
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in header.mesh.items() if degree > 1)
        seconds = run.mean("seconds")
        losses = None if run.first_loss is None else f"{run.first_loss:.5g} to {run.last_loss:.5g}"
        compiled = None
        if run.compilations is not None:
            last = "" if run.compiled_in is None else f", the last in step {run.compiled_in}"
            compiled = f"{run.compilations} graphs{last}"
        options = "; ".join(
            f"{plugin}: " + ", ".join(f"{name} {value}" for name, value in given.items())
            for plugin, given in header.options.items()
        )
        others = "".join(f", {name} {version}" for name, version in header.versions.items())
        given = ", ".join(f"{name} {value}" for name, value in header.hyperparameters.items())
        optimizer = f"{header.optimizer}: {given}" if given else header.optimizer
        named = {
            "model": header.model or None,
            "command": header.command or None,
            "commit": header.commit or None,
            "ranks": f"{header.world_size}, {mesh}" if mesh else str(header.world_size),
            "plugins": ", ".join(header.plugins) or "none",
            "options": options or None,
            "optimizer": optimizer or None,
            "samples of a step": None if header.global_batch is None else f"{header.global_batch:,}",
            "gradient accumulation": _number(header.gradient_accumulation_steps),
            "mixed precision": header.mixed_precision or None,
            "seed": None if header.seed is None else str(header.seed),
            "device": f"{header.device}, {header.backend}" + (f", {header.instance}" if header.instance else ""),
            "versions": f"neuron_accel {header.neuron_accel}, torch {header.torch}{others}",
            "parameters": None if header.parameters is None else f"{header.parameters:,}",
            "optimizer steps": f"{run.steps:,}" + ("" if run.ended else ", not ended"),
            "loss, first to last": losses,
            "time of a step": None if seconds is None else f"{format_seconds(seconds)} on average",
            "tokens/s of a rank": _number(run.mean("tokens")),
            "samples/s of a rank": _number(run.mean("samples")),
            "utilisation (MFU)": None if (mfu := run.mean("mfu")) is None else f"{mfu:.1%}",
            "most memory": _most_memory(run),
            "compilations": compiled,
            "late ranks": _late(run) if len(run.headers) > 1 else None,
        }
        for name, value in named.items():
            rows.setdefault(name, []).append("-" if value is None else value)
    return [[name, *values] for name, values in rows.items() if set(values) != {"-"}]


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _late(run: RunSummary) -> str:
    if not run.late:
        return "none"
    first, others = run.late[0], len(run.late) - 1
    steps = "1 step" if first.steps == 1 else f"{first.steps:,} steps"
    more = f"; also {others} other rank{'s' * (others > 1)}" if others else ""
    total, most = format_seconds(first.seconds), format_seconds(first.worst.seconds)
    return f"rank {first.rank} by {total} in {steps}, at most {most}{more}"
