"""What a run of tests ends with: processor time by suite, and what was skipped, a line for each kind.

``pytest -p tests.summary`` prints both. Processor time, of the user and of the system, is that of a process of tests
and of all that it has started: unlike wall time it hardly depends on how busy a machine is, so the time of the tests
is budgeted in it. ``--shuffle SEED`` runs files in an order drawn from the seed, so that no test comes to depend on
another file.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable
from itertools import groupby
from typing import Any, NamedTuple

import psutil
import pytest

KINDS = {
    "torch_xla": "torch_xla is not installed: nox -s xla",
    "CUDA": "no NVIDIA GPU that torch sees: nox -s cuda",
    "[Cc]hrom": "no browser: apt-get install chromium chromium-driver",
    "Ray": "Ray is not installed: nox -s ray",
    "[Ss]lurm": "Slurm is not installed: nox -s slurm",
    "moto|s3fs": "no S3 server: nox -s storage",
    "^opted out|^composition|^the plugin owns": "a check of the conformance kit that does not apply to the plugin",
}
"""Patterns of reasons, and what is printed for all of their cases."""


class Seconds(NamedTuple):
    """Processor time.

    Args:
        user, system: seconds.
    """

    user: float = 0.0
    system: float = 0.0


def seconds_so_far() -> Seconds:
    """What this process, those that it has started, and theirs have taken."""
    user = system = 0.0
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        try:
            found = process.cpu_times()
        except psutil.Error:
            continue  # it has ended, and is counted by the one that has waited for it
        user += found.user + found.children_user
        system += found.system + found.children_system
    return Seconds(user, system)


def suite_of(case: str) -> str:
    """The suite of a case: ``tests/unit``, or ``plugins/neuron-accel-lora``."""
    return "/".join(case.split("/")[:2])


def kind_of(reason: str) -> str:
    """What is printed for a reason to skip."""
    return next((text for pattern, text in KINDS.items() if re.search(pattern, reason)), reason)


def shuffled(cases: Iterable[pytest.Item], seed: int) -> list[pytest.Item]:
    """Cases in the order of their files, and files in an order drawn from the seed."""
    files = [list(group) for _, group in groupby(cases, key=lambda case: case.nodeid.partition("::")[0])]
    random.Random(seed).shuffle(files)
    return [case for file in files for case in file]


class Summary:
    """A plugin of pytest, in each process of tests."""

    def __init__(self) -> None:
        self._before = seconds_so_far()
        self._taken: defaultdict[str, Seconds] = defaultdict(Seconds)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            if nextitem is None or suite_of(nextitem.nodeid) != suite_of(item.nodeid):
                now = seconds_so_far()
                self._add(suite_of(item.nodeid), now.user - self._before.user, now.system - self._before.system)
                self._before = now

    def _add(self, suite: str, user: float, system: float) -> None:
        taken = self._taken[suite]
        self._taken[suite] = Seconds(taken.user + user, taken.system + system)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
            session.config.workeroutput["seconds"] = {suite: tuple(taken) for suite, taken in self._taken.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for suite, taken in getattr(node, "workeroutput", {}).get("seconds", {}).items():
            self._add(suite, *taken)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = Counter(kind_of(reason_of(report)) for report in terminalreporter.getreports("skipped"))
        if skipped:
            terminalreporter.section("skipped")
            for kind, count in skipped.most_common():
                terminalreporter.write_line(f"{count:6}  {kind}")
        terminalreporter.section("processor seconds: user, system")
        total = Seconds(*(sum(taken[i] for taken in self._taken.values()) for i in (0, 1)))
        for suite, taken in [*sorted(self._taken.items(), key=lambda each: -sum(each[1])), ("total", total)]:
            terminalreporter.write_line(f"{taken.user:8.0f} {taken.system:6.0f}  {suite}")


def reason_of(report: Any) -> str:
    """Why a case or a file was skipped."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return str(text).removeprefix("Skipped: ")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files in a random order (tests/summary.py)")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        items[:] = shuffled(items, seed)


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption("--shuffle")
    return None if seed is None else f"files in a random order: --shuffle {seed}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Summary())
