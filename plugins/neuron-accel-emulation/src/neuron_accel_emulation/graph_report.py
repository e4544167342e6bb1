# SPDX-License-Identifier: Apache-2.0
"""Checks recorded graphs: each graph by itself, and differences between ranks and between steps.

The graphs are recorded by neuron_accel (``backends/graph_recorder.py``), where :data:`RECORD_GRAPHS` names a folder.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from neuron_accel import Instance
from neuron_accel.errors import UsageError
from neuron_accel_emulation.graph_rules import COLLECTIVES, Finding, check_module, partitions, source_of
from neuron_accel_emulation.hlo import Instruction, Module, read_module
from neuron_accel_emulation.hlo_memory import LiveBytes, live_bytes

RECORD_GRAPHS = "NEURON_ACCEL_RECORD_GRAPHS"
"""Environment variable with the folder to which ranks of XLA write their graphs."""


@dataclass(frozen=True)
class Execution:
    """One execution of recorded operations on a rank.

    Args:
        graph: hash of the graph; None if this rank had recorded no operations, while another one had.
        ranks: the ranks that have to execute the same graph.
        apart: number of graphs compiled so far outside of step boundaries.
    """

    graph: str | None
    ranks: tuple[int, ...]
    apart: int


@dataclass(frozen=True)
class Graph:
    """A graph and its executions.

    Args:
        number: number in the order of first executions, from 1.
        name: its hash.
        module: the graph.
        ranks: the ranks that executed it.
        runs: number of executions on each of them.
    """

    number: int
    name: str
    module: Module = field(repr=False)
    ranks: tuple[int, ...]
    runs: int

    @property
    def instructions(self) -> int:
        """Number of HLO instructions; the compiler generates many device instructions from each."""
        return sum(1 for _ in self.module.instructions)

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return sum(1 for _, one in self.module.instructions if one.opcode in COLLECTIVES)

    @cached_property
    def memory(self) -> LiveBytes:
        """An estimate of the memory that the graph needs."""
        return live_bytes(self.module)


@dataclass(frozen=True)
class GraphReport:
    """The recorded graphs of a run and the findings about them.

    Args:
        ranks: number of ranks.
        graphs: the executed graphs, in the order of first executions.
        findings: errors, then warnings.
        instance: the instance whose limits were checked; None: no limits were checked.
        lnc: number of physical cores in a logical core.
    """

    ranks: int
    graphs: tuple[Graph, ...]
    findings: tuple[Finding, ...]
    instance: Instance | None = None
    lnc: int | None = None

    def __repr__(self) -> str:
        warnings = len(self.findings) - len(self.errors)
        return (
            f"<{type(self).__name__}: {len(self.graphs)} graphs of {self.ranks} ranks; {len(self.errors)} errors, "
            f"{warnings} warnings>"
        )

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of level "error"."""
        return tuple(finding for finding in self.findings if finding.level == "error")

    def to_json(self) -> dict[str, Any]:
        """The report as dicts and lists that can be written as JSON."""
        graphs = [
            {
                "graph": graph.number,
                "hash": graph.name,
                "ranks": list(graph.ranks),
                "runs": graph.runs,
                "instructions": graph.instructions,
                "collectives": graph.collectives,
                "partitions": len(partitions(graph.module, self.ranks)),
                "live_bytes": graph.memory.peak,
                "input_bytes": graph.memory.inputs,
            }
            for graph in self.graphs
        ]
        return {
            "ranks": self.ranks,
            "instance": self.instance.name if self.instance else None,
            "core_bytes": self.instance.core_bytes(self.lnc) if self.instance else None,
            "graphs": graphs,
            "findings": [{**asdict(finding), "ranks": list(finding.ranks)} for finding in self.findings],
        }


def check_recorded(folder: Path, *, instance: Instance | None = None, lnc: int | None = None) -> GraphReport:
    """Checks the graphs that CPU ranks have recorded in a folder.

    Args:
        folder: the folder that ranks have written, see :data:`RECORD_GRAPHS`.
        instance: the instance whose limits of groups, rings and memory are checked; None: not checked.
        lnc: number of physical cores in a logical core; None: the instance's default.

    Raises:
        UsageError: if the folder contains no graphs.
    """
    runs = {int(path.stem[4:]): _executions(path) for path in sorted(folder.glob("rank*.jsonl"))}
    if not any(runs.values()):
        raise UsageError(
            "No graph was recorded.",
            where=str(folder),
            why="no rank executed a step on XLA",
            fix="run at least one step with NeuronAccelerator; see the output of the script",
        )
    names = list(dict.fromkeys(e.graph for run in runs.values() for e in run if e.graph))
    modules = {name: read_module(folder / "graphs" / f"{name}.pb") for name in names}
    graphs = tuple(_graph(number, name, modules[name], runs) for number, name in enumerate(names, start=1))
    hardware = instance.hardware(lnc) if instance else None
    core_bytes = instance.core_bytes(lnc) if instance else None
    findings: list[Finding] = []
    for graph in graphs:
        found = check_module(
            graph.module, hardware=hardware, core_bytes=core_bytes, world_size=len(runs), for_neuron=False
        )
        findings += [replace(one, graph=str(graph.number), ranks=graph.ranks) for one in found]
    findings += _between_ranks(runs, {graph.name: graph for graph in graphs})
    findings += _between_steps(graphs)
    findings += _apart(folder, runs)
    order = {"error": 0, "warning": 1}
    findings.sort(key=lambda finding: (order[finding.level], finding.graph.rjust(8)))
    return GraphReport(len(runs), graphs, tuple(findings), instance, lnc)


def _executions(path: Path) -> list[Execution]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [Execution(line["graph"], tuple(line["ranks"]), line["apart"]) for line in lines]


def _graph(number: int, name: str, module: Module, runs: dict[int, list[Execution]]) -> Graph:
    times = {rank: sum(e.graph == name for e in run) for rank, run in runs.items()}
    return Graph(number, name, module, tuple(r for r, count in times.items() if count), max(times.values()))


# ---- Differences between ranks ---------------------------------------------------------------------------------------
def _between_ranks(runs: dict[int, list[Execution]], graphs: dict[str, Graph]) -> Iterator[Finding]:
    """The first difference between ranks that have to execute the same graph, for each set of such ranks."""
    for ranks in dict.fromkeys(e.ranks for run in runs.values() for e in run):
        rows = {rank: [e.graph for e in runs.get(rank, []) if e.ranks == ranks] for rank in ranks}
        for names in itertools.zip_longest(*rows.values()):
            there = {name for name in names if name}
            if len(there) < 2 and (None not in names or not any(graphs[name].collectives for name in there)):
                continue  # a graph without collectives may differ between ranks
            one, other = list(dict.fromkeys(names))[:2]
            apart = tuple(rank for rank, name in zip(rows, names, strict=True) if name != one)
            what = f"ranks {show_ranks(apart)} execute a different graph from rank {next(iter(rows))}"
            place: Instruction | None = None
            if one and other:
                difference, place = _difference(graphs[one].module, graphs[other].module)
                what += f": {difference}"
            else:
                what += ", or none, at the same time"
            yield Finding(
                level="error",
                code="ranks",
                what=what,
                fix="collectives require equal graphs on all ranks: make the value that differs a tensor on the device",
                op=place.name if place else "",
                source=source_of(place) if place else "",
                graph=", ".join(str(graphs[name].number) for name in (one, other) if name),
                ranks=apart,
            )
            break


def _difference(one: Module, other: Module) -> tuple[str, Instruction | None]:
    """The first difference between two graphs, as text, and its instruction."""
    pairs = zip(one.instructions, other.instructions, strict=False)
    for ((_, a), (_, b)), row, other_row in zip(pairs, one.form, other.form, strict=False):
        if row == other_row:
            continue
        if a.opcode != b.opcode:
            return f"{b.opcode} {b.shape} instead of {a.opcode} {a.shape}", b
        if a.shape != b.shape:
            return f"{b.opcode} {b.shape} instead of {a.shape}", b
        if a.literal != b.literal:
            return f"the constant {b.literal} instead of {a.literal}", b
        return f"another {b.opcode} {b.shape}", b
    numbers = [sum(1 for _ in module.instructions) for module in (other, one)]
    return f"{numbers[0]} instructions instead of {numbers[1]}", None


_COMPUTES = {"dot", "convolution"}


# ---- Differences between steps ---------------------------------------------------------------------------------------
def _between_steps(graphs: Sequence[Graph]) -> Iterator[Finding]:
    """Graphs that differ from an earlier one in constants or shapes only, so that each new value is compiled again."""
    seen: dict[tuple[str, ...], Graph] = {}
    for graph in graphs:
        kind = tuple(one.opcode for _, one in graph.module.instructions)
        if not _COMPUTES & {*kind}:
            continue  # only moves data, as when parameters of different sizes are gathered to be saved
        earlier = seen.setdefault(kind, graph)
        if earlier is graph or not {*earlier.ranks} & {*graph.ranks}:
            continue
        pairs = list(zip(earlier.module.instructions, graph.module.instructions, strict=True))
        shapes = [(a, b) for (_, a), (_, b) in pairs if a.shape != b.shape]
        constants = [(a, b) for (_, a), (_, b) in pairs if a.literal != b.literal and a.shape == b.shape]
        both = f"{earlier.number}, {graph.number}"
        if shapes:
            a, b = next(((a, b) for a, b in shapes if a.opcode == "parameter"), shapes[0])
            yield Finding(
                level="warning",
                code="recompile",
                what=f"the same graph was compiled for {b.shape} and for {a.shape}: each new shape is compiled again",
                fix="pad batches to one or a few sizes, and drop or fill the last batch",
                op=b.name,
                source=source_of(b),
                count=len(shapes),
                graph=both,
                ranks=graph.ranks,
            )
        elif constants:
            a, b = constants[0]
            yield _value_in_graph(f"the constant {b.literal} and for {a.literal}", b, len(constants), both, graph)
        else:
            rows = zip(pairs, earlier.module.form, graph.module.form, strict=True)
            others = [b for (_, (_, b)), row, other in rows if row != other]
            if others:
                what = f"one {others[0].opcode} {others[0].shape} and for another"
                yield _value_in_graph(what, others[0], len(others), both, graph)


def _value_in_graph(what: str, place: Instruction, count: int, both: str, graph: Graph) -> Finding:
    return Finding(
        level="error",
        code="constant",
        what=f"the same graph was compiled for {what}: each new value of a Python number is compiled again",
        fix="make it a tensor on the device: backend.number(value), index_select instead of a slice",
        op=place.name,
        source=source_of(place) or _read_at(graph.module, place),
        count=count,
        graph=both,
        ranks=graph.ranks,
    )


def _read_at(module: Module, value: Instruction) -> str:
    """Source of the first instruction that depends on ``value`` and whose source is known."""
    reached = {value.id}
    for _, one in module.instructions:  # in the order of dependency
        if reached.isdisjoint(one.operands):
            continue
        if source_of(one):
            return source_of(one)
        reached.add(one.id)
    return ""


def _apart(folder: Path, runs: dict[int, list[Execution]]) -> Iterator[Finding]:
    """Graphs that were compiled outside of step boundaries, because a value was read."""
    first_steps = [min((e.apart for e in run[1:]), default=0) for run in runs.values() if run]
    counted = max((run[-1].apart for run in runs.values() if run), default=0) - min(first_steps, default=0)
    if counted <= 0:
        return
    last = sorted((folder / "dumps").glob("*.hlo.pb"))[-counted:]
    sources: Iterable[str] = (_made_at(read_module(path)) for path in last)
    named = [source for source in dict.fromkeys(sources) if source]
    yield Finding(
        level="warning",
        code="host-read",
        what=f"{counted} graphs were compiled between steps, because values were read on the host",
        fix="read values after the step, together (accelerator.log, accelerator.gather)",
        source=named[0] if named else "",
        count=counted,
    )


def _made_at(module: Module) -> str:
    entry = module.entry
    root = entry.by_id[entry.root]
    made = [root, *entry.operands(root)]
    return next((source for source in map(source_of, made) if source), "")


def show_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks as ranges, such as ``0-3, 8``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
