# SPDX-License-Identifier: Apache-2.0
"""Searches the layouts of a model on a number of machines: all that the installed plugins support. Layouts that cannot
fit or run are ruled out with a reason; the others are ranked by predicted time.

One micro-batch of one sample is dry-run for every variant of a block (tensor parallelism, sequence parallelism,
recomputation and so on), on the smallest mesh. From that the memory and a bound of the time of each layout are
estimated, whatever its stages, replicas and micro-batches are. The best are then counted, each by its own dry run.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import yaml

from neuron_accel import Instance, find_instance
from neuron_accel.contract import (
    AxisKind,
    ConfigurationError,
    LayoutSpace,
    NeuronAccelError,
    Phase,
    Stages,
    StrategyPlugin,
    UsageError,
    plugin_classes,
    to_config,
)
from neuron_accel_plan.layout import LayoutCount, Planner, no_collection_of_what_is_there
from neuron_accel_plan.memory import ACTIVATIONS, GRADIENTS, TEMPORARY
from neuron_accel_plan.step import StepCount, extrapolate
from neuron_accel_plan.time import StepTime

_REST = frozenset({Phase.STAGES, Phase.GRADIENTS, Phase.OPTIMIZER})
"""Phases of plugins that do not change what a block computes."""
_STATE_BYTES = 12  # of an fp32 master weight and two moments
_MICRO_BATCHES = (1, 2, 4, 8)
_SLACK = 1.1
"""Layouts whose estimate exceeds the memory of a core by more than this factor are not counted."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout that may be tried.

    Args:
        plugins: the strategies.
        accumulation: number of calls of the model per optimizer step.
    """

    plugins: tuple[StrategyPlugin, ...]
    accumulation: int

    def __str__(self) -> str:
        parts = [_text(plugin) for plugin in self.plugins]
        parts += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        return ", ".join(parts) or "data parallelism"

    def configuration(self) -> dict[str, Any]:
        """Returns the keys of a configuration file."""
        found: dict[str, Any] = {}
        if self.accumulation > 1:
            found["gradient_accumulation_steps"] = self.accumulation
        found["plugins"] = [_entry(plugin) for plugin in self.plugins]
        return found


@dataclass(frozen=True, kw_only=True)
class RuledOut:
    """A layout that was not chosen, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A layout that fits, with what it needs.

    Args:
        layout: the layout.
        count: memory, traffic and operations.
        time: predicted time of a step.
    """

    layout: Layout
    count: LayoutCount
    time: StepTime


@dataclass(frozen=True, kw_only=True)
class Search:
    """The layouts of a model on some machines.

    Args:
        model: name of the model's class.
        parameters: number of its parameters.
        instance: instance type.
        instances: number of instances.
        tokens: tokens in a step.
        best: layouts that fit, the fastest first.
        ruled_out: all others.
        price_per_hour: price of an instance for an hour; None if it was not given.
    """

    model: str
    parameters: int
    instance: str
    instances: int
    tokens: int
    best: tuple[Ranked, ...]
    ruled_out: tuple[RuledOut, ...] = field(repr=False)
    price_per_hour: float | None = None

    def price(self, seconds: float) -> float | None:
        """Price of a million tokens, if a step takes that long."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.instances / 3600 * seconds / self.tokens * 1e6

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers and text: bytes, seconds."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "instance": self.instance,
            "instances": self.instances,
            "tokens": self.tokens,
            "layouts": [
                {
                    **ranked.count.to_dict(),
                    "layout": str(ranked.layout),
                    "config": ranked.layout.configuration(),
                    "seconds": {"likely": ranked.time.seconds, "low": ranked.time.low, "high": ranked.time.high},
                    "price_per_million_tokens": self.price(ranked.time.seconds),
                }
                for ranked in self.best
            ],
            "ruled_out": [{"layout": str(ruled.layout), "reason": ruled.reason} for ruled in self.ruled_out],
        }

    def write(self, path: str | os.PathLike[str], number: int = 1) -> None:
        """Writes the configuration that trains with a layout.

        Args:
            path: a YAML file, which is replaced.
            number: the layout, from 1.

        Raises:
            ConfigurationError: if no layout fits, or the file cannot be written.
        """
        if not self.best:
            raise ConfigurationError("No layout fits, so there is no configuration to write.", where=os.fspath(path))
        ranked = self.best[number - 1]
        count = ranked.count
        calls = ranked.layout.accumulation
        head = (
            f"# {self.model} on {self.instances} x {self.instance}: {count.mesh}, {ranked.layout}\n"
            f"# a data-parallel rank calls the model with {count.micro_batch * count.accumulation // calls} samples of "
            f"{count.sequence} tokens\n"
        )
        try:
            text = head + yaml.safe_dump(ranked.layout.configuration(), sort_keys=False)
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"{os.fspath(path)} cannot be written: {error.strerror or error}.",
                fix="pass a file in an existing folder that can be written",
            ) from error


def search(
    model: str | os.PathLike[str] | Any,
    *,
    instances: int,
    instance: str,
    global_batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    attention: str = "eager",
    price_per_hour: float | None = None,
    calibration: Any = None,
    best: int = 10,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Search:
    """Finds the fastest layouts of a model that fit on some machines. See :func:`neuron_accel.plan`.

    Args:
        model, instance, global_batch, sequence, dtype, attention: see :func:`neuron_accel.plan`.
        instances: number of instances, all cores of which are used.
        price_per_hour: price of an instance for an hour.
        calibration: measured constants for the prediction of time.
        best: number of layouts to find.
        jobs: number of processes that dry runs are shared by, if they take long enough. Each has about half a gigabyte;
            with more than one the script needs ``if __name__ == "__main__":``, as with ``multiprocessing``.
        progress: called with the number of dry runs that are done, and that will be done.

    Raises:
        ConfigurationError: for an unknown model, instance or option.
    """
    kind = find_instance(instance)
    if instances < 1:
        raise ConfigurationError(f"instances is {instances}.", fix="pass at least 1")
    if instances > 1 and not kind.multi_node:
        raise ConfigurationError(
            f"{instances} instances of {instance} cannot train together.",
            where="instances",
            why="they have no network for groups over several machines",
            fix="pass 1, or a larger instance",
        )
    if jobs < 1:
        raise ConfigurationError(f"jobs is {jobs}.", fix="pass at least 1")
    arguments: dict[str, Any] = {
        "model": model,
        "world_size": instances * kind.hardware().full,
        "global_batch": global_batch,
        "sequence": sequence,
        "instance": instance,
        "dtype": dtype,
        "attention": attention,
    }
    planner = Planner(**arguments)
    with no_collection_of_what_is_there(), closing(_DryRuns(planner, arguments, calibration, jobs)) as dry_runs:
        found, ruled_out = _Searcher(planner, kind, dry_runs, progress).run(best)
    return Search(
        model=type(planner.model).__name__,
        parameters=planner.parameters,
        instance=instance,
        instances=instances,
        tokens=global_batch * sequence,
        best=tuple(found),
        ruled_out=tuple(ruled_out),
        price_per_hour=price_per_hour,
    )


@dataclass(frozen=True)
class _Estimate:
    """Of a layout: bytes of a rank, and seconds of a step if nothing but products and sending took time."""

    layout: Layout
    memory: float
    seconds: float


@dataclass(frozen=True)
class _Failed:
    """Why a layout is not possible; the bytes of a rank, if it is their number."""

    reason: str
    memory: int | None = None


class _Searcher:
    def __init__(
        self, planner: Planner, instance: Instance, dry_runs: _DryRuns, progress: Callable[[int, int], None]
    ) -> None:
        self._planner, self._instance, self._dry_runs, self._progress = planner, instance, dry_runs, progress
        self._core = instance.core_bytes()
        self._families: dict[str, Sequence[StepCount] | str] = {}
        self._sizes: dict[tuple[str, int], StepCount] = {}
        self._stages: dict[str, Stages | str | None] = {}

    def run(self, best: int) -> tuple[list[Ranked], list[RuledOut]]:
        """Returns the fastest layouts that fit, and all others."""
        ruled_out: list[RuledOut] = []
        possible: list[Layout] = []
        for layout in self._layouts():
            reason = self._cannot_fit(layout)
            if reason is None:
                possible.append(layout)
            else:
                ruled_out.append(RuledOut(layout=layout, reason=reason))
        families = {repr(_family(layout.plugins)): _family(layout.plugins) for layout in possible}
        total = len(families) + best
        self._progress(0, total)
        for done, (key, answer) in enumerate(
            self._dry_runs.answers(families.items(), len(families) + 3 * best), start=1
        ):
            assert not isinstance(answer, Ranked)
            self._families[key] = answer.reason if isinstance(answer, _Failed) else answer
            self._progress(done, total)
        estimates = []
        for layout in possible:
            estimate = self._estimate(layout)
            if isinstance(estimate, str):
                ruled_out.append(RuledOut(layout=layout, reason=estimate))
            else:
                estimates.append(estimate)
        estimates.sort(key=lambda estimate: (estimate.seconds, estimate.memory))
        found, others = self._count_first(estimates, best, lambda done: self._progress(len(families) + done, total))
        self._progress(total, total)
        return sorted(found, key=lambda ranked: ranked.time.seconds), ruled_out + others

    def _count_first(
        self, estimates: Sequence[_Estimate], best: int, progress: Callable[[int], None]
    ) -> tuple[list[Ranked], list[RuledOut]]:
        """Counts layouts, in order, until ``best`` of them fit; returns these, and the reasons against the others."""
        found: list[Ranked] = []
        ruled_out: list[RuledOut] = []
        too_low: dict[
            str, float
        ] = {}  # bytes that an estimate was too low by, of layouts that keep the same activations

        def cannot_fit(estimate: _Estimate) -> str | None:
            missing = too_low.get(self._same_activations(estimate.layout))
            if missing is None or estimate.memory + missing <= self._core:
                return None
            memory = (estimate.memory + missing) / 2**30
            return f"about {memory:.1f} GiB, from one that keeps the same activations; {self._of_core()}"

        to_count = ((str(n), e.layout) for n, e in enumerate(estimates) if cannot_fit(e) is None)
        counted = set()
        for name, answer in self._dry_runs.answers(to_count, 3 * best):
            estimate = estimates[int(name)]
            counted.add(int(name))
            reason = cannot_fit(estimate)  # again: others were counted in between
            if reason is None and isinstance(answer, Ranked):
                found.append(answer)
                progress(len(found))
                if len(found) == best:
                    break
                continue
            assert isinstance(answer, _Failed)
            if reason is None and answer.memory is not None:
                too_low[self._same_activations(estimate.layout)] = max(0.0, answer.memory - estimate.memory)
            ruled_out.append(RuledOut(layout=estimate.layout, reason=reason or answer.reason))
        for number, estimate in enumerate(estimates):
            if number not in counted:
                slower = f"at least {estimate.seconds:.3g} s for products and sending alone; {best} others are counted"
                ruled_out.append(RuledOut(layout=estimate.layout, reason=cannot_fit(estimate) or slower))
        return found, ruled_out

    def _same_activations(self, layout: Layout) -> str:
        """What is equal for layouts that keep the same activations."""
        staged = [plugin for plugin in layout.plugins if plugin.spec.phase == Phase.STAGES]
        return f"{_family(layout.plugins)!r} {staged!r} {layout.accumulation}"

    def _of_core(self) -> str:
        return f"a core has {self._core / 2**30:.3g} GiB"

    # ---- what there is -----------------------------------------------------------------------------------------------
    def _layouts(self) -> Iterator[Layout]:
        space = self._planner.space(())
        for chosen in _combinations(_offering(), space):
            rows, rest = divmod(space.global_batch, dataclasses.replace(space, chosen=chosen).data_ranks)
            if rest or not rows:
                continue  # fewer samples than ranks: the plugins' degrees are too small
            if any(axis.kind is AxisKind.STAGE and axis.degree > 1 for p in chosen for axis in p.axes()):
                yield Layout(plugins=chosen, accumulation=1)
                continue
            for size in _MICRO_BATCHES:
                if rows % size == 0:
                    yield Layout(plugins=chosen, accumulation=rows // size)

    # ---- bounds ------------------------------------------------------------------------------------------------------
    def _cannot_fit(self, layout: Layout) -> str | None:
        """The reason why the model's state alone does not fit, or None."""
        sharded = math.prod(axis.degree for plugin in layout.plugins for axis in plugin.axes() if _shards(axis.kind))
        replicas = self._planner.world_size // sharded
        own = self._planner.parameters / sharded
        parts = {part for plugin in layout.plugins for part in plugin.sharded_over_replicas()}
        width = 2 if self._planner.dtype == "bfloat16" else 4
        least = width * own / (replicas if "weights" in parts else 1)
        # Where the state is sharded, gradients may be summed into shards as they come.
        least += width * own / (replicas if parts & {"gradients", "optimizer state"} else 1)
        least += _STATE_BYTES * own / replicas if "optimizer state" in parts else 2 * width * own
        if least <= self._core:
            return None
        return f"weights, gradients and optimizer state are {least / 2**30:.3g} GiB, {self._of_core()}"

    def _of_stage(self, plugins: tuple[StrategyPlugin, ...]) -> Stages | str | None:
        for plugin in plugins:
            key = repr(plugin)
            if key not in self._stages:
                try:
                    self._stages[key] = plugin.stages(self._planner.model)
                except NeuronAccelError as error:
                    self._stages[key] = _first_line(error)
            if self._stages[key] is not None:
                return self._stages[key]
        return None

    def _estimate(self, layout: Layout) -> _Estimate | str:
        key = repr(_family(layout.plugins))
        shallow = self._families[key]
        stages = self._of_stage(layout.plugins)
        if isinstance(shallow, str):
            return shallow
        if isinstance(stages, str):
            return stages
        ranks = 1 if stages is None else len(stages.blocks)
        own = math.ceil(self._planner.layers / ranks)
        if (key, own) not in self._sizes:
            depth = min(own, self._planner.layers)
            self._sizes[key, own] = extrapolate(shallow, depth, self._planner.blocks or "", depth - 1)
        count = self._sizes[key, own]
        space = self._planner.space(layout.plugins)
        rows = self._planner.global_batch // space.data_ranks
        batch = rows // (layout.accumulation if stages is None else stages.microbatches)
        kept = 1.0
        if stages is not None:
            kept = max(stages.in_flight) / len(stages.blocks[0])
        memory = self._memory(layout, count, batch, kept)
        if memory > self._core * _SLACK:
            return f"about {memory / 2**30:.1f} GiB, estimated from one sample; {self._of_core()}"
        busy = rows * count.operations / (self._instance.peak_tflops() * 1e12)
        sending = rows * sum(flow.sent for flow in count.flows) / self._bandwidth(_inner(layout.plugins))
        bubble = 0.0 if stages is None else stages.bubble
        return _Estimate(layout, memory, (busy + sending) / (1 - bubble) + self._gradients(layout, count))

    def _memory(self, layout: Layout, count: StepCount, batch: int, kept: float) -> float:
        """Bytes of a rank, from a step of one sample that began without optimizer state."""
        parts = {part for plugin in layout.plugins for part in plugin.sharded_over_replicas()}
        replicas = self._planner.space(layout.plugins).replicas
        elements = count.weights / (2 if self._planner.dtype == "bfloat16" else 4)
        held = count.weights / (replicas if "weights" in parts else 1)
        held += _STATE_BYTES * elements / replicas if "optimizer state" in parts else 2 * count.weights
        most = 0.0
        for peak in count.peaks:
            now = peak.parts[GRADIENTS] / (replicas if "gradients" in parts else 1)
            if peak.moment.phase in ("forward", "backward"):
                now += batch * (kept * peak.parts[ACTIVATIONS] + peak.parts[TEMPORARY])
            most = max(most, now)
        return held + most

    def _gradients(self, layout: Layout, count: StepCount) -> float:
        """Seconds in which gradients are summed over replicas."""
        space = self._planner.space(layout.plugins)
        if space.replicas == 1:
            return 0.0
        sent = 2 * count.weights * (space.replicas - 1) / space.replicas
        return sent / self._bandwidth(self._planner.world_size)

    def _bandwidth(self, extent: int) -> float:
        """Bytes per second of a rank in groups within ``extent`` neighbouring ranks: NeuronLink, or EFA."""
        return link_bandwidth(self._instance, extent)


# ---- dry runs, in one process or several -----------------------------------------------------------------------------
_Task = tuple[StrategyPlugin, ...] | Layout
"""Plugins whose steps of few blocks are run, or a layout that is counted."""
_Answer = Sequence[StepCount] | Ranked | _Failed
_WORTHWHILE = 20.0
"""Seconds of dry runs from which on more processes gain more than their start takes."""


class _DryRuns:
    """Dry-runs steps in this process, or in several processes if that takes long.

    Args:
        planner: the planner of this process.
        arguments: those that it was created with.
        calibration: measured constants for the prediction of time, or None.
        jobs: the most processes.
    """

    def __init__(self, planner: Planner, arguments: Mapping[str, Any], calibration: Any, jobs: int) -> None:
        self._planner, self._arguments, self._calibration, self._jobs = planner, arguments, calibration, jobs
        self._processes: dict[Connection, SpawnProcess] = {}
        self._seconds: list[float] = []

    def answers(self, tasks: Iterable[tuple[str, _Task]], number: int) -> Iterator[tuple[str, _Answer]]:
        """Yields the name and the answer of each task, in order.

        Args:
            tasks: names and tasks. The next one is taken when a process is free for it.
            number: about how many there are.
        """
        tasks = iter(tasks)
        if not self._processes:
            for done, (name, task) in enumerate(tasks):
                started = time.perf_counter()
                answer = _answer(self._planner, self._calibration, task)
                self._seconds.append(time.perf_counter() - started)
                yield name, answer
                mean = sum(self._seconds) / len(self._seconds)
                if self._jobs > 1 and mean * (number - done - 1) > _WORTHWHILE:
                    self._start()
                    break
        if self._processes:
            yield from self._elsewhere(tasks)

    def close(self) -> None:
        """Ends the processes."""
        for connection, process in self._processes.items():
            process.kill()
            process.join()
            connection.close()
        self._processes.clear()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._jobs):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._arguments, self._calibration), daemon=True)
            process.start()
            there.close()
            self._processes[here] = process

    def _elsewhere(self, tasks: Iterator[tuple[str, _Task]]) -> Iterator[tuple[str, _Answer]]:
        waiting: deque[str] = deque()
        answers: dict[str, _Answer] = {}
        free, busy = list(self._processes), dict[Connection, str]()
        while True:
            while free and (following := next(tasks, None)) is not None:
                name, task = following
                connection = free.pop()
                try:
                    connection.send(task)
                except OSError:
                    raise self._ended(connection) from None
                busy[connection] = name
                waiting.append(name)
            if not waiting:
                return
            for connection in [each for each in wait(busy) if isinstance(each, Connection)]:
                try:
                    answers[busy.pop(connection)] = connection.recv()
                except (EOFError, OSError):
                    raise self._ended(connection) from None
                free.append(connection)
            while waiting and waiting[0] in answers:
                name = waiting.popleft()
                yield name, answers.pop(name)

    def _ended(self, connection: Connection) -> UsageError:
        process = self._processes[connection]
        process.join()
        return UsageError(
            f"A process of the search ended with exit code {process.exitcode}.",
            why="its own error, if it had one, is printed above; a negative code is a signal, and -9 often means that "
            "the machine has too little memory",
            fix="search in this process: jobs=1, or --jobs 1",
        )


def _serve(connection: Connection, arguments: Mapping[str, Any], calibration: Any) -> None:
    """Answers tasks until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks is interrupted, and ends this one
    torch.set_num_threads(1)
    planner = Planner(**arguments)
    with no_collection_of_what_is_there():
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            connection.send(_answer(planner, calibration, task))


def _answer(planner: Planner, calibration: Any, task: _Task) -> _Answer:
    try:
        if not isinstance(task, Layout):
            return planner.shallow(task)
        count = planner.count(task.plugins, task.accumulation, rank=0, quick=True)
        if count.fits:  # other ranks may keep more
            count = planner.count(task.plugins, task.accumulation, quick=True)
    except NeuronAccelError as error:
        return _Failed(_first_line(error))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return _Failed(f"its dry run failed: {_first_line(error)}")
    if not count.fits:
        assert count.core_bytes is not None
        peak = count.step.peak
        largest = max(peak.parts, key=lambda part: peak.parts[part])
        return _Failed(
            f"{peak.total / 2**30:.1f} GiB, most of it {largest} ({peak.parts[largest] / 2**30:.1f} GiB); "
            f"a core has {count.core_bytes / 2**30:.3g} GiB",
            peak.total,
        )
    return Ranked(layout=task, count=count, time=count.predict(calibration))


# ---- layouts and links -----------------------------------------------------------------------------------------------
def link_bandwidth(instance: Instance, extent: int) -> float:
    """Bytes per second of one rank of ``instance`` to ranks among ``extent`` neighbours: a rank's part of the bandwidth
    of its chip's NeuronLinks within a machine, of the machine's network beyond it; infinite if it is not known."""
    full = instance.hardware().full
    if extent <= full:
        chip = max(1, instance.cores() // instance.chips)
        return math.inf if instance.link_gb_per_s is None else instance.link_gb_per_s * 1e9 / chip
    return math.inf if instance.efa_gbps is None else instance.efa_gbps * 1e9 / 8 / full


def _shards(kind: AxisKind) -> bool:
    """Whether weights may be sharded along an axis that a plugin adds."""
    return kind in (AxisKind.MODEL, AxisKind.STAGE, AxisKind.DATA)


def _family(plugins: tuple[StrategyPlugin, ...]) -> tuple[StrategyPlugin, ...]:
    return tuple(plugin for plugin in plugins if plugin.spec.phase not in _REST)


def _inner(plugins: tuple[StrategyPlugin, ...]) -> int:
    return math.prod(axis.degree for plugin in _family(plugins) for axis in plugin.axes())


def _offering() -> list[type[StrategyPlugin]]:
    """The plugin classes that offer layouts, in the order in which they act. Packages that cannot be loaded are left
    out, as they are for training."""
    found = [
        cls
        for cls in plugin_classes()
        if cls.layouts.__func__ is not StrategyPlugin.layouts.__func__  # type: ignore[attr-defined]
    ]
    return sorted(found, key=lambda cls: (cls.spec.phase, cls.spec.name))


def _combinations(classes: Sequence[type[StrategyPlugin]], space: LayoutSpace) -> Iterator[tuple[StrategyPlugin, ...]]:
    if not classes:
        yield space.chosen
        return
    first, *others = classes
    yield from _combinations(others, space)
    if any(_exclude(first, type(plugin)) for plugin in space.chosen):
        return
    for plugin in first.layouts(space):
        yield from _combinations(others, dataclasses.replace(space, chosen=(*space.chosen, plugin)))


def _exclude(one: type[StrategyPlugin], other: type[StrategyPlugin]) -> bool:
    a, b = one.spec, other.spec
    return bool(a.claims & b.claims or b.name in a.conflicts or a.name in b.conflicts)


def _text(plugin: StrategyPlugin) -> str:
    options = ", ".join(f"{name}={value}" for name, value in _options(plugin).items())
    return f"{plugin.spec.name}({options})" if options else plugin.spec.name


def _options(plugin: StrategyPlugin) -> dict[str, Any]:
    """The options that are not the defaults."""
    ((options,),) = (entry.values() for entry in to_config([plugin])["plugins"])
    changed = {field.name for field in dataclasses.fields(plugin) if getattr(plugin, field.name) != field.default}
    return {name: value for name, value in options.items() if name in changed}


def _entry(plugin: StrategyPlugin) -> str | Mapping[str, Any]:
    options = _options(plugin)
    return {plugin.spec.name: options} if options else plugin.spec.name


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
