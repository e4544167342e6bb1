# SPDX-License-Identifier: Apache-2.0
"""What ``neuron-accel plan`` prints: a count, the time of a step, a search, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from neuron_accel.commands import format_table, table_width, terminal_width, wrap_words

if TYPE_CHECKING:
    from neuron_accel_plan.changes import Change
    from neuron_accel_plan.layout import LayoutCount
    from neuron_accel_plan.published import Interval
    from neuron_accel_plan.search import Search
    from neuron_accel_plan.time import StepTime


def describe(counted: LayoutCount, width: int) -> str:
    """Returns the count as text of ``width`` columns."""
    from neuron_accel_plan.totals import big

    step, peak = counted.step, counted.step.peak
    lines = [
        f"{counted.model}, {big(counted.parameters)} parameters, as rank {counted.rank} of {counted.mesh}",
        f"plugins: {', '.join(counted.plugins) or 'none'}",
        f"micro-batches of a data-parallel rank in a step: {counted.batch}",
        *([f"bubble of the pipeline: {counted.bubble:.0%} of the time"] if counted.bubble else []),
        "",
        "memory of a rank at the peak of a step",
    ]
    rows = [[part, gib(size), _bar(size, peak.total)] for part, size in peak.parts.items()]
    lines += [*table(["part", "GiB", "share"], [*rows, ["total", gib(peak.total), ""]]), f"reached in: {peak.moment}"]
    if counted.core_bytes is not None:
        share = peak.total / counted.core_bytes
        core = gib(counted.core_bytes).strip()
        lines.append(
            f"{share:.0%} of the {core} GiB of a core, {gib(counted.reserve).strip()} GiB of which are reserved"
        )
    lines += ["", "sent by a rank in a step"]
    flows = sorted(step.flows, key=lambda flow: -flow.sent)
    approximate = "~" if counted.extrapolated else ""
    rows = [
        [f.axis, f"{f.ranks}", f.op, f.dtype, f"{approximate}{f.messages}", _mib(f.sent)] for f in flows if f.sent > 0
    ]
    head = ["axis", "ranks", "collective", "dtype", "messages", "MiB"]
    lines += table(head, rows) if rows else ["nothing"]
    lines += ["", f"operations of a rank in a step: {step.operations / 1e12:,.2f} T"]
    lines.append("(of matrix products, convolutions and attention; a multiply and an add are two)")
    if counted.work > 1.005:
        lines += wrap_words(
            f"{counted.work:.2g} times those of the model where a token visits only its experts: padding of experts, "
            "recomputation, and what several ranks compute",
            width,
        )
    if step.uncounted:
        lines += ["operations without a known number, not counted:", f"  {', '.join(step.uncounted)}"]
    if counted.extrapolated:
        lines += wrap_words(
            f"extrapolated to {counted.layers} blocks from models of few; messages are approximate, since the size of "
            "buckets depends on that of the model: exact with --full-depth",
            width,
        )
    return "\n".join(lines)


def describe_verdict(counted: LayoutCount, chosen: int | None, width: int) -> list[str]:
    """Returns the last lines: what the compiler may refuse, the number of micro-batches if it was ``chosen``, and in
    one line whether the layout fits."""
    lines: list[str] = []
    if counted.core_bytes is None:
        return lines
    for finding in counted.findings:
        begin = "does NOT compile: " if finding.certain else "may not compile: "
        lines += wrap_words(f"{begin}{finding}; see `neuron-accel precompile --check`", width)
    if chosen is not None:
        lines.append(f"{chosen} micro-batches are chosen, the fewest that fit (--accumulation)")
    share, core = counted.step.peak.total / counted.core_bytes, gib(counted.core_bytes).strip()
    return [*lines, f"{counted.verdict}: {share:.0%} of the {core} GiB of a core of {counted.instance}"]


def brief(counted: LayoutCount, step: str) -> str:
    """Returns a sentence that says whether a rank fits a core; ``step`` names the step and the rank."""
    from neuron_accel_plan.layout import FITS, TOO_LARGE

    assert counted.core_bytes is not None
    peak, core = counted.step.peak, counted.core_bytes
    what = f"{peak.total / 2**30:.3g} GiB at the peak of {step}"
    largest = max(peak.parts, key=lambda part: peak.parts[part])
    most = f"most of it is {largest}, {peak.parts[largest] / 2**30:.3g} GiB"
    size = f"the {core / 2**30:.3g} GiB of a core of {counted.instance}"
    reserve = f"{counted.reserve / 2**30:.3g} GiB for the runtime and compiled graphs"
    if counted.verdict == FITS:
        return f"memory: {what}, {peak.total / core:.0%} of {size}, which leaves {reserve}"
    if counted.verdict == TOO_LARGE:
        return f"WARNING: this run does NOT fit: {what}, more than {size}; {most}"
    return (
        f"WARNING: this run is tight: {what}, {peak.total / core:.0%} of {size}, which does not leave {reserve}; {most}"
    )


def describe_changes(changes: Sequence[Change]) -> list[str]:
    """Returns lines with the changes of a layout that need less memory."""
    rows = [[change.what, gib(change.count.step.peak.total), change.count.verdict or ""] for change in changes[:6]]
    return ["what needs less memory, each counted", *table(["with", "GiB", ""], rows)]


def describe_time(
    predicted: StepTime, tokens: int, *, why: bool = False, published: Interval | None = None
) -> list[str]:
    """Returns lines with the time of a step of this number of tokens (0: unknown), and with ``why`` the constants."""
    lines = [f"predicted time of a step: {_duration(predicted.seconds)}"]
    lines.append(f"by its assumptions between {_duration(predicted.low)} and {_duration(predicted.high)}")
    if published is not None:
        lines += describe_published(published)
    slow, fast = tokens / predicted.high, tokens / predicted.low
    if tokens:
        lines.append(f"{tokens / predicted.seconds:,.0f} tokens/s over all ranks ({slow:,.0f} to {fast:,.0f})")
    rows = [
        [part, _duration(seconds), _bar(seconds, predicted.seconds)]
        for part, seconds in sorted(predicted.parts.items(), key=lambda item: -item[1])
    ]
    lines += table(["spent on", "time", "share"], rows)
    if not why:
        return [*lines, "(--why prints the constants, and where each is from)"]
    by_source: dict[str, list[str]] = {}
    for what, source in predicted.sources.items():
        by_source.setdefault(source, []).append(what)
    lines.append("constants")
    for source, whats in by_source.items():
        lines += textwrap.wrap(
            f"{', '.join(whats)}: {source}", terminal_width() - 1, initial_indent="  ", subsequent_indent="    "
        )
    return lines


def describe_published(interval: Interval) -> list[str]:
    """Returns lines with the interval that published runs give, or why they give none."""
    colon = ":" if interval.comparison is None else ""
    return wrap_words(f"by published runs{colon} {published_text(interval)}", terminal_width())


def published_text(interval: Interval) -> str:
    """Returns the interval that published runs give, or why they give none, as part of a sentence."""
    from neuron_accel_plan.published import CALIBRATING, LEVEL

    if interval.comparison is None:
        return f"unknown, {interval.why}"
    tested, inside = len(interval.comparison.tested), interval.comparison.inside
    bounds = f"{_duration(interval.low)} and {_duration(interval.high)}"
    return (
        f"between {bounds} for {LEVEL:.0%} of runs, calibrated on {CALIBRATING} runs of dense models; {inside} of "
        f"{tested} other published runs are inside"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def describe_search(found: Search, *, why: bool = False, published: Interval | None = None) -> str:
    """Returns the layouts that were found as a table, with the interval of the first by ``published`` runs, and with
    ``why`` the reasons of all others."""
    from neuron_accel_plan.totals import big

    lines = [
        f"{found.model}, {big(found.parameters)} parameters, on {found.instances} x {found.instance}",
        f"the {len(found.best)} fastest that fit; {len(found.slower)} are slower, {len(found.ruled_out)} are ruled out"
        + ("" if why else " (--why says why)"),
    ]
    lines += wrap_words(_left(found), terminal_width()) if found.left and found.best else []
    lines.append("")
    rows = []
    for number, ranked in enumerate(found.best, start=1):
        count, links = ranked.count, ranked.count.by_link()
        price = found.price(ranked.time.seconds)
        speeds = [
            f"{found.tokens / seconds:,.0f}" for seconds in (ranked.time.seconds, ranked.time.high, ranked.time.low)
        ]
        rows.append(
            [
                str(number),
                count.mesh,
                gib(count.step.peak.total).strip(),
                f"{ranked.time.seconds:.3g}",
                f"{speeds[0]} ({speeds[1]} to {speeds[2]})",
                f"{count.bubble:.0%}",
                *(f"{size / 2**30:,.2f}" for size in links.values()),
                *([] if price is None else [f"{price:,.2f}"]),
            ]
        )
    head = ["", "mesh", "GiB", "s a step", "tokens/s", "bubble", "GiB inside", "GiB between"]
    if found.best:
        lines += table([*head, *([] if found.price_per_hour is None else ["USD for 1M"])], rows)
        lines += ["", "GiB inside and between machines: sent by a rank in a step, by NeuronLink and by EFA", ""]
        for number, ranked in enumerate(found.best, start=1):
            sent: dict[str, int] = {}
            for flow in ranked.count.step.flows:
                sent[flow.axis] = sent.get(flow.axis, 0) + flow.sent
            axes = ", ".join(f"{axis} {size / 2**20:,.0f}" for axis, size in sent.items() if size >> 20)
            lines += [f"{number}: {ranked.layout}", f"   sent by axis, MiB: {axes or 'nothing'}"]
    else:
        lines.append("no layout fits: more instances, or an instance with more memory, are needed")
    if published is not None:
        lines += ["", f"the first takes {_duration(found.best[0].time.seconds)} a step", *describe_published(published)]
    for finding in found.best[0].count.findings if found.best else ():
        lines += wrap_words(f"may not compile: {finding}", terminal_width())
    if why:
        lines += ["", "slower"]
        lines += [
            f"  {each.layout}: {_duration(each.seconds)}{' or more' * (not each.counted)}" for each in found.slower
        ]
        if found.left:
            lines += ["", "left", *(f"  {each.layout}: {_duration(each.seconds)} or more" for each in found.left)]
        lines += ["", "ruled out", *(f"  {ruled.layout}: {ruled.reason}" for ruled in found.ruled_out)]
    return "\n".join(lines)


def _left(found: Search) -> str:
    """A sentence on the layouts that a search with a limit of time did not come to."""
    number, more = len(found.left), found.at_most_faster
    text = f"{number} {'layouts are' if number > 1 else 'layout is'} left, since the time of the search was over "
    text += "(--within)"
    if more is None:
        return f"{text}: nothing is known of their time"
    if not more:
        return f"{text}, and not faster than the first"
    return f"{text}, at most {more:.1%} faster than the first: {_duration(found.left[0].seconds)} a step"


def table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    """Returns the lines of a table."""
    return format_table(head, list(rows), table_width()).split("\n")


def _bar(size: float, total: float) -> str:
    return f"{'#' * round(24 * size / total)} {size / total:.0%}" if total else ""


def gib(size: int) -> str:
    """Returns bytes in GiB, of eight columns."""
    return f"{size / 2**30:8.2f}" if size < 100 << 30 else f"{size / 2**30:8.1f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.2f}"
