# SPDX-License-Identifier: Apache-2.0
"""The contents of a report, read step by step, so that memory is bounded for runs of any length.

The files of all ranks are read side by side, a block of each at a time, and only sums and thinned series are kept.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from neuron_accel.errors import ConfigurationError
from neuron_accel_report.records import (
    PARTS,
    End,
    Header,
    Memory,
    RankReport,
    Step,
    Straggler,
    TrafficRow,
    from_line,
    stragglers_of,
    traffic_table,
)

POINTS = 400
"""A series has at most twice as many points; above that, neighbours become one with the lowest, mean and highest."""
COLUMNS = 150
"""The same for columns of the map of step times."""
ROWS = 64
"""Ranks in the map of step times. Of more ranks those that were late most are shown."""
_BLOCK = 256
"""Steps of a rank that are read at a time."""
_LONGEST = 1 << 24
"""Bytes of a line. None that the plugin writes comes near it."""
_NAMED = 12
"""Single events that are named: late ranks, steps without a finite loss."""


class Series:
    """Values by step, thinned: how many there are is bounded, and no lowest or highest value is lost.

    Args:
        limit: half the largest number of points.
    """

    def __init__(self, limit: int = POINTS) -> None:
        self._limit = limit
        self.width = 1
        """Steps in a point."""
        self._points: dict[int, list[float]] = {}

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step; values that are not finite are ignored."""
        if not math.isfinite(value):
            return
        self._join(step // self.width, [value, value, value, 1])
        if len(self._points) > 2 * self._limit:
            self.width *= 2
            old, self._points = self._points, {}
            for index, point in old.items():
                self._join(index // 2, point)

    def _join(self, index: int, point: list[float]) -> None:
        known = self._points.get(index)
        if known is None:
            self._points[index] = list(point)
        else:
            known[0], known[1] = min(known[0], point[0]), max(known[1], point[1])
            known[2] += point[2]
            known[3] += point[3]

    @property
    def points(self) -> list[tuple[int, float, float, float]]:
        """First step, mean, lowest and highest value of each point, by step."""
        return [(index * self.width, p[2] / p[3], p[0], p[1]) for index, p in sorted(self._points.items())]

    @property
    def counts(self) -> dict[int, int]:
        """Number of values of each point, by its first step, in order."""
        return {index * self.width: int(point[3]) for index, point in sorted(self._points.items())}

    def totals(self, width: int) -> dict[int, float]:
        """Sums of values by the first step of points of ``width`` steps, of which there are at least as many in one."""
        found: dict[int, float] = defaultdict(float)
        for index, point in self._points.items():
            found[index * self.width // width * width] += point[2]
        return dict(found)

    def __len__(self) -> int:
        return len(self._points)


@dataclass(frozen=True)
class LateRank:
    """How often and how long the other ranks waited for a rank.

    Args:
        rank: the rank.
        host: the machine it ran on.
        coordinates: its place in the mesh.
        steps: number of steps in which it was late.
        seconds: by which it was later than the median rank, over all these steps.
        parts: these seconds by the part of the step in which it lost most.
        worst: the step in which it was latest.
    """

    rank: int
    host: str
    coordinates: Mapping[str, int]
    steps: int
    seconds: float
    parts: Mapping[str, float]
    worst: Straggler


@dataclass
class RunSummary:
    """The contents of a report on one run.

    Args:
        name: name of the run beside others.
        headers: first lines, by rank.
        notes: remarks on the files for the reader, such as missing ranks.
        steps: number of optimizer steps.
        series: thinned values by name: ``loss``, ``grad_norm``, ``lr``, ``seconds`` and ``step_tokens`` of a step,
            ``tokens`` and ``samples`` of a rank in a second, ``mfu``, and ``device_peak`` and ``host`` memory of the
            rank with the most.
        parts: thinned seconds of each part, mean of the ranks.
        part_seconds: seconds of each part over the run, mean of the ranks.
        step_times: of each rank, how much longer than the median rank it was busy, thinned.
        late: ranks for which others waited, those that cost most first.
        late_steps: the latest ranks and their steps, the largest delay first.
        memory: of the rank and step with most memory: rank, step, record; None without memory.
        traffic: collectives of the first rank in its last step, beside those of a dry run.
        first_loss, last_loss: of the first and last steps with a finite one.
        no_loss: steps whose loss is not finite, the first of them, and their number.
        compilations: graphs that were compiled, of each step those of the rank with most; None without a compiler.
        compiled_in: the last step that compiled one.
        last: the last step of each rank.
        ended: whether every rank wrote its last line.
    """

    name: str
    headers: dict[int, Header]
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    series: dict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    parts: dict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    part_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    step_times: dict[int, Series] = field(default_factory=lambda: defaultdict(lambda: Series(COLUMNS)))
    late: list[LateRank] = field(default_factory=list)
    late_steps: list[Straggler] = field(default_factory=list)
    memory: tuple[int, int, Memory] | None = None
    traffic: list[TrafficRow] = field(default_factory=list)
    first_loss: float | None = None
    last_loss: float | None = None
    no_loss: list[int] = field(default_factory=list)
    no_losses: int = 0
    compilations: int | None = None
    compiled_in: int | None = None
    last: dict[int, int] = field(default_factory=dict)
    ended: bool = False

    @property
    def header(self) -> Header:
        """That of the lowest rank."""
        return self.headers[min(self.headers)]

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return sum(self.part_seconds.values())

    def mean(self, name: str) -> float | None:
        """Mean of a series over all steps; None without it."""
        if name not in self.series or not len(self.series[name]):
            return None
        series = self.series[name]
        return sum(series.totals(series.width).values()) / sum(series.counts.values())


# ---- files -----------------------------------------------------------------------------------------------------------
class _RankFile:
    """The steps of a rank, read a block at a time; between blocks the file is closed, so that ranks may be many."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset, self._line = 0, 0
        self.end: End | None = None
        self.is_cut = self.is_done = False
        self.pending: list[Step] = []
        first = next(self._records(1), None)
        if first is not None and not isinstance(first, Header):
            raise _unreadable(f"{path}, line 1", "the first line is not the header of a run")
        self.is_empty = first is None
        if first is None:
            return
        self.header: Header = first

    def fill(self) -> None:
        """Reads the next block, unless steps are pending."""
        while not self.pending and not self.is_done:
            for record in self._records(_BLOCK):
                if isinstance(record, Step):
                    self.pending.append(record)
                elif isinstance(record, End):
                    self.end = record
                elif isinstance(record, Header):
                    raise _unreadable(f"{self.path}, line {self._line}", "it has two headers")

    def _records(self, most: int) -> Iterator[Header | Step | End | None]:
        """The next records; ranges, of which a traced step has thousands, are passed over."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                for _ in range(most):
                    line = file.readline(_LONGEST)
                    if len(line) == _LONGEST:
                        raise _unreadable(f"{self.path}, line {self._line + 1}", f"it has more than {_LONGEST} bytes")
                    if not line.endswith(b"\n"):
                        self.is_cut, self.is_done = bool(line), True
                        return
                    self._line += 1
                    self._offset += len(line)
                    if line.strip() and not line.startswith(b'{"kind":"range"'):
                        record = from_line(line.decode(errors="replace"), f"{self.path}, line {self._line}")
                        yield record if isinstance(record, (Header, Step, End)) else None
        except OSError as error:
            raise _unreadable(str(self.path), error.strerror or str(error)) from error

    @property
    def offset(self) -> int:
        """Bytes that are read."""
        return self._offset


def _unreadable(where: str, why: str) -> Exception:
    fix = "give a folder as the plugin run_report writes it"
    return ConfigurationError("A run report cannot be read.", where=where, why=why, fix=fix)


def _open(folder: Path) -> list[_RankFile]:
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        why = "it has no file rank-*.jsonl" if folder.is_dir() else "there is no such folder"
        raise ConfigurationError(
            f"There is no run report in {str(folder)!r}.",
            why=why,
            fix="give the folder that the plugin run_report writes, run_report unless its options name another",
        )
    files = [file for file in map(_RankFile, paths) if not file.is_empty]
    if not files:
        raise ConfigurationError(
            f"The run report in {str(folder)!r} is empty.", why="no rank has completed its first line yet"
        )
    first = files[0].header
    for file in files:
        if (file.header.run, file.header.world_size) != (first.run, first.world_size):
            raise ConfigurationError(
                f"The files in {str(folder)!r} are of different runs.",
                where=str(file.path),
                why=f"run {file.header.run!r} on {file.header.world_size} ranks instead of {first.run!r} on "
                f"{first.world_size}",
                fix="keep each run in a folder of its own",
            )
    ranks = Counter(file.header.rank for file in files)
    if twice := [rank for rank, count in ranks.items() if count > 1]:
        raise ConfigurationError(f"Rank {twice[0]} has two files in {str(folder)!r}.", fix="remove one of them")
    return files


def _side_by_side(files: Sequence[_RankFile]) -> Iterator[tuple[int, dict[int, Step]]]:
    """Each step of the run with what its ranks have written. A step that was trained again, from a checkpoint, comes
    again."""
    before: dict[int, int] = {}
    while True:
        for file in files:
            file.fill()
        waiting = [file for file in files if file.pending]
        if not waiting:
            return
        # A rank whose next step is earlier than its last one has gone back; first the others get there.
        ahead = [file for file in waiting if file.pending[0].step > before.get(file.header.rank, -1)]
        number = min(file.pending[0].step for file in ahead or waiting)
        if not ahead:
            before.clear()
        found = {}
        for file in ahead or waiting:
            if file.pending[0].step == number:
                found[file.header.rank] = file.pending.pop(0)
                before[file.header.rank] = number
        yield number, found


# ---- a run -----------------------------------------------------------------------------------------------------------
def summarise(folder: str | Path, *, progress: Callable[[int, int], None] | None = None) -> RunSummary:
    """Reads the folder of a run.

    Args:
        folder: with files ``rank-*.jsonl``. A last line without its end is left out; ranks may be missing.
        progress: is called with the bytes that are read, and all.

    Raises:
        ConfigurationError: if there is no report, files are of different runs, or a line is not valid.
    """
    folder = Path(folder)
    files = _open(folder)
    headers = {file.header.rank: file.header for file in files}
    found = RunSummary(name=folder.name or str(folder.resolve().name), headers=headers)
    total = sum(file.path.stat().st_size for file in files)
    delays: dict[int, list[Straggler]] = defaultdict(list)
    costs: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: Counter[int] = Counter()
    lowest, latest = min(headers), None
    for number, steps in _side_by_side(files):
        _add(found, number, steps)
        for late in stragglers_of(number, steps):
            counts[late.rank] += 1
            costs[late.rank][late.part] += late.seconds
            delays[late.rank] = sorted([*delays[late.rank], late], key=lambda each: -each.seconds)[:_NAMED]
        latest = steps.get(lowest, latest)
        if progress is not None and found.steps % 64 == 0:
            progress(sum(file.offset for file in files), total)
    if latest is not None:
        found.traffic = traffic_table(RankReport(headers[lowest], (latest,)))
    found.late = [
        LateRank(
            rank=rank,
            host=headers[rank].host,
            coordinates=headers[rank].coordinates,
            steps=counts[rank],
            seconds=sum(cost.values()),
            parts=dict(cost),
            worst=delays[rank][0],
        )
        for rank, cost in sorted(costs.items(), key=lambda item: -sum(item[1].values()))
    ]
    found.late_steps = sorted((late for each in delays.values() for late in each), key=lambda e: -e.seconds)[:_NAMED]
    found.ended = all(file.end is not None for file in files)
    found.notes = _notes(found, files)
    return found


def _add(found: RunSummary, number: int, steps: Mapping[int, Step]) -> None:
    found.steps += 1
    every = list(steps.values())

    def add(name: str, values: Sequence[float | None], of: Callable[[Sequence[float]], float]) -> None:
        known = [value for value in values if value is not None]
        if known:
            found.series[name].add(number, of(known))

    losses = [step.loss for step in every if step.loss is not None]
    if losses:
        loss = _mean(losses)
        if math.isfinite(loss):
            found.first_loss = loss if found.first_loss is None else found.first_loss
            found.last_loss = loss
        else:
            found.no_losses += 1
            found.no_loss += [number] if len(found.no_loss) < _NAMED else []
        found.series["loss"].add(number, loss)
    add("grad_norm", [step.grad_norm for step in every], _mean)
    add("lr", [step.lr[0] for step in every if step.lr], _mean)
    add("seconds", [step.seconds for step in every], _mean)
    add("tokens", [_rate(step.tokens, step) for step in every], _mean)
    add("step_tokens", [step.tokens for step in every], _mean)
    add("samples", [_rate(step.samples, step) for step in every], _mean)
    add("mfu", [step.mfu for step in every], _mean)
    add("device_peak", [step.memory.device_peak for step in every], max)
    add("host", [step.memory.host for step in every], max)
    for part in dict.fromkeys(name for step in every for name in step.parts):
        seconds = _mean([step.parts.get(part, 0.0) for step in every])
        found.part_seconds[part] += seconds
        found.parts[part].add(number, seconds)
    compiled = [step.compilations for step in every if step.compilations is not None]
    if compiled:
        found.compilations = (found.compilations or 0) + max(compiled)
        found.compiled_in = number if max(compiled) else found.compiled_in
    usual = _median([step.busy_seconds for step in every])
    for rank, step in steps.items():
        found.step_times[rank].add(number, step.busy_seconds - usual)
        found.last[rank] = number
        size = _size(step.memory)
        if size and (found.memory is None or size > _size(found.memory[2])):
            found.memory = (rank, number, step.memory)


def _rate(amount: int | None, step: Step) -> float | None:
    return amount / step.training_seconds if amount is not None and step.training_seconds > 0 else None


def _size(memory: Memory) -> int:
    return memory.device_peak or memory.device or memory.host or 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _notes(found: RunSummary, files: Sequence[_RankFile]) -> list[str]:
    notes, world = [], found.header.world_size
    missing = sorted(set(range(world)) - set(found.headers))
    if missing:
        notes.append(f"There is no file of {_ranks(missing)}; the run had {world} ranks.")
    if found.steps == 0:
        notes.append("No optimizer step is complete yet.")
    if not found.ended:
        cut = [file.header.rank for file in files if file.end is None]
        notes.append(f"The files of {_ranks(cut)} have no last line: the run continues, or was interrupted.")
        ends = sorted({found.last[rank] for rank in found.last})
        if len(ends) > 1:
            first = [rank for rank in found.last if found.last[rank] == ends[0]]
            notes.append(f"Steps end with {ends[0]} on {_ranks(first)}, with {ends[-1]} on others.")
    broken = [file.header.rank for file in files if file.is_cut]
    if broken:
        notes.append(f"The last line of {_ranks(broken)} is incomplete and left out.")
    if found.no_losses:
        steps = ", ".join(map(str, found.no_loss)) + (", ..." if found.no_losses > len(found.no_loss) else "")
        times = "one step" if found.no_losses == 1 else f"{found.no_losses} steps"
        notes.append(f"The loss of {times} is not finite: {steps}.")
    return notes


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def several(folders: Sequence[str | Path], *, progress: Callable[[int, int], None] | None = None) -> list[RunSummary]:
    """Reads several runs, and gives them names that differ.

    Args:
        folders: of the runs.
        progress: see :func:`summarise`; bytes are those of each run.
    """
    runs = [summarise(folder, progress=progress) for folder in folders]
    names = Counter(run.name for run in runs)
    for run, folder in zip(runs, folders, strict=True):
        if names[run.name] > 1:
            run.name = str(folder)
    again = Counter(run.name for run in runs)
    for number, run in enumerate(runs, start=1):
        if again[run.name] > 1:
            run.name = f"{run.name} ({number})"
    return runs


def part_names(runs: Sequence[RunSummary]) -> list[str]:
    """Parts of a step in which any run has spent time, in order."""
    there = {part for run in runs for part, seconds in run.part_seconds.items() if seconds > 0}
    return [part for part in PARTS if part in there] + sorted(there - set(PARTS))
