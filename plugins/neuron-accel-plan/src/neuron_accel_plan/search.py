# SPDX-License-Identifier: Apache-2.0
"""Searches the layouts of a model on a number of machines: all that the installed plugins support. Layouts that cannot
fit or run are ruled out with a reason; the others are ranked by predicted time.

One micro-batch of one sample is dry-run for every variant of a block (tensor parallelism, sequence parallelism,
recomputation and so on), on the smallest mesh. From that the memory of each layout is estimated, and a bound below
which its predicted time is not, whatever its stages, replicas and micro-batches are. Then the layout with the least
bound is examined more closely, again and again: a micro-batch of its own size is run, and at last the layout itself is
counted and its time predicted. A predicted time that is below all bounds is the next best one (best-first search).
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
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
from typing import TYPE_CHECKING, Any

import torch
import yaml

from neuron_accel import Instance, find_instance
from neuron_accel.commands import plugin_classes, to_config
from neuron_accel.contract import (
    AxisKind,
    ConfigurationError,
    LayoutSpace,
    NeuronAccelError,
    Phase,
    Stages,
    StrategyPlugin,
    UsageError,
)
from neuron_accel_plan.layout import LayoutCount, Planner, no_collection_of_what_is_there
from neuron_accel_plan.memory import ACTIVATIONS, GRADIENTS, TEMPORARY
from neuron_accel_plan.step import StepCount, extrapolate
from neuron_accel_plan.time import (
    PASSES,
    PRODUCTS,
    WAITING,
    StepTime,
    collective_seconds,
    constants_of,
    multiplying_seconds,
    spent_seconds,
)
from neuron_accel_plan.trace import Message

if TYPE_CHECKING:
    from neuron_accel_plan.calibration import Machine

_REST = frozenset({Phase.STAGES, Phase.GRADIENTS, Phase.OPTIMIZER})
"""Phases of plugins that do not change what a block computes."""
_STATE_BYTES = 12  # of an fp32 master weight and two moments
_SLACK = 1.1
"""Layouts whose estimated memory exceeds the memory of a core by more than this factor are not counted."""


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
        parts = [text(plugin) for plugin in self.plugins]
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
    """A layout that does not fit or cannot run, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A layout that may fit, and is slower than all that were found.

    Args:
        layout: the layout.
        seconds: what a step takes at least, by a bound of the predicted time; the predicted time if it was counted.
        counted: whether it was counted, and fits.
    """

    layout: Layout
    seconds: float
    counted: bool


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
        ruled_out: those that do not fit or cannot run.
        slower: all others.
        price_per_hour: price of an instance for an hour; None if it was not given.
    """

    model: str
    parameters: int
    instance: str
    instances: int
    tokens: int
    best: tuple[Ranked, ...]
    ruled_out: tuple[RuledOut, ...] = field(repr=False)
    slower: tuple[Slower, ...] = field(default=(), repr=False)
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
            "slower": [
                {"layout": str(each.layout), "seconds_at_least": each.seconds, "counted": each.counted}
                for each in self.slower
            ],
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
            written = head + yaml.safe_dump(ranked.layout.configuration(), sort_keys=False)
            Path(path).write_text(written, encoding="utf-8")
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
    reserve: int | None = None,
    price_per_hour: float | None = None,
    calibration: Any = None,
    best: int = 10,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Search:
    """Finds the fastest layouts of a model that fit on some machines. See :func:`neuron_accel.plan`.

    Args:
        model, instance, global_batch, sequence, dtype, attention, reserve: see :func:`neuron_accel.plan`.
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
    if price_per_hour is not None and not 0 < price_per_hour < math.inf:
        raise ConfigurationError(f"price_per_hour is {price_per_hour:g}.", fix="pass a price above 0")
    for name, number in (("jobs", jobs), ("best", best)):
        if number < 1:
            raise ConfigurationError(f"{name} is {number}.", fix="pass at least 1")
    arguments: dict[str, Any] = {
        "model": model,
        "world_size": instances * kind.hardware().full,
        "global_batch": global_batch,
        "sequence": sequence,
        "instance": instance,
        "dtype": dtype,
        "attention": attention,
        "reserve": reserve,
    }
    planner = Planner(**arguments)
    with no_collection_of_what_is_there(), closing(_DryRuns(planner, arguments, calibration, jobs)) as dry_runs:
        found, slower, ruled_out = _Searcher(planner, kind, dry_runs, calibration, progress).run(best)
    return Search(
        model=type(planner.model).__name__,
        parameters=planner.parameters,
        instance=instance,
        instances=instances,
        tokens=global_batch * sequence,
        best=tuple(found),
        ruled_out=tuple(ruled_out),
        slower=tuple(slower),
        price_per_hour=price_per_hour,
    )


@dataclass(frozen=True)
class _Estimate:
    """Of a layout: bytes of a rank, and a bound of the seconds of a step.

    Args:
        layout: the layout.
        micro_batches: micro-batches of a data-parallel rank in a step.
        memory: bytes, which may be too low or too high.
        seconds: what the predicted time is not below.
        sample: what to run for a better estimate; None: the layout itself.
    """

    layout: Layout
    micro_batches: int
    memory: float
    seconds: float
    sample: _Sample | None = None


@dataclass(frozen=True)
class _Sample:
    """One micro-batch on the smallest mesh, which stands for all layouts with the same variant of a block.

    Args:
        family: the plugins that change what a block computes.
        rows: samples of a data-parallel rank.
    """

    family: tuple[StrategyPlugin, ...]
    rows: int


@dataclass(frozen=True)
class _Failed:
    """Why a layout is not possible; the bytes of a rank, if it is their number."""

    reason: str
    memory: int | None = None


@dataclass(frozen=True)
class _Line:
    """A number that grows with that of blocks: that of a model without blocks, and that of a block."""

    base: float
    block: float

    @classmethod
    def through(cls, depths: tuple[int, int], few: float, more: float) -> _Line:
        """From the numbers of models with so many blocks."""
        block = (more - few) / (depths[1] - depths[0])
        return cls(few - depths[0] * block, block)

    def of_model(self, blocks: int) -> float:
        return self.base + blocks * self.block


class _Times:
    """Seconds of a micro-batch, from a sample, without what it waits for over ranks that average gradients: that is
    once in a step."""

    def __init__(
        self, counts: Sequence[StepCount], depths: tuple[int, int], machine: Machine, averaging: frozenset[str]
    ) -> None:
        self._counts, self._depths, self._machine = counts, depths, machine
        waits = {f"{WAITING} {axis}" for axis in averaging}
        spent = [
            {what: seconds for what, seconds in spent_seconds(count, machine).items() if what[1] not in waits}
            for count in counts
        ]

        def line(phases: Iterable[str], parts: Callable[[str], bool] = lambda part: True) -> _Line:
            sums = [sum(s for (phase, part), s in each.items() if phase in phases and parts(part)) for each in spent]
            return _Line.through(depths, *sums)

        phases = {phase for each in spent for phase, _ in each}
        self.passes = line(PASSES)
        self.backward = line(["backward"])
        self.products = line(PASSES, lambda part: part == PRODUCTS)
        self.rest = line(phases - {*PASSES})
        self._others = line(PASSES, lambda part: part != PRODUCTS and not part.startswith(WAITING))
        self.operations = _Line.through(depths, *(count.operations for count in counts))
        self.weights = _Line.through(depths, *(count.weights for count in counts))

    def of_more(self, times: float) -> tuple[_Line, _Line]:
        """What the passes, and their products, of a micro-batch that is so much larger are not below."""
        products = _Line.through(
            self._depths, *(multiplying_seconds(count, self._machine, times) for count in self._counts)
        )
        return _Line(products.base + self._others.base, products.block + self._others.block), products


class _Searcher:
    def __init__(
        self,
        planner: Planner,
        instance: Instance,
        dry_runs: _DryRuns,
        calibration: Machine | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self._planner, self._instance, self._dry_runs, self._progress = planner, instance, dry_runs, progress
        self._machine = constants_of(instance, calibration)
        self._core = instance.core_bytes() - planner.reserve
        self._samples: dict[str, Sequence[StepCount] | str] = {}
        self._times: dict[str, _Times] = {}
        self._sizes: dict[tuple[str, int], StepCount] = {}
        self._stages: dict[str, Stages | str | None] = {}

    def run(self, best: int) -> tuple[list[Ranked], list[Slower], list[RuledOut]]:
        """Returns the fastest layouts that fit, those that are slower, and those that are not possible."""
        ruled_out: list[RuledOut] = []
        possible: list[Layout] = []
        for layout in self._layouts():
            reason = self._cannot_fit(layout)
            if reason is None:
                possible.append(layout)
            else:
                ruled_out.append(RuledOut(layout=layout, reason=reason))
        samples = [_Sample(_family(layout.plugins), 1) for layout in possible]
        first = {repr(sample): sample for sample in samples}
        self._progress(0, len(first) + best)
        for done, (name, answer) in enumerate(self._dry_runs.answers(first.items(), len(first) + 3 * best), start=1):
            self._keep(name, answer)
            self._progress(done, len(first) + best)
        estimates = []
        for layout in possible:
            estimate = self._estimate(layout)
            if isinstance(estimate, str):
                ruled_out.append(RuledOut(layout=layout, reason=estimate))
            else:
                estimates.append(estimate)
        found, slower, others = self._best_first(
            estimates, best, lambda done, more: self._progress(len(first) + done, len(first) + done + more)
        )
        return found, slower, ruled_out + others

    def _keep(self, name: str, answer: _Answer) -> None:
        assert not isinstance(answer, Ranked)
        self._samples[name] = answer.reason if isinstance(answer, _Failed) else answer

    def _best_first(
        self, estimates: Iterable[_Estimate], best: int, progress: Callable[[int, int], None]
    ) -> tuple[list[Ranked], list[Slower], list[RuledOut]]:
        """Runs what has the least bound until ``best`` layouts are counted whose predicted time is below all bounds."""
        order = itertools.count()
        heap: list[tuple[float, int, float, int, _Estimate | Ranked]] = []

        def push(each: _Estimate | Ranked) -> None:
            if isinstance(each, Ranked):
                key = each.time.seconds, each.count.accumulation, float(each.count.step.peak.total)
            else:
                key = each.seconds, each.micro_batches, each.memory
            heapq.heappush(heap, (*key, next(order), each))

        for estimate in estimates:
            push(estimate)
        found: list[Ranked] = []
        ruled_out: list[RuledOut] = []
        too_low: dict[str, float] = {}  # bytes by which an estimate was, of layouts that keep the same activations
        done = 0
        while heap and len(found) < best:
            if isinstance(heap[0][-1], Ranked):
                found.append(heapq.heappop(heap)[-1])  # type: ignore[arg-type]
                continue
            tasks: dict[str, _Task] = {}
            taken: dict[str, list[_Estimate]] = {}
            while heap and len(tasks) < self._dry_runs.width and isinstance(heap[0][-1], _Estimate):
                estimate = heapq.heappop(heap)[-1]  # type: ignore[assignment]
                layout = estimate.layout
                memory = estimate.memory + too_low.get(self._same_activations(layout), 0.0)
                if self._same_activations(layout) in too_low and memory > self._core:
                    reason = f"about {memory / 2**30:.1f} GiB, from one that keeps the same activations"
                    ruled_out.append(RuledOut(layout=layout, reason=f"{reason}; {self._of_core()}"))
                    continue
                name = repr(layout if estimate.sample is None else estimate.sample)
                if name not in self._samples:
                    tasks[name] = layout if estimate.sample is None else estimate.sample
                taken.setdefault(name, []).append(estimate)
            for name, answer in self._dry_runs.answers(tasks.items(), 3 * best):
                done += 1
                if isinstance(tasks[name], _Sample):
                    self._keep(name, answer)
                elif isinstance(answer, Ranked):
                    push(answer)
                else:
                    (estimate,) = taken[name]
                    assert isinstance(answer, _Failed)
                    if answer.memory is not None:
                        same = self._same_activations(estimate.layout)
                        too_low[same] = max(0.0, answer.memory - estimate.memory)
                    ruled_out.append(RuledOut(layout=estimate.layout, reason=answer.reason))
            progress(done, best - len(found))
            for layout in (each.layout for name in taken if name in self._samples for each in taken[name]):
                again = self._estimate(layout)
                if isinstance(again, str):
                    ruled_out.append(RuledOut(layout=layout, reason=again))
                else:
                    push(again)
        progress(done, 0)
        slower = [
            Slower(layout=each.layout, seconds=seconds, counted=isinstance(each, Ranked))
            for seconds, _, _, _, each in sorted(heap, key=lambda item: item[:4])
        ]
        return found, slower, ruled_out

    def _same_activations(self, layout: Layout) -> str:
        """What is equal for layouts that keep the same activations."""
        staged = [plugin for plugin in layout.plugins if plugin.spec.phase == Phase.STAGES]
        return f"{_family(layout.plugins)!r} {staged!r} {layout.accumulation}"

    def _of_core(self) -> str:
        return f"a core has {self._core / 2**30:.3g} GiB without its reserve"

    # ---- what there is -----------------------------------------------------------------------------------------------
    def _layouts(self) -> Iterator[Layout]:
        space = self._planner.space(())
        for chosen in _combinations(offering(), space):
            rows, rest = divmod(space.global_batch, dataclasses.replace(space, chosen=chosen).data_ranks)
            if rest or not rows:
                continue  # fewer samples than ranks: the plugins' degrees are too small
            if any(axis.kind is AxisKind.STAGE and axis.degree > 1 for p in chosen for axis in p.axes()):
                yield Layout(plugins=chosen, accumulation=1)
                continue
            yield from (Layout(plugins=chosen, accumulation=rows // size) for size in _micro_batches(rows))

    # ---- bounds ------------------------------------------------------------------------------------------------------
    def _cannot_fit(self, layout: Layout) -> str | None:
        """The reason why the model's state alone does not fit, or None."""
        sharded = math.prod(axis.degree for plugin in layout.plugins for axis in plugin.axes() if _shards(axis.kind))
        replicas = self._planner.world_size // sharded
        own = self._planner.parameters / sharded
        parts = _sharded(layout)
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
        family, stages = _family(layout.plugins), self._of_stage(layout.plugins)
        space = self._planner.space(layout.plugins)
        rows = self._planner.global_batch // space.data_ranks
        if isinstance(stages, str):
            return stages
        number = layout.accumulation if stages is None else stages.microbatches
        own = sample = _Sample(family, rows // number)
        if repr(own) not in self._samples:
            sample = _Sample(family, 1)
        counts = self._samples[repr(sample)]
        if isinstance(counts, str):
            return counts
        times = (rows // number) / sample.rows
        memory = self._memory(layout, sample, stages, times, number)
        if memory > self._core * _SLACK:
            return f"about {memory / 2**30:.1f} GiB, estimated from one micro-batch; {self._of_core()}"
        seconds = self._least_seconds(layout, sample, stages, times, number)
        return _Estimate(layout, number, memory, seconds, None if sample == own else own)

    def _memory(
        self, layout: Layout, sample: _Sample, stages: Stages | None, times: float, micro_batches: int
    ) -> float:
        """Bytes of a rank, from a step of a sample that began without optimizer state.

        Args:
            layout: the layout.
            sample: the sample.
            stages: those of its pipeline.
            times: size of a micro-batch, by that of the sample.
            micro_batches: number of micro-batches.
        """
        own = math.ceil(self._planner.layers / (1 if stages is None else len(stages.blocks)))
        if (repr(sample), own) not in self._sizes:
            shallow = self._samples[repr(sample)]
            assert not isinstance(shallow, str)
            self._sizes[repr(sample), own] = extrapolate(
                shallow, own, self._planner.blocks or "", own - 1, self._planner.depths
            )
        count = self._sizes[repr(sample), own]
        kept = 1.0 if stages is None else max(stages.in_flight) / len(stages.blocks[0])
        parts = _sharded(layout)
        replicas = self._planner.space(layout.plugins).replicas
        elements = count.weights / (2 if self._planner.dtype == "bfloat16" else 4)
        held = count.weights / (replicas if "weights" in parts else 1)
        held += _STATE_BYTES * elements / replicas if "optimizer state" in parts else 2 * count.weights
        most = 0.0
        for peak in count.peaks:
            gradients = float(peak.parts[GRADIENTS])
            if peak.moment.phase in PASSES:
                if micro_batches > 1:  # they wait for the last micro-batch
                    gradients = max(gradients, count.weights)
                gradients /= replicas if "gradients" in parts else 1
                gradients += times * (kept * peak.parts[ACTIVATIONS] + peak.parts[TEMPORARY])
            else:
                gradients /= replicas if parts & {"gradients", "optimizer state"} else 1
            most = max(most, gradients)
        return held + most

    def _least_seconds(
        self, layout: Layout, sample: _Sample, stages: Stages | None, times: float, micro_batches: int
    ) -> float:
        """What the predicted time of a step is not below: the passes of all micro-batches, the update, and what of the
        reduction of gradients cannot be hidden. See :meth:`_memory`."""
        found = self._times_of(sample)
        passes, products = (found.passes, found.products) if times == 1 else found.of_more(times)
        parts, space = _sharded(layout), self._planner.space(layout.plugins)
        if stages is None:
            blocks = self._planner.layers
            each, rest, weights = (line.of_model(blocks) for line in (passes, found.rest, found.weights))
            hidden = 1.0
        else:  # of the stage with most operations; only the last one has the head
            last = len(stages.blocks) - 1
            sizes = [sum(own) for own in stages.blocks]
            operations = [size * found.operations.block for size in sizes]
            operations[last] += found.operations.base
            slowest = operations.index(max(operations))
            each = sizes[slowest] * passes.block + (products.base if slowest == last else 0.0)
            rest, weights = (sizes[slowest] * line.block for line in (found.rest, found.weights))
            hidden = 1 - stages.bubble
        rest /= space.replicas if "optimizer state" in parts else 1
        reduction = self._reduction(layout, weights)
        overlap = min(1.0, self._machine.overlap.at())
        least = micro_batches * each / hidden + rest + (1 - overlap) * reduction
        if stages is None and times == 1:
            # Reduction begins in the last backward pass. Its second half, of weights, may run beside the update.
            tail = 0.0 if "weights" in parts else reduction / 2
            before = micro_batches * each - found.backward.of_model(self._planner.layers)
            least = max(least, before + reduction / 2 + max(rest, tail))
        return least

    def _times_of(self, sample: _Sample) -> _Times:
        key = repr(sample)
        if key not in self._times:
            counts = self._samples[key]
            assert not isinstance(counts, str)
            averaging = {axis.name for plugin in sample.family for axis in plugin.axes() if axis.kind in _AVERAGING}
            axes = {m.axis for count in counts for _, trace in count.traces for m in trace.messages}
            waits = frozenset(axis for axis in axes if averaging & {*axis.split(" x ")})
            self._times[key] = _Times(counts, self._planner.depths, self._machine, waits)
        return self._times[key]

    def _reduction(self, layout: Layout, weights: float) -> float:
        """Seconds in which gradients of so many bytes are summed over replicas, and weights gathered if only their
        shards are updated, if nothing else is sent."""
        space = self._planner.space(layout.plugins)
        if space.replicas == 1:
            return 0.0
        inside = math.prod(axis.degree for p in layout.plugins for axis in p.axes() if axis.kind is not AxisKind.STAGE)
        group = tuple(range(0, space.replicas * inside, inside))
        sent = round(weights * (space.replicas - 1) / space.replicas)

        def seconds(op: str, size: int) -> float:
            return collective_seconds(self._machine, Message(op, "dp", group, size, self._planner.dtype))

        return min(seconds("all_reduce", 2 * sent), seconds("reduce_scatter", sent) + seconds("all_gather", sent))


# ---- dry runs, in one process or several -----------------------------------------------------------------------------
_Task = _Sample | Layout
"""A sample whose steps of few blocks are run, or a layout that is counted."""
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

    @property
    def width(self) -> int:
        """Number of tasks that run at the same time."""
        return max(1, len(self._processes))

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
        if isinstance(task, _Sample):
            return planner.shallow(task.family, task.rows)
        count = planner.count(task.plugins, task.accumulation, rank=0)
        if count.fits:  # other ranks may keep more
            count = planner.count(task.plugins, task.accumulation)
    except NeuronAccelError as error:
        return _Failed(_first_line(error))
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return _Failed(f"its dry run failed: {_first_line(error)}")
    if not count.compiles:
        return _Failed(next(str(finding) for finding in count.findings if finding.certain))
    if not count.fits:
        assert count.core_bytes is not None
        peak, room = count.step.peak, count.core_bytes - count.reserve
        largest = max(peak.parts, key=lambda part: peak.parts[part])
        return _Failed(
            f"{peak.total / 2**30:.1f} GiB, most of it {largest} ({peak.parts[largest] / 2**30:.1f} GiB); "
            f"a core has {room / 2**30:.3g} GiB without its reserve",
            peak.total,
        )
    return Ranked(layout=task, count=count, time=count.predict(calibration))


# ---- layouts -----------------------------------------------------------------------------------------------
_AVERAGING = (AxisKind.DATA, AxisKind.SEQUENCE)


def _micro_batches(rows: int) -> list[int]:
    """Sizes of micro-batches that are tried: the powers of two that divide a rank's samples, and all of them."""
    powers = [1 << n for n in range(rows.bit_length()) if rows % (1 << n) == 0]
    return powers if powers[-1] == rows else [*powers, rows]


def _sharded(layout: Layout) -> set[str]:
    """What is sharded over replicas."""
    return {part for plugin in layout.plugins for part in plugin.sharded_over_replicas()}


def _shards(kind: AxisKind) -> bool:
    """Whether weights may be sharded along an axis that a plugin adds."""
    return kind in (AxisKind.MODEL, AxisKind.STAGE, AxisKind.DATA)


def _family(plugins: tuple[StrategyPlugin, ...]) -> tuple[StrategyPlugin, ...]:
    return tuple(plugin for plugin in plugins if plugin.spec.phase not in _REST)


def offering() -> list[type[StrategyPlugin]]:
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
    if any(exclude(first, type(plugin)) for plugin in space.chosen):
        return
    for plugin in first.layouts(space):
        yield from _combinations(others, dataclasses.replace(space, chosen=(*space.chosen, plugin)))


def exclude(one: type[StrategyPlugin], other: type[StrategyPlugin]) -> bool:
    """Whether plugins of two classes cannot run together."""
    a, b = one.spec, other.spec
    return bool(a.claims & b.claims or b.name in a.conflicts or a.name in b.conflicts)


def text(plugin: StrategyPlugin) -> str:
    """Returns the name of a plugin, with the options that are not the defaults."""
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
