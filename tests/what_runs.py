"""What tests ran, by strategy and kind of ranks: the table of docs/guides/what-runs-where.md is made from this.

``pytest --record-runs FILE`` writes down on how many ranks of which kind each strategy was found to equal one process,
and where checkpoints and the Trainer were tested. ``python -m tests.what_runs --check FILE...`` compares that with the
table and fails if the table says more; ``--write FILE...`` makes the table anew.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "what-runs-where.md"
BEGIN, END = "<!-- made by tests/what_runs.py -->", "<!-- end -->"
COLUMNS = {
    "gloo": "CPU, gloo",
    "xla": "CPU, torch_xla",
    "neuron": "emulated Neuron cores, torch_xla",
    "native": "stand-in for the native device",
    "cuda": "NVIDIA GPU, shared by the ranks",
}
STRATEGIES = {
    "data_parallel": "data parallel",
    "zero1": "ZeRO-1",
    "fully_sharded": "fully sharded",
    "tensor_parallel": "tensor parallel",
    "sequence_parallel": "sequence parallel",
    "pipeline_parallel": "pipeline",
    "activation_checkpointing": "activation checkpointing",
    "flash_attention": "flash attention",
    "chunked_loss": "chunked loss",
}
"""Names of plugins. A run on more data-parallel ranks than one counts for data parallelism, too."""
SUBJECTS = {
    "checkpoints": re.compile("(?<!activation_)checkpoint(?!ing)|resum|reshard"),
    "Trainer": re.compile("trainer"),
}
"""What else is tested, and how its tests are named."""
FOLDERS = {
    "tests/xla/": "xla",
    "tests/neuron/": "neuron",
    "tests/native/": "native",
    "tests/distributed/": "gloo",
    "tests/cuda/": "cuda",
}
Record = dict[str, dict[str, list[int]]]
"""Row to column to numbers of ranks."""


# ---- recording -------------------------------------------------------------------------------------------------------
class Recorder(logging.Handler):
    """A plugin of pytest that listens to what neuron_accel.testing logs.

    Args:
        path: of the file that is written at the end.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.DEBUG)
        self._path = path
        self._found: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self._trained: list[tuple[str, int, set[str], int]] = []
        self._equal = False
        self._of_workers: list[Record] = []
        self._logger = logging.getLogger("neuron_accel.testing")

    def pytest_sessionstart(self) -> None:
        self._logger.addHandler(self)
        self._logger.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        details = vars(record)
        if "arguments" in details:
            names, model_ranks = strategies_in(details["arguments"])
            backend = str(details["backend"]).partition("-")[0]
            self._trained.append((backend, details["ranks"], names, details["ranks"] // max(model_ranks, 1)))
        self._equal |= details.get("equal", False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self._trained, self._equal = [], False
        yield

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" or not report.passed:
            return
        for backend, ranks, names, data in self._trained if self._equal else ():
            if ranks > 1 and backend in COLUMNS:
                plain = data > 1 and names.isdisjoint({"zero1", "fully_sharded"})
                for name in names | ({"data_parallel"} if plain else set()):
                    self._found[name][backend].add(ranks)
        folder = next((kind for start, kind in FOLDERS.items() if report.nodeid.startswith(start)), None)
        for subject, pattern in SUBJECTS.items():
            if folder and pattern.search(report.nodeid):
                self._found[subject][folder] |= {ranks for backend, ranks, _, _ in self._trained if backend == folder}

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._logger.removeHandler(self)
        found = {row: {column: sorted(ranks) for column, ranks in kinds.items()} for row, kinds in self._found.items()}
        if hasattr(session.config, "workeroutput"):  # a process of pytest-xdist
            session.config.workeroutput["runs"] = found
            return
        found = merge([found, *self._of_workers])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers.append(getattr(node, "workeroutput", {}).get("runs", {}))


def strategies_in(arguments: Any) -> tuple[set[str], int]:
    """Names of the built-in plugins that a call on ranks was given, and over how many ranks they shard a model."""
    from neuron_accel.engine.plan.config import load_config
    from neuron_accel.engine.plan.mesh import AxisKind
    from neuron_accel.engine.plan.plugin import StrategyPlugin
    from neuron_accel.errors import NeuronAccelError

    names, size, waiting = set(), 1, [arguments]
    plugins: list[StrategyPlugin] = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, StrategyPlugin):
            plugins.append(value)
            waiting += value.companions()
        elif isinstance(value, Mapping) and "plugins" in value:
            try:
                waiting += load_config({"plugins": value["plugins"]}).plugins
            except NeuronAccelError:
                continue  # a test of what is refused
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
    for plugin in plugins:
        if plugin.spec.name in STRATEGIES:
            names.add(plugin.spec.name)
        for axis in plugin.axes():
            if axis.kind not in (AxisKind.DATA, AxisKind.REPLICA):
                size *= axis.degree
    return names, size


# ---- the table -------------------------------------------------------------------------------------------------------
def merge(records: list[Record]) -> Record:
    """What any of several runs recorded."""
    found: defaultdict[str, defaultdict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for record in records:
        for row, kinds in record.items():
            for column, ranks in kinds.items():
                found[row][column] |= set(ranks)
    return {row: {column: sorted(ranks) for column, ranks in kinds.items()} for row, kinds in found.items()}


def table(record: Record) -> str:
    """Markdown."""
    rows = [(STRATEGIES.get(name, name), record.get(name, {})) for name in (*STRATEGIES, *SUBJECTS)]
    lines = ["| ranks | " + " | ".join(COLUMNS.values()) + " |", "| --- " * (len(COLUMNS) + 1) + "|"]
    for title, kinds in rows:
        cells = [", ".join(map(str, kinds.get(column, []))) or "not run" for column in COLUMNS]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parse(text: str) -> Record:
    """The record that a table was made of."""
    titles = {title: name for name, title in STRATEGIES.items()}
    found: Record = {}
    for line in text.strip().splitlines()[2:]:
        title, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        kinds = {
            column: [int(ranks) for ranks in cell.split(", ")]
            for column, cell in zip(COLUMNS, cells, strict=True)
            if cell != "not run"
        }
        found[titles.get(title, title)] = kinds
    return found


def on_page() -> Record:
    """What the page says."""
    return parse(PAGE.read_text().partition(BEGIN)[2].partition(END)[0])


def more_than(claimed: Record, record: Record, columns: Collection[str]) -> list[str]:
    """What is claimed of these kinds of ranks, and was not recorded.

    A kind of which nothing was recorded could not run on this machine, and its tests were skipped with the reason."""
    ran = {column for kinds in record.values() for column in kinds}
    return [
        f"{STRATEGIES.get(row, row)} on {ranks} ranks of {COLUMNS[column]}"
        for row, kinds in claimed.items()
        for column, numbers in kinds.items()
        if column in columns and column in ran
        for ranks in numbers
        if ranks not in record.get(row, {}).get(column, [])
    ]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.what_runs", description=__doc__)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE", help="what pytest --record-runs wrote")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="fail if the page says more than was run")
    action.add_argument("--write", action="store_true", help="write the table of the page anew")
    parser.add_argument("--kinds", nargs="+", choices=COLUMNS, default=[*COLUMNS], help="kinds of ranks to check")
    given = parser.parse_args(arguments)
    record = merge([json.loads(path.read_text()) for path in given.records])
    if given.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(record)}{END}{rest.partition(END)[2]}")
        return 0
    missing = more_than(on_page(), record, given.kinds)
    for line in missing:
        print(f"docs/guides/what-runs-where.md says {line}: no test ran that", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
