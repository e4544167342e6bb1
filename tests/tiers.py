"""Two tiers of tests: ``nox`` runs the first, ``nox -s full`` both.

``pytest -p tests.tiers --tier first`` leaves out the cases that ``tests/second_tier.txt`` lists, ``--tier second`` runs
only those. A case that is not listed, so every new one, belongs to the first tier.

The list is chosen by what each case executes. ``nox -s tiers`` runs everything in an environment in which each process
that a test starts, ranks and launchers as well, writes down the lines of this package that it entered and the processor
time that it took. ``python -m tests.tiers FOLDER...`` then takes cases until every line, and every composition of
strategies on each kind of ranks, that any case executes is executed: always the case with most that is new for its
time. The others are the second tier.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.line_recorder import Lines

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).parent / "second_tier.txt"
ALWAYS_FIRST = ("tests/unit/",)
"""Cases of a few milliseconds each, which are not worth choosing from."""


# ---- selecting -------------------------------------------------------------------------------------------------------
class Selection:
    """A plugin of pytest that deselects the cases of the other tier.

    Args:
        tier: ``"first"`` or ``"second"``.
    """

    def __init__(self, tier: str) -> None:
        self._second, self._listed = tier == "second", set(LIST.read_text().split("\n"))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if is_listed(item.nodeid, self._listed) == self._second]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen


def is_listed(case: str, listed: set[str]) -> bool:
    """Whether a list names a case, or its function with all of its cases."""
    return case in listed or case.partition("[")[0] in listed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=["first", "second", "full"], default="full", help="which tests (tests/tiers.py)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--tier") != "full":
        config.pluginmanager.register(Selection(config.getoption("--tier")))
    if hasattr(sys, "lines_of_a_test"):
        config.pluginmanager.register(Recording())


# ---- recording -------------------------------------------------------------------------------------------------------
class Recording(logging.Handler):
    """A plugin of pytest that writes down what each case executes, and on which ranks with which strategies."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._compositions: set[str] = set()
        self._lines: Lines = sys.lines_of_a_test  # type: ignore[attr-defined]
        logger = logging.getLogger("neuron_accel.testing")
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        from tests.what_runs import strategies_in

        details = vars(record)
        if "arguments" in details:
            names, size = strategies_in(details["arguments"])
            self._compositions.add(f"{details['backend']}, {details['ranks']}, {size}: {' + '.join(sorted(names))}")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._compositions.clear()
        self._lines.forget()
        try:
            return (yield)
        finally:
            self._lines.report(item.nodeid, self._compositions)


# ---- choosing --------------------------------------------------------------------------------------------------------
@dataclass
class Case:
    """What a case executes.

    Args:
        seconds: processor time of all its processes.
        features: lines as ``"file:number"``, and compositions.
    """

    seconds: float = 0.0
    features: set[str] = field(default_factory=set)


def read(folders: Iterable[Path]) -> dict[str, Case]:
    """What was recorded, by case."""
    cases: defaultdict[str, Case] = defaultdict(Case)
    for path in (path for folder in folders for path in folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            record: dict[str, Any] = json.loads(text)
            if not record["case"]:
                continue  # before the first test
            case = cases[record["case"]]
            case.seconds += record["seconds"]
            case.features |= {f"{file}:{line}" for file, lines in record["lines"].items() for line in lines}
            case.features |= set(record["compositions"])
    return dict(cases)


def choose(cases: Mapping[str, Case], seconds: float = float("inf")) -> set[str]:
    """The first tier: cases until everything that any case executes is executed, or so much time is taken.

    A greedy cover, as of Chvatal, "A Greedy Heuristic for the Set-Covering Problem" (1979)."""
    chosen = {name for name in cases if name.startswith(ALWAYS_FIRST)}
    known = set().union(*(cases[name].features for name in chosen))
    left = {name: case.features - known for name, case in cases.items() if name not in chosen}
    while left:
        best = max(left, key=lambda name: len(left[name]) / (cases[name].seconds + 0.2))
        new = left.pop(best)
        if not new:
            break
        if cases[best].seconds > seconds:
            continue
        seconds -= cases[best].seconds
        chosen.add(best)
        for features in left.values():
            features -= new
    return chosen


def lines_of(second: Iterable[str], first: Iterable[str]) -> list[str]:
    """The list of a tier: a function once, if none of its cases is in the other."""
    others = {name.partition("[")[0] for name in first}
    return sorted(
        {name if function in others else function for name in second for function in [name.partition("[")[0]]}
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tiers", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="what pytest --record-lines wrote")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of processor time for the first tier")
    parser.add_argument("--write", action="store_true", help="write tests/second_tier.txt")
    given = parser.parse_args(arguments)
    cases = read(given.folders)
    first = choose(cases, given.seconds)
    second = set(cases) - first
    everything = set().union(*(case.features for case in cases.values()))
    for title, tier in (("first tier", first), ("full", set(cases))):
        features = set().union(*(cases[name].features for name in tier))
        lines = sum(1 for feature in features if ".py:" in feature)
        print(
            f"{title:12}{len(tier):6} cases {sum(cases[name].seconds for name in tier):8.0f} s of processor time "
            f"{lines:7} lines {len(features) - lines:5} compositions {len(features) / len(everything):6.1%}"
        )
    if given.write:
        LIST.write_text("\n".join(lines_of(second, first)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
