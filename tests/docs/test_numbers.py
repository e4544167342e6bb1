"""Measured numbers have one source, the tables of docs/performance.md and benchmarks/measurements.md; pages that repeat
them name the table.

A repeated number is between two comments: ``<!-- HEADING: COLUMN -->1.10 to 1.20<!-- -->`` is the range of the medians
in this column of the first table under the heading, ``HEADING, WORD: COLUMN`` of the table whose head has this word.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURED = (ROOT / "docs/performance.md", ROOT / "benchmarks/measurements.md")
FOLDERS = ("*.md", "docs/**/*.md", "examples/**/*.md", "plugins/*/README.md")
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(folder))
MARK = re.compile(r"<!-- ([^:>]+): ([^>]+?) -->([^<]*)<!-- -->")
RATIO = re.compile(r"\b\d+\.\d+ (?:to \d+\.\d+ )?times (?:as fast|DDP|FSDP|the rate|its rate|that of)")
MEASURED_THERE = {"performance.md", "tensor_parallel.md", "changelog.md", "CHANGELOG.md"}
"""Pages with tables of their own, and what was true of a release."""
OTHERS = [page for page in PAGES if page.name not in MEASURED_THERE]


def tables(heading: str) -> list[list[list[str]]]:
    """The tables of a section, as rows of cells; the first row is the head."""
    text = "\n".join(page.read_text() for page in MEASURED)
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^##? |\Z)", text, re.M | re.DOTALL)
    found: list[list[list[str]]] = [[]]
    for line in section.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[head, *rows] for head, _, *rows in filter(None, found)]


def range_of(table: str, column: str) -> str:
    """The smallest and the largest median of a column."""
    heading, _, word = table.partition(", ")
    head, *rows = next(found for found in tables(heading) if word in found[0][0])
    medians = [row[head.index(column)].split()[0] for row in rows]
    return f"{min(medians, key=float)} to {max(medians, key=float)}"


def test_repeated_numbers_are_those_of_the_tables():
    found = [(page.name, *mark) for page in PAGES for mark in MARK.findall(page.read_text())]
    assert len(found) >= 2
    assert [mark for mark in found if mark[3] != range_of(mark[1], mark[2])] == []


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_ratio_is_repeated_without_its_table(page):
    assert RATIO.findall(MARK.sub("", page.read_text())) == []


def test_a_number_that_differs_is_found():
    assert range_of("A loop without plugins", "/ DDP") != "1.05 to 1.12"
    assert RATIO.findall("is 1.05 to 1.12 times DDP's rate") == ["1.05 to 1.12 times DDP"]
