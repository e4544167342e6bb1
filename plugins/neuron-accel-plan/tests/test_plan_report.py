"""The page about layouts: well-formed, complete, and without anything from elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from neuron_accel_plan.layout import LayoutCount
from neuron_accel_plan.memory import PARTS, Moment, Peak
from neuron_accel_plan.published import interval_of
from neuron_accel_plan.report import Entry, _Colours, _timeline, html_report
from neuron_accel_plan.step import Flow, StepCount
from neuron_accel_plan.time import Span, StepTime

FLOWS = tuple(
    Flow(op=op, axis=axis, ranks=2, dtype="bfloat16", messages=1, sent=sent)
    for op, axis, sent in (("all_reduce", "tp", 30 << 20), ("all_gather", "dp", 10 << 20), ("broadcast", "pp", 0))
)


def entry(label: str = "tp2 x dp2 <best>", gib: int = 1, seconds: float = 2.0) -> Entry:
    parts = {part: (index + 1) * gib << 30 for index, part in enumerate(PARTS)}
    step = StepCount(peaks=(Peak(Moment("backward"), parts),), flows=FLOWS, operations=10**12, weights=1)
    required = {name: 0 for name in LayoutCount.__dataclass_fields__ if LayoutCount.__dataclass_fields__[name].init}
    named = {
        "model": "Llama & Co",
        "mesh": label,
        "plugins": ("tensor_parallel",),
        "step": step,
        "instance": "trn1.32xlarge",
        "core_bytes": 16 << 30,
        "extrapolated": True,
    }
    given = {name: named.get(name, value) for name, value in required.items()}
    time = StepTime(
        seconds=seconds,
        low=seconds / 2,
        high=2 * seconds,
        parts={"matrix products": seconds - 0.5, "exposed communication, tp": 0.5},
        sources={"overlap": "assumed (a test)"},
        spans=(
            Span("compute", "forward", 0.0, 1.0),
            Span("compute", "forward", 1.0, 1.2),
            Span("communication", "all_reduce tp", 0.5, 1.5),
            Span("compute", "backward", 1.5, 2.0),
        ),
    )
    return Entry(label, LayoutCount(**given), time)


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def pictures(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_stages_of_a_pipeline_are_drawn_with_every_pass():
    first = entry()
    passes = ((("forward", 0.0, 1.0), ("backward", 3.0, 5.0)), (("forward", 1.0, 2.0), ("backward", 2.0, 4.0)))
    staged = replace(first, counted=replace(first.counted, passes=passes))
    (picture,) = [
        each for each in pictures(html_report([staged])) if each.get("aria-label") == "the stages over a step"
    ]
    titles = [title.text for title in picture.iter("title")]
    assert titles.count("forward, 0 to 1") == titles.count("backward, 3 to 5") == 1
    assert sum(title.startswith(("forward, ", "backward, ")) for title in titles) == 4
    assert "the stages over a step" not in html_report([first])


def test_a_colour_stands_for_one_thing_on_the_page():
    first = entry()
    staged = replace(first, counted=replace(first.counted, passes=((("forward", 0.0, 1.0), ("backward", 1.0, 3.0)),)))
    names: dict[str, set[str]] = {}
    for picture in pictures(html_report([staged])):
        for square in (each for each in picture.iter("rect") if each.get("width") == "11.00"):
            names.setdefault(square.get("fill", ""), set()).add(square[0].text)
    assert len(names) > len(PARTS)
    assert [each for each in names.values() if len(each) > 1] == []


def test_a_page_is_well_formed_and_needs_nothing_else():
    text = html_report([entry(), entry("dp4", gib=2, seconds=1.0), entry("tp4", gib=3, seconds=3.0)])
    page = Page(text)
    assert not page.open
    assert "script" not in page.tags
    assert not re.search(r"https?:|src=|url\(|@import", text)
    assert "Llama &amp; Co on tp2 x dp2 &lt;best&gt;" in text
    for words in ("does NOT fit: 16.00 GiB, of which", "between 1 s and 4 s", "assumed (a test)"):
        assert words in text
    memory, timeline, parts, traffic, frontier = pictures(text)
    titles = [title.text for title in memory.iter("title")]
    assert [part for part in PARTS if f"2: dp4: {part}" not in titles] == []
    bars = {title.text: rect for rect in memory.iter("rect") for title in rect.iter("title")}
    widths = [float(bars[f"2: dp4: {part}"].get("width")) for part in PARTS]
    assert [width / widths[0] for width in widths] == pytest.approx(range(1, len(PARTS) + 1), rel=0.01)
    spans = [title.text for title in timeline.iter("title")]
    assert "forward, 0 ms to 1.2 s" in spans  # neighbours of one kind are one
    assert "all_reduce tp, 500 ms to 1.5 s" in spans
    assert "time of the step: exposed communication, tp" in [title.text for title in parts.iter("title")]
    labels = [text.text for text in traffic.iter("text")]
    assert {"tp (2 ranks)", "30.0 MiB", "dp (2 ranks)"} <= set(labels)
    assert not any("pp" in label for label in labels)
    dots = {circle.find("title").text.split(":")[0]: circle.get("fill") for circle in frontier.iter("circle")}
    assert dots["tp2 x dp2 <best>"] == dots["dp4"] != dots["tp4"]  # the last is worse than the first in both


def test_the_page_has_both_intervals_of_a_time():
    first = entry()
    known = html_report([replace(first, published=interval_of(first.counted, first.time))])
    assert re.search(
        r"by published runs.*between .* for 80% of runs, calibrated on 3 runs of dense models", known, re.DOTALL
    )
    elsewhere = replace(first.counted, instance="trn2.48xlarge")
    unknown = html_report([replace(first, published=interval_of(elsewhere, first.time))])
    assert re.search(r"by published runs.*unknown, ", unknown, re.DOTALL)
    assert "by published runs" not in html_report([first])


def test_one_layout_without_time_has_a_page_too():
    text = html_report([replace(entry(), time=None)])
    assert not Page(text).open
    assert "no time is predicted" in text
    assert len(pictures(text)) == 2


def test_colours_do_not_repeat_on_a_step_with_many_labels():
    spans = tuple(Span("compute", f"label {n}", float(n), n + 1.0) for n in range(20))
    time = StepTime(seconds=20.0, low=20.0, high=20.0, parts={}, sources={}, spans=spans)
    picture = _timeline(time, _Colours())
    bars = {match[2]: match[1] for match in re.finditer(r'fill="([^"]+)"><title>(label \d+), ', picture)}
    assert len(bars) == 20
    assert len(set(bars.values())) == 20
    keys = {match[2]: match[1] for match in re.finditer(r'fill="([^"]+)"><title>(label \d+)</title>', picture)}
    assert keys == bars
