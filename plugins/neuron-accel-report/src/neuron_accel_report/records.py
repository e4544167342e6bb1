# SPDX-License-Identifier: Apache-2.0
"""The files of a run report, and what follows from them.

A run's folder has one file of JSON lines for each rank, ``rank-00000.jsonl`` and so on: a header, a line for each
optimizer step, lines for the ranges of traced steps, and a last line if the run ended in order. ``begin``, ``end`` and
``time`` are whole nanoseconds since the run began, so that a step ends exactly where the next one begins; durations are
in seconds. Numbers that JSON does not have (NaN, infinity) are written as text. Readers ignore fields that they do not
know, so that fields can be added.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from neuron_accel.errors import ConfigurationError

VERSION = 2
"""Version of the format, in the header. In version 1 times were numbers of Unix time, 238 nanoseconds apart."""

PARTS = ("loader", "forward", "backward", "optimizer", "communication", "device", "checkpoint", "evaluation", "other")
"""Parts of a step, whose seconds add up to those of the step.

``loader``: the next batch. ``forward``, ``backward``: of prepared models. ``optimizer``: clipping and the update.
``communication``: collectives, from their call until their result is there, wherever they are called.
``device``: waiting for a lazy device to execute the step's graph. ``checkpoint``: saving and loading. ``evaluation``:
forward passes without gradients. ``other``: the rest, most often the loop's own code.
"""

Category = Literal["part", "step", "call", "graph", "collective", "wait", "pipeline", "hook", "user"]


# ---- lines -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Collectives:
    """The collectives of one kind in a group of ranks, in one step.

    Args:
        op: name of the collective.
        group: name of the group: the axes of the mesh along which its ranks differ.
        count: number of calls.
        bytes: bytes that this rank sends.
        seconds: time from their calls until their results were there, in which nothing else ran on the host; None if
            they are part of a graph.
    """

    op: str
    group: str
    count: int
    bytes: int
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes in use at the end of a step; None where they are not known.

    Args:
        device_peak: largest amount on the device since the step began.
        device: on the device.
        host: resident memory of the process.
        parameters, gradients, optimizer: of these objects, on this rank.
    """

    device_peak: int | None = None
    device: int | None = None
    host: int | None = None
    parameters: int | None = None
    gradients: int | None = None
    optimizer: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a dry run counts for one step of this rank.

    Args:
        traffic: its collectives.
    """

    traffic: tuple[Collectives, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Header:
    """First line of a file.

    Args:
        run: an identifier, equal on all ranks of a run.
        rank: of this file.
        world_size: number of ranks.
        mesh: degree of each axis by its name, in order.
        coordinates: index of this rank along each axis.
        plugins: names of the run's plugins, in the order in which they act.
        host: name of the machine.
        device: type of the device, such as ``"cpu"``.
        backend: name of the backend.
        instance: name of the Trainium instance; None on other machines.
        peak_flops: floating-point operations that this rank's part of the instance can do in a second; None if unknown.
        parameters: number of elements of the original model's parameters.
        torch, neuron_accel: versions.
        clock_offset: seconds that were added to this machine's clock.
        clock_error: largest error of ``clock_offset``, in seconds; 0 on the machine of the first rank.
        started: when the run began, in Unix time by the clock of rank 0; equal on all ranks.
        predicted: what a dry run counted for a step; None without one.
        micro_batches: number of micro-batches of an optimizer step.
        mixed_precision, gradient_accumulation_steps: of the accelerator.
        global_batch: samples of the first step on all data-parallel ranks; None if not known.
        seed: with which torch's generator of this rank was seeded last, before the first step ended.
        optimizer: class of the optimizer whose steps are counted.
        hyperparameters: of its groups, several values where groups differ, and none that is off.
        model: class of the model.
        command: the command line, without what looks like a secret.
        options: the options of each plugin that are not its defaults, by its name.
        versions: of Python and of other libraries that the run has imported, by name.
        commit: of the git repository that the script is in, of the first rank; empty without one.
    """

    kind: ClassVar[str] = "run"
    version: int = VERSION
    run: str
    rank: int
    world_size: int
    mesh: Mapping[str, int]
    coordinates: Mapping[str, int]
    plugins: tuple[str, ...]
    host: str
    device: str
    backend: str
    instance: str | None = None
    peak_flops: float | None = None
    parameters: int | None = None
    torch: str = ""
    neuron_accel: str = ""
    clock_offset: float = 0.0
    clock_error: float = 0.0
    started: float
    predicted: Prediction | None = None
    micro_batches: int | None = None
    mixed_precision: str = ""
    gradient_accumulation_steps: int | None = None
    global_batch: int | None = None
    seed: int | None = None
    optimizer: str = ""
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    command: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer step of one rank, from the end of the step before it.

    Args:
        step: its number in the training, from 0.
        begin, end: in nanoseconds since the run began. A step begins when the one before it ends.
        samples, tokens: in the batches of this rank; None if not known.
        micro_batches: number of backward passes.
        parts: seconds of each of :data:`PARTS`.
        waiting: seconds in which the host was blocked until the result of a collective was there; None if collectives
            are part of a graph.
        collectives: by kind and group, in the order of first use.
        memory: at the end.
        flops: floating-point operations of this rank; None if not known.
        mfu: ``flops`` a second over the peak of the instance, from 0 to 1; None if either is not known.
        compilations: graphs that were compiled in this step; None on devices without a compiler.
        loss: mean over the micro-batches of this rank.
        grad_norm: as ``clip_grad_norm_`` returned it; None without clipping.
        lr: learning rate of each parameter group.
        skipped: whether the update was skipped, such as after an overflow.
        own_seconds: time that the report itself has taken in this step.
    """

    kind: ClassVar[str] = "step"
    step: int
    begin: int
    end: int
    samples: int | None = None
    tokens: int | None = None
    micro_batches: int = 1
    parts: Mapping[str, float] = field(default_factory=dict)
    waiting: float | None = None
    collectives: tuple[Collectives, ...] = ()
    memory: Memory = field(default_factory=Memory)
    flops: float | None = None
    mfu: float | None = None
    compilations: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: tuple[float, ...] = ()
    skipped: bool = False
    own_seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Wall time."""
        return (self.end - self.begin) / 1e9

    @property
    def training_seconds(self) -> float:
        """Wall time without checkpoints and evaluation."""
        return self.seconds - self.parts.get("checkpoint", 0.0) - self.parts.get("evaluation", 0.0)

    @property
    def busy_seconds(self) -> float:
        """Wall time without collectives. The rank with the most keeps the others waiting in theirs."""
        return self.seconds - self.parts.get("communication", 0.0)


@dataclass(frozen=True, kw_only=True)
class Range:
    """A named range of time in a traced step. Ranges of one rank are nested: two of them are either apart, or one
    contains the other.

    Args:
        step: number of the step.
        name: what happens in it.
        category: ``"part"`` of a step, ``"collective"``, ``"pipeline"`` action, ``"hook"`` of a plugin, or ``"user"``
            for ranges that a training script opens.
        begin, end: in nanoseconds since the run began.
        arguments: details, such as the bytes of a collective.
    """

    kind: ClassVar[str] = "range"
    step: int
    name: str
    category: Category
    begin: int
    end: int
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class End:
    """Last line of a run that ended in order.

    Args:
        time: when it ended, in nanoseconds since it began.
        steps: number of steps that it did.
    """

    kind: ClassVar[str] = "end"
    time: int
    steps: int


Line = Header | Step | Range | End
_KINDS: dict[str, Any] = {cls.kind: cls for cls in (Header, Step, Range, End)}


def to_line(record: Line) -> str:
    """Returns the line of a file, without its end."""
    if isinstance(record, Step):  # the line that each step writes: without a copy, if JSON has all of its numbers
        with contextlib.suppress(TypeError, ValueError):
            return _ENCODER.encode({"kind": "step", **vars(record)})
    return json.dumps({"kind": record.kind, **_plain(record)}, separators=(",", ":"), allow_nan=False)


def from_line(text: str, where: str) -> Line:
    """Returns the record of a line.

    Args:
        text: the line.
        where: names the line in messages.

    Raises:
        ConfigurationError: if it is not such a line, or the header of another version of the format.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise _error(where, f"it is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") not in _KINDS:
        raise _error(where, f"it is not an object whose 'kind' is one of {', '.join(_KINDS)}")
    if data["kind"] == Header.kind and (version := data.get("version", VERSION)) != VERSION:
        raise _error(
            where,
            f"it was written in version {version!r:.20} of the format, and this reads version {VERSION}",
            "read it with the neuron-accel-report that has written it",
        )
    return _read(_KINDS[data["kind"]], data, where)


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False, default=vars)
"""Of records and the records in them."""


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _field_names(type(value))}
    return value


@cache
def _field_names(cls: Any) -> tuple[str, ...]:
    return tuple(each.name for each in fields(cls))


def _error(
    where: str, why: str, fix: str = "give the folder that the plugin run_report has written, unchanged"
) -> ConfigurationError:
    return ConfigurationError("A line of a run report cannot be read.", where=where, why=why, fix=fix)


# ---- checking a line: one function for each type ---------------------------------------------------------------------
T = TypeVar("T")


def _read(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _error(where, f"{data!r:.60} is not an object")
    values = {}
    for name, check in _checks(cls):
        if name in data:
            try:
                values[name] = check(data[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise _error(where, f"field {name!r}: {error}") from None
    try:
        return cls(**values)
    except TypeError:
        needed = [each.name for each in fields(cls) if each.default is each.default_factory is MISSING]
        missing = [name for name in needed if name not in values]
        raise _error(where, f"it lacks {', '.join(missing)}") from None


@cache
def _checks(cls: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((name, _check(hints[name])) for name in _field_names(cls))


def _check(hint: Any) -> Callable[[Any], Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value: value
    if origin is types.UnionType:
        (inner,) = (_check(each) for each in arguments if each is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin is Literal:
        return lambda value: value if value in arguments else _wrong(value, f"one of {', '.join(arguments)}")
    if origin is tuple:
        inner = _check(arguments[0])
        return lambda value: tuple(map(inner, value)) if isinstance(value, list) else _wrong(value, "a list")
    if origin is not None:  # a mapping
        inner = _check(arguments[1])
        return lambda value: (
            {key: inner(item) for key, item in value.items()} if isinstance(value, dict) else _wrong(value, "an object")
        )
    if is_dataclass(hint):
        return lambda value: _read_inner(hint, value)
    return {float: _float, int: _int, str: _str, bool: _bool}[hint]


def _read_inner(cls: Any, value: Any) -> Any:
    try:
        return _read(cls, value, "")
    except ConfigurationError as error:
        raise ValueError(error.why) from None


def _wrong(value: Any, expected: str) -> Any:
    raise ValueError(f"{value!r:.60} is not {expected}")


def _float(value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else _wrong(value, "a number")


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _wrong(value, "an integer")


def _str(value: Any) -> str:
    return value if isinstance(value, str) else _wrong(value, "text")


def _bool(value: Any) -> bool:
    return value if isinstance(value, bool) else _wrong(value, "true or false")


# ---- a run -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RankReport:
    """The records that one rank has written.

    Args:
        header: the first line.
        steps: in order.
        ranges: of traced steps, in the order of their ends.
        end: the last line; None if the run was interrupted, or continues.
    """

    header: Header
    steps: tuple[Step, ...] = field(default=(), repr=False)
    ranges: tuple[Range, ...] = field(default=(), repr=False)
    end: End | None = None

    @property
    def rank(self) -> int:
        return self.header.rank


@dataclass(frozen=True)
class RunReport:
    """A run: the records of its ranks.

    Args:
        folder: the folder.
        ranks: in order; ranks of other machines may be missing.
    """

    folder: Path
    ranks: tuple[RankReport, ...] = field(repr=False)

    @property
    def header(self) -> Header:
        """That of the first rank."""
        return self.ranks[0].header

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks without a file, such as those of a machine whose folder was not copied."""
        there = {each.rank for each in self.ranks}
        return tuple(rank for rank in range(self.header.world_size) if rank not in there)

    @property
    def by_step(self) -> dict[int, dict[int, Step]]:
        """Steps by their number, then by rank."""
        found: dict[int, dict[int, Step]] = {}
        for each in self.ranks:
            for step in each.steps:
                found.setdefault(step.step, {})[each.rank] = step
        return dict(sorted(found.items()))


def rank_file(rank: int) -> str:
    """Name of the file of a rank."""
    return f"rank-{rank:05d}.jsonl"


def read_run(folder: str | Path) -> RunReport:
    """Reads the folder of a run.

    An incomplete last line is ignored: the run continues, or was interrupted while it was written.

    Raises:
        ConfigurationError: if there is no file of a rank, a line cannot be read, or files are of different runs.
    """
    folder = Path(folder)
    paths = sorted(folder.glob("rank-*.jsonl"))
    if not paths:
        raise ConfigurationError(
            f"There is no run report in {str(folder)!r}.",
            why="it has no file rank-*.jsonl" if folder.is_dir() else "there is no such folder",
            fix="give the folder of a run with the plugin run_report, by default run_report",
        )
    ranks = [found for found in map(_read_rank, paths) if found is not None]
    if not ranks:
        raise ConfigurationError(
            f"The run report in {str(folder)!r} is empty.", why="no rank has written its first line yet", fix="wait"
        )
    first = ranks[0].header
    for path, each in zip(paths, ranks, strict=False):
        if (each.header.run, each.header.world_size) != (first.run, first.world_size):
            raise ConfigurationError(
                f"The files in {str(folder)!r} are of different runs.",
                where=str(path),
                why=f"run {each.header.run!r} instead of {first.run!r}",
                fix="keep the files of each run in a folder of their own",
            )
    return RunReport(folder, tuple(sorted(ranks, key=lambda each: each.rank)))


def _read_rank(path: Path) -> RankReport | None:
    """What a rank has written; None if it has not written its first line yet."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _error(str(path), str(error)) from error
    records = [from_line(line, f"{path}, line {n}") for n, line in enumerate(lines[:-1], 1) if line]
    if not records:
        return None
    header = records[0]
    if not isinstance(header, Header):
        raise _error(f"{path}, line 1", "the first line is not the header of a run")
    if any(isinstance(each, Header) for each in records[1:]):
        raise _error(str(path), "it has two headers")
    end = next((each for each in records if isinstance(each, End)), None)
    return RankReport(
        header,
        tuple(each for each in records if isinstance(each, Step)),
        tuple(each for each in records if isinstance(each, Range)),
        end,
    )


# ---- what can be said of a run ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank for which others had to wait in a step.

    Args:
        step: number of the step.
        rank: the rank.
        seconds: how much longer it was busy than the median rank.
        part: the part of the step in which it lost most of that.
    """

    step: int
    rank: int
    seconds: float
    part: str


def stragglers(run: RunReport, *, share: float = 0.1, seconds: float = 0.01) -> list[Straggler]:
    """Returns the ranks for which others waited, the largest delay first.

    In a step without stragglers ranks are busy equally long. A slow one is busy longer, while the others wait for it in
    their collectives; its step time without collectives singles it out.

    Args:
        run: the run.
        share: a delay counts from this fraction of the step's time.
        seconds: and from this many seconds.
    """
    found = [late for step, ranks in run.by_step.items() for late in stragglers_of(step, ranks, share, seconds)]
    return sorted(found, key=lambda each: -each.seconds)


def stragglers_of(step: int, ranks: Mapping[int, Step], share: float = 0.1, seconds: float = 0.01) -> list[Straggler]:
    """Returns the stragglers of one step; see :func:`stragglers`.

    Args:
        step: its number.
        ranks: the step of each rank.
        share, seconds: see :func:`stragglers`.
    """
    if len(ranks) < 2:
        return []
    usual = statistics.median_low(each.busy_seconds for each in ranks.values())
    least = max(seconds, share * statistics.median_low(each.seconds for each in ranks.values()))
    found = []
    for rank, each in ranks.items():
        if (late := each.busy_seconds - usual) >= least:
            others = [other for key, other in ranks.items() if key != rank]
            found.append(Straggler(step=step, rank=rank, seconds=late, part=_slowest_part(each, others)))
    return found


def _slowest_part(step: Step, others: Sequence[Step]) -> str:
    """The part in which a step takes longest, compared with the median of others."""

    def delay(part: str) -> float:
        return step.parts.get(part, 0.0) - statistics.median_low(each.parts.get(part, 0.0) for each in others)

    return max((part for part in step.parts if part != "communication"), key=delay, default="other")


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """Collectives of one kind and group in a step, predicted and measured.

    Args:
        op, group: see :class:`Collectives`.
        predicted_count, predicted_bytes: of a dry run; None without a prediction.
        count, bytes: measured.
    """

    op: str
    group: str
    predicted_count: int | None
    predicted_bytes: int | None
    count: int
    bytes: int

    @property
    def is_equal(self) -> bool | None:
        """Whether prediction and measurement are equal; None without a prediction."""
        if self.predicted_count is None:
            return None
        return (self.predicted_count, self.predicted_bytes) == (self.count, self.bytes)


def traffic_table(rank: RankReport, step: int | None = None) -> list[TrafficRow]:
    """Returns the predicted and the measured collectives of a step.

    Args:
        rank: the rank.
        step: number of the step; None for the last one.
    """
    seen: Iterable[Collectives] = ()
    for each in rank.steps:
        if step in (None, each.step):
            seen = each.collectives
    by_key = {(each.op, each.group): each for each in seen}
    prediction = rank.header.predicted
    predicted = {(each.op, each.group): each for each in prediction.traffic} if prediction is not None else {}
    none = Collectives(op="", group="", count=0, bytes=0)
    rows = []
    for op, group in dict.fromkeys([*predicted, *by_key]):
        expected = predicted.get((op, group), none) if prediction is not None else None
        got = by_key.get((op, group), none)
        rows.append(
            TrafficRow(
                op=op,
                group=group,
                predicted_count=None if expected is None else expected.count,
                predicted_bytes=None if expected is None else expected.bytes,
                count=got.count,
                bytes=got.bytes,
            )
        )
    return rows
