# SPDX-License-Identifier: Apache-2.0
"""What is known of a layout before it is counted, from dry runs of one micro-batch on the smallest mesh: about how much
memory a rank needs, and what the predicted time of a step is not below."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel import ActivationCheckpointingPlugin, ChunkedLossPlugin, Instance
from neuron_accel.contract import AxisKind, AxisSpec, StrategyPlugin
from neuron_accel.errors import NeuronAccelError
from neuron_accel_plan.candidates import Layout, family_of
from neuron_accel_plan.dry_runs import Answer, Failed, Ranked, Sample, first_line
from neuron_accel_plan.layout import Planner
from neuron_accel_plan.memory import ACTIVATIONS, GRADIENTS, TEMPORARY
from neuron_accel_plan.spaces import Stages, has_stages, stages_of
from neuron_accel_plan.step import StepCount, block_of, extrapolate
from neuron_accel_plan.time import (
    PASSES,
    PRODUCTS,
    WAITING,
    collective_seconds,
    constants_of,
    kernel_seconds,
    multiplying_seconds,
    spent_seconds,
)
from neuron_accel_plan.trace import ELEMENTWISE, Kernel, Message

if TYPE_CHECKING:
    from neuron_accel_plan.calibration import Machine

_AVERAGING = (AxisKind.DATA, AxisKind.SEQUENCE)
_SHARDING = (AxisKind.MODEL, AxisKind.STAGE, AxisKind.DATA)
"""Kinds of axes that a plugin adds along which weights may be sharded."""
_RECOMPUTING = (ActivationCheckpointingPlugin, ChunkedLossPlugin)
"""What adds to the time of the blocks of a layout, and takes nothing from it."""
_EXCHANGES = ("all_to_all", "permute")
"""Collectives that average nothing."""
_ROUGHLY = 0.85
"""Share of what one family recomputes, or takes for more samples, that is taken to hold for others. Of mixtures of
experts on 256 cores, from 0.93 to 1 of what the first one takes was measured of the others."""
_NEARLY = 0.97
"""Share of a time by a line through samples of other sizes that it is taken not to be below."""
_STATE_BYTES = 12  # of an fp32 master weight and two moments
_SLACK, _ROUGH = 1.1, 1.5
"""Layouts whose estimated memory exceeds that of a core by more than this factor are not counted: if it is from a
micro-batch of their own size, or by two of other sizes, or how it grows with samples is known of a family that is
alike; or from one of one sample, of which what does not grow with samples is multiplied too."""

_LIKELY = 0.95
"""Share of a core up to which a layout whose memory is estimated is likely to fit."""
_ENOUGH = 2
"""Layouts that are counted before what they need corrects the estimates of others."""


@dataclass(frozen=True)
class Estimate:
    """Of a layout: bytes of a rank, and a bound of the seconds of a step.

    Args:
        layout: the layout.
        micro_batches: micro-batches of a data-parallel rank in a step.
        memory: bytes, which may be too low or too high; 0 if it is not known.
        seconds: what the predicted time is not below.
        sample: what to run for a better estimate; None: the layout itself.
        guess: bytes by the family that recomputes nothing, and by what recomputing as much saved other families; 0 if
            the memory is known, or nothing of it.
    """

    layout: Layout
    micro_batches: int
    memory: float
    seconds: float
    sample: Sample | None = None
    guess: float = 0.0


def _without_recomputing(family: tuple[StrategyPlugin, ...]) -> tuple[StrategyPlugin, ...]:
    return tuple(plugin for plugin in family if not isinstance(plugin, _RECOMPUTING))


def _chunks_loss(family: tuple[StrategyPlugin, ...]) -> bool:
    return any(isinstance(plugin, ChunkedLossPlugin) for plugin in family)


def _less(family: tuple[StrategyPlugin, ...]) -> tuple[tuple[StrategyPlugin, ...], ...]:
    """The families that recompute less than this one."""
    recomputing = [plugin for plugin in family if isinstance(plugin, _RECOMPUTING)]
    subsets = (itertools.combinations(recomputing, number) for number in range(1, len(recomputing) + 1))
    return tuple(tuple(plugin for plugin in family if plugin not in removed) for removed in itertools.chain(*subsets))


def _kind(family: tuple[StrategyPlugin, ...]) -> tuple[type, ...]:
    return tuple(type(plugin) for plugin in family)


def _recomputing(family: tuple[StrategyPlugin, ...]) -> str:
    return repr([plugin for plugin in family if isinstance(plugin, _RECOMPUTING)])


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

    def without(self, other: _Line) -> _Line:
        return _Line(self.base - other.base, self.block - other.block)

    def over(self, other: _Line) -> float:
        """How many times the number of a block is that of another; 1 if that is 0."""
        return self.block / other.block if other.block > 0 else 1.0


class _Times:
    """Seconds of a micro-batch, from a sample, without the averaging of gradients, which is once in a step: of what is
    sent along the ``averaging`` axes only what exchanges samples, such as tokens for experts."""

    def __init__(
        self, counts: Sequence[StepCount], depths: tuple[int, int], machine: Machine, averaging: Set[str]
    ) -> None:
        self._counts, self._depths, self._machine = counts, depths, machine

        def in_each(message: Message) -> bool:
            return message.op in _EXCHANGES or averaging.isdisjoint(message.axis.split(" x "))

        spent = [spent_seconds(count, machine, in_each) for count in counts]

        def line(phases: Iterable[str], parts: Callable[[str], bool] = lambda part: True) -> _Line:
            sums = [sum(s for (phase, part), s in each.items() if phase in phases and parts(part)) for each in spent]
            return _Line.through(depths, *sums)

        phases = {phase for each in spent for phase, _ in each}
        self.passes = line(PASSES)
        self.backward = line(["backward"])
        self.products = line(PASSES, lambda part: part == PRODUCTS)
        self.rest = line(phases - {*PASSES})
        self.others = line(PASSES, lambda part: part != PRODUCTS)
        self.kernels = line(PASSES, lambda part: part != PRODUCTS and not part.startswith(WAITING))
        self.waiting = line(PASSES, lambda part: part.startswith(WAITING))
        self.operations = _Line.through(depths, *(count.operations for count in counts))
        self.weights = _Line.through(depths, *(count.weights for count in counts))
        self._more: dict[float, _Line] = {}

    def of_more(self, times: float, growth: float) -> tuple[_Line, _Line]:
        """What the passes, and their products, of a micro-batch that is so much larger are not below, if with each
        further one of this size what is not products takes ``growth`` of its time more."""
        if times not in self._more:
            self._more[times] = _Line.through(
                self._depths, *(multiplying_seconds(count, self._machine, times) for count in self._counts)
            )
        products, factor = self._more[times], 1 + (times - 1) * growth
        passes = _Line(products.base + factor * self.others.base, products.block + factor * self.others.block)
        return passes, products


@dataclass(frozen=True)
class _Facts:
    """What is alike for layouts with the same plugins.

    Args:
        plugins: the plugins.
        name: what they are called, with all of their options.
        family: those that change what a block computes.
        base: the sample from which the time has its first bound.
        parts: what is sharded over replicas.
        replicas: ranks that no axis takes.
        rows: samples of a data-parallel rank in a step.
        axes: the axes of the plugins.
    """

    plugins: tuple[StrategyPlugin, ...]
    name: str
    family: tuple[StrategyPlugin, ...]
    base: Sample
    parts: frozenset[str]
    replicas: int
    rows: int
    axes: tuple[AxisSpec, ...]


class Bounds:
    """Estimates layouts from samples, as far as these are known.

    Args:
        planner: counts; for the model and the ranks.
        instance: the instance.
        calibration: measured constants for the prediction of time, or None.
    """

    def __init__(self, planner: Planner, instance: Instance, calibration: Machine | None) -> None:
        self._planner = planner
        self._machine = constants_of(instance, calibration)
        self._core = instance.core_bytes() - planner.reserve
        self._samples: dict[str, Sequence[StepCount] | str] = {}
        self._times: dict[str, _Times] = {}
        self._sizes: dict[tuple[str, int], StepCount] = {}
        self._inside: dict[tuple[str, int], tuple[Sequence[bool], int]] = {}  # see `_in_blocks`
        self._stages: dict[str, Stages | str | None] = {}  # by a plugin
        self._staged: dict[int, Stages | str | None] = {}  # by the identity of the plugins
        self._less: dict[int, tuple[tuple[StrategyPlugin, ...], ...]] = {}  # by the identity of a family
        self._facts: dict[int, _Facts] = {}  # by the identity of the plugins, which they keep alive
        self._large: dict[str, Sample] = {}  # by that of one row: the first of the family with more rows that was run
        self._growth: dict[tuple[type, ...], float] = {}  # see `_Times.of_more`; by the plugins of a family
        self._room: dict[tuple[type, ...], float] = {}  # the same of the memory that passes take
        self._recomputed: dict[str, float] = {}  # by what recomputes: by how much the passes of a block grow
        self._kept: dict[str, list[float]] = {}  # by what recomputes: the share of passes' memory that is left
        self._at_least: dict[tuple[str, int], float] = {}  # seconds of layouts that are not ruled out
        self._counted: dict[str, list[float]] = {}  # counted memory by the estimate of it; see `_alike`
        self._roughly: dict[str, list[float]] = {}  # the same, also by estimates that more samples would make closer
        self._too_large: dict[str, list[tuple[Layout, Failed]]] = {}  # by the plugins that shard nothing over replicas
        self._families: dict[str, tuple[StrategyPlugin, ...]] = {}
        self._names: dict[int, str] = {}  # by the identity of the families, which they keep alive
        self._seconds: dict[tuple[int, int, int], float] = {}  # of the reduction of gradients

    def _one(self, family: tuple[StrategyPlugin, ...]) -> tuple[StrategyPlugin, ...]:
        """Returns the same object for all families that are equal: options of plugins may have no hash."""
        found = self._families.setdefault(repr(family), family)
        self._names[id(found)] = repr(found)
        return found

    def _key(self, sample: Sample) -> str:
        name = self._names.get(id(sample.family))
        return f"{sample.micro_batches} x {sample.rows} {name or repr(sample.family)}"

    def knows(self, sample: Sample) -> bool:
        """Whether a sample was run."""
        return self._key(sample) in self._samples

    def learn(self, sample: Sample, answer: Answer) -> None:
        """Keeps what was found of a sample."""
        assert not isinstance(answer, Ranked)
        self._samples[self._key(sample)] = answer.reason if isinstance(answer, Failed) else answer
        if isinstance(answer, Failed) or sample.micro_batches > 1:
            return
        one, kind = Sample(sample.family, 1), _kind(sample.family)
        less = Sample(_without_recomputing(sample.family), sample.rows)
        if sample != one:
            self._large.setdefault(self._key(one), sample)
            if self._ran(one) and (few := self._room_of(one)) > 0:
                room = _ROUGHLY * (self._room_of(sample) / few - 1) / (sample.rows - 1)
                self._room[kind] = max(0.0, min(room, self._room.get(kind, _ROUGHLY)))
            if self._ran(one) and (few := self._times_of(one).others.block) > 0:
                growth = _ROUGHLY * (self._times_of(sample).others.block / few - 1) / (sample.rows - 1)
                self._growth[kind] = max(0.0, min(growth, self._growth.get(kind, _ROUGHLY)))
        if sample != less and self._ran(less):
            now, before = self._times_of(sample), self._times_of(less)
            # Of the two, the one that is less: what is sent is recomputed too, and not alike for all families.
            more = min(now.passes.over(before.passes), now.products.over(before.products))
            more = _ROUGHLY * (more - 1)
            key = _recomputing(sample.family)
            self._recomputed[key] = max(0.0, min(more, self._recomputed.get(key, 1.0)))
            if room := self._room_of(less):
                self._kept.setdefault(key, []).append(self._room_of(sample) / room)

    def _room_of(self, sample: Sample) -> float:
        """Bytes that the passes of a sample take at most, besides weights and gradients."""
        peaks = self._sized(sample, self._planner.layers).peaks
        taken = (p.parts[ACTIVATIONS] + p.parts[TEMPORARY] for p in peaks if p.moment.phase in PASSES)
        return max(taken, default=0)

    def learn_layout(self, layout: Layout, seconds: float) -> None:
        """Keeps what the time of a layout is not below, or what it is predicted to be."""
        self._at_least[self._name(layout)] = seconds

    def learn_memory(self, estimate: Estimate, memory: int) -> None:
        """Keeps how many bytes a layout was counted to need; 0 if it cannot run."""
        if estimate.memory and memory:
            alike, ratio = self._alike(estimate.layout), memory / estimate.memory
            self._roughly.setdefault(alike, []).append(ratio)
            if estimate.sample is None:
                self._counted.setdefault(alike, []).append(ratio)

    def too_large(self, layout: Layout, memory: float) -> str | None:
        """Returns why a layout does not fit, by an estimate of its bytes from a micro-batch of its own size, or by
        others; None if it may fit. What was counted of layouts that are alike corrects it."""
        counted = self._counted.get(self._alike(layout), ())
        if len(counted) >= _ENOUGH:
            memory *= max(1.0, min(counted))
        return self._too_much(memory) if memory > self._core * _SLACK else None

    def is_likely(self, estimate: Estimate) -> bool:
        """Whether a layout whose memory is estimated is likely to fit."""
        counted = self._roughly.get(self._alike(estimate.layout), [1.0])
        return (estimate.memory or estimate.guess) * max(1.0, sum(counted) / len(counted)) <= _LIKELY * self._core

    def learn_impossible(self, layout: Layout, why: Failed | None = None) -> None:
        """Keeps that a layout is ruled out; ``why``, if it was counted."""
        self._at_least.pop(self._name(layout), None)
        if why is not None and why.memory:
            self._too_large.setdefault(self._without_sharding(layout), []).append((layout, why))

    def by_layouts(self, layout: Layout) -> tuple[str | None, float]:
        """Returns why a layout does not fit, and what its time is not below, by what is known of others: of one that
        shards more over replicas, has smaller micro-batches or the whole loss, and does not fit; and of those that
        recompute less, and are not ruled out."""
        reason, alike = None, [layout]
        if _chunks_loss(layout.plugins):  # without it the peak is the same if it is in a block
            with_head = tuple(plugin for plugin in layout.plugins if not isinstance(plugin, ChunkedLossPlugin))
            alike.append(dataclasses.replace(layout, plugins=with_head))
        for each in alike:
            for other, why in self._too_large.get(self._without_sharding(each), ()):
                if (each is layout or why.in_block) and self._needs_less(other, each):
                    reason = f"it needs no less memory than {other}: {why.reason}"
        seconds = 0.0
        for left in _less(layout.plugins):
            seconds = max(seconds, self._at_least.get((repr(left), layout.accumulation), 0.0))
        return reason, seconds * (1 + 1e-8)  # what recomputes more is slower, if only by rounding

    def common(self, layout: Layout) -> str:
        """What is the same for layouts of which one may tell something of another (:meth:`by_layouts`)."""
        return self._without_sharding(dataclasses.replace(layout, plugins=_without_recomputing(layout.plugins)))

    def _alike(self, layout: Layout) -> str:
        """What is the same for layouts whose estimated memory differs alike from what is counted: what they recompute
        and shard over replicas, and what their stages run in turn."""
        facts, stages = self._facts_of(layout), self._stages_of(layout)
        assert not isinstance(stages, str)
        kind = f"{_recomputing(facts.family)} {sorted(facts.parts)}"
        if stages is None:
            return kind
        passes = {name for of_rank in stages.passes for name, *_ in of_rank}
        return f"{kind} {len(stages.blocks[0])} stages of {sorted(passes)}"

    def _without_sharding(self, layout: Layout) -> str:
        return repr([plugin for plugin in layout.plugins if not plugin.spec.shards])

    def _needs_less(self, one: Layout, other: Layout) -> bool:
        """Whether ``one`` needs no more memory than ``other``, of layouts that differ in what they shard over replicas
        and in the size of micro-batches."""
        facts, others = self._facts_of(one), self._facts_of(other)
        if one.accumulation < other.accumulation or other.accumulation == 1 < one.accumulation:
            return False  # gradients wait for another micro-batch only if there is one
        if one.plugins == other.plugins:
            return True
        # Weights that an axis of samples shards, as those of experts, are not averaged along it. The state that is
        # sharded is that of fp32 weights; that of all others has their dtype.
        averaging = facts.replicas * math.prod(axis.degree for axis in facts.axes if axis.kind is AxisKind.SEQUENCE)
        return facts.parts > others.parts and averaging >= _STATE_BYTES / 3

    def _name(self, layout: Layout) -> tuple[str, int]:
        return self._facts_of(layout).name, layout.accumulation

    def first_sample(self, layout: Layout) -> Sample:
        """Returns the sample from which the time of a layout has its first bound: that of the family that does not
        recompute, which stands for those that do."""
        return self._facts_of(layout).base

    def _facts_of(self, layout: Layout) -> _Facts:
        plugins = layout.plugins
        if id(plugins) not in self._facts:
            space, family = self._planner.space(plugins), self._one(family_of(plugins))
            self._facts[id(plugins)] = _Facts(
                plugins=plugins,
                name=repr(plugins),
                family=family,
                base=Sample(self._one(_without_recomputing(family)), 1),
                parts=frozenset(part for plugin in plugins for part in plugin.spec.shards),
                replicas=space.replicas,
                rows=space.global_batch // space.data_ranks,
                axes=tuple(axis for plugin in plugins for axis in plugin.axes()),
            )
        return self._facts[id(plugins)]

    def cannot_fit(self, layout: Layout) -> str | None:
        """Returns the reason why the model's state alone does not fit, or None."""
        facts = self._facts_of(layout)
        sharded = math.prod(axis.degree for axis in facts.axes if axis.kind in _SHARDING)
        replicas = self._planner.world_size // sharded
        own = self._planner.parameters / sharded
        parts = facts.parts
        width = 2 if self._planner.dtype == "bfloat16" else 4
        least = width * own / (replicas if "weights" in parts else 1)
        # Where the state is sharded, gradients may be summed into shards as they come.
        least += width * own / (replicas if parts & {"gradients", "optimizer state"} else 1)
        least += _STATE_BYTES * own / replicas if "optimizer state" in parts else 2 * width * own
        if least <= self._core:
            return None
        return f"weights, gradients and optimizer state are {least / 2**30:.3g} GiB; {self._of_core()}"

    def estimate(self, layout: Layout) -> Estimate | str:
        """Returns what is known of a layout, or why it is not possible."""
        facts, stages = self._facts_of(layout), self._stages_of(layout)
        family, rows = facts.family, facts.rows
        less = self._less_of(family)
        if isinstance(stages, str):
            return stages
        number = layout.accumulation if stages is None else stages.microbatches
        size = rows // number
        own, first, like = Sample(family, size), Sample(family, 1), Sample(facts.base.family, size)

        def of_less(sample: Sample, times: float = 1.0) -> float:
            """What the time is not below by a sample of a family that recomputes less."""
            head = not (_chunks_loss(family) and not _chunks_loss(sample.family))
            more = self._recomputed.get(_recomputing(family), 0.0) if sample.family == facts.base.family else 0.0
            return self._least_seconds(layout, sample, stages, times, number, head=head, more=more)

        samples = [Sample(each, size) for each in less]
        by_less = max((of_less(sample) for sample in samples if self._ran(sample)), default=0.0)
        if not self.knows(first) and not self.knows(own):
            if isinstance(self._samples[self._key(facts.base)], str):
                return Estimate(layout, number, 0.0, 0.0, first)
            if _chunks_loss(family):
                with_head = Sample(next(each for each in less if not _chunks_loss(each)), size)
                known = with_head if self.knows(with_head) else dataclasses.replace(with_head, rows=1)
                if self._ran(known):  # its peaks in blocks are the same
                    memory = self._memory(layout, known, stages, size / known.rows, number, in_blocks=True)
                    if memory > self._core * self._slack(known == with_head, known.family):
                        return self._too_much(memory)
            seconds = max(of_less(facts.base, size), _NEARLY * self._by_line(like, of_less), by_less)
            sample = first if self.knows(like) or self._larger(like) else like
            return Estimate(layout, number, 0.0, seconds, sample, self._guess(layout, stages, size, number))
        sample = own if self.knows(own) else first
        counts = self._samples[self._key(sample)]
        if isinstance(counts, str):
            return counts
        times = size / sample.rows
        memory = self._memory(layout, sample, stages, times, number)
        seconds = max(self._least_seconds(layout, sample, stages, times, number), by_less)
        if sample == own:
            twice = Sample(family, size, 2)
            following = None if number == 1 or self.knows(twice) else twice
        else:
            following = own
            if self._larger(own):
                memory = self._by_line(own, lambda each: self._memory(layout, each, stages, 1.0, number))
                line = self._by_line(own, lambda each: self._least_seconds(layout, each, stages, 1.0, number))
                seconds = max(seconds, _NEARLY * line)
            if like != own and self._ran(like) and self._ran(facts.base):
                seconds = max(seconds, self._least_seconds(layout, sample, stages, times, number, like=like))
            elif like != own and not self.knows(like) and not self._larger(like) and self._ran(facts.base):
                following = like  # which several families have in common
        is_close = sample == own or self._larger(own) is not None
        if is_close and (reason := self.too_large(layout, memory)):
            return reason
        if memory > self._core * self._slack(is_close, family):
            return self._too_much(memory)
        return Estimate(layout, number, memory, seconds, following)

    def _guess(self, layout: Layout, stages: Stages | None, size: int, micro_batches: int) -> float:
        """See :attr:`Estimate.guess`."""
        facts = self._facts_of(layout)
        kept = self._kept.get(_recomputing(facts.family))
        if not kept:
            return 0.0
        return self._memory(layout, facts.base, stages, size, micro_batches, share=sum(kept) / len(kept))

    def _slack(self, is_close: bool, family: tuple[StrategyPlugin, ...]) -> float:
        return _SLACK if is_close or _kind(family) in self._room else _ROUGH

    def _too_much(self, memory: float) -> str:
        return f"about {memory / 2**30:.1f} GiB, estimated from one micro-batch; {self._of_core()}"

    def _ran(self, sample: Sample) -> bool:
        """Whether a sample was run, and is possible."""
        return not isinstance(self._samples.get(self._key(sample), ""), str)

    def _larger(self, sample: Sample) -> Sample | None:
        """Of the family of a sample one of more than one row, if one row of it was run, too."""
        one = Sample(sample.family, 1)
        return self._large.get(self._key(one)) if self._ran(one) else None

    def _by_line(self, sample: Sample, of: Callable[[Sample], float]) -> float:
        """A number of a sample by the line through those of one row and of more; 0 if these were not run."""
        large = self._larger(sample)
        if large is None:
            return 0.0
        one = of(Sample(sample.family, 1))
        return one + (of(large) - one) * (sample.rows - 1) / (large.rows - 1)

    def _of_core(self) -> str:
        return f"a core has {self._core / 2**30:.3g} GiB without its reserve"

    def _less_of(self, family: tuple[StrategyPlugin, ...]) -> tuple[tuple[StrategyPlugin, ...], ...]:
        if id(family) not in self._less:
            self._less[id(family)] = tuple(map(self._one, _less(family)))
        return self._less[id(family)]

    def _stages_of(self, layout: Layout) -> Stages | str | None:
        """The stages of a layout's pipeline; None without one; why there can be none."""
        plugins = self._facts_of(layout).plugins  # whose identity is used
        if id(plugins) not in self._staged:
            staging = [each for each in plugins if has_stages(each)]
            found = (self._stages_by(each) for each in staging)
            self._staged[id(plugins)] = next((stages for stages in found if stages is not None), None)
        return self._staged[id(plugins)]

    def _stages_by(self, plugin: StrategyPlugin) -> Stages | str | None:
        key = repr(plugin)
        if key not in self._stages:
            try:
                self._stages[key] = stages_of(plugin, self._planner.model)
            except NeuronAccelError as error:
                self._stages[key] = first_line(error)
        return self._stages[key]

    # ---- memory ------------------------------------------------------------------------------------------------------
    def _memory(
        self,
        layout: Layout,
        sample: Sample,
        stages: Stages | None,
        times: float,
        micro_batches: int,
        *,
        in_blocks: bool = False,
        share: float = 1.0,
    ) -> float:
        """Bytes of the rank with the most of them, from a step of a sample that began without optimizer state.

        Args:
            layout: the layout.
            sample: the sample.
            stages: those of its pipeline.
            times: size of a micro-batch, by that of the sample.
            micro_batches: number of micro-batches.
            in_blocks: whether only peaks in blocks count.
            share: share of what the passes of the sample take that those of the layout take.
        """
        of_rank = partial(self._of_rank, layout, sample, times=times, micro_batches=micro_batches, share=share)
        if stages is None:
            return of_rank(self._planner.layers, in_blocks=in_blocks)
        kept = [number / len(blocks) for number, blocks in zip(stages.in_flight, stages.blocks, strict=True)]
        own = [sum(blocks) for blocks in stages.blocks]
        first = of_rank(own[0], kept=kept[0], ends=(True, False), in_blocks=True)
        return max(first, of_rank(own[-1], kept=kept[-1], ends=(False, True), in_blocks=in_blocks))

    def _of_rank(
        self,
        layout: Layout,
        sample: Sample,
        blocks: int,
        *,
        times: float,
        micro_batches: int,
        in_blocks: bool,
        share: float,
        kept: float = 1.0,
        ends: tuple[bool, bool] = (True, True),
    ) -> float:
        """Bytes of a rank with so many blocks, ``kept`` micro-batches in flight, and what is before or after the
        blocks. Of their weights, each of the two is taken to be half."""
        count = self._sized(sample, blocks)
        line = self._times_of(sample).weights
        weights = blocks * line.block + line.base * sum(ends) / 2
        by_weights = weights / count.weights if count.weights else 1.0
        facts = self._facts_of(layout)
        parts, replicas = facts.parts, facts.replicas
        sharding = self._sharding(layout, line.of_model(self._planner.layers))
        elements = weights / (2 if self._planner.dtype == "bfloat16" else 4)
        is_stage = ends != (True, True)
        held = weights / (sharding if "weights" in parts and not is_stage else 1)  # stages gather theirs once
        held += _STATE_BYTES * elements / sharding if "optimizer state" in parts else 2 * weights
        more = share * (1 + (times - 1) * self._room.get(_kind(sample.family), 1.0))
        most, (in_block, saved) = 0.0, self._in_blocks(sample, blocks)
        for peak, is_in_block in zip(count.peaks, in_block, strict=True):
            if in_blocks and not is_in_block:
                continue
            gradients = by_weights * peak.parts[GRADIENTS]
            if peak.moment.phase in PASSES:
                if micro_batches > 1:  # they wait for the last micro-batch
                    gradients = max(gradients, weights)
                if micro_batches == 1 or is_stage:  # else they are reduced after the last one
                    gradients /= replicas if "gradients" in parts else 1
                each = other = peak.parts[ACTIVATIONS]
                if ends == (False, True):  # the others are half finished, without what was recomputed and the logits
                    other = min(each, saved)
                gradients += more * (each + (kept - 1) * other + peak.parts[TEMPORARY])
            else:
                gradients /= sharding if parts & {"gradients", "optimizer state"} else 1
            most = max(most, gradients)
        return held + most

    def _sized(self, sample: Sample, blocks: int) -> StepCount:
        key = self._key(sample), blocks
        if key not in self._sizes:
            shallow = self._samples[key[0]]
            assert not isinstance(shallow, str)
            name, depths = self._planner.blocks or "", self._planner.depths
            self._sizes[key] = extrapolate(shallow, blocks, name, blocks - 1, depths)
        return self._sizes[key]

    def _in_blocks(self, sample: Sample, blocks: int) -> tuple[Sequence[bool], int]:
        """Which peaks of a rank with so many blocks are in blocks, and the most that is saved there in forward."""
        key = self._key(sample), blocks
        if key not in self._inside:
            peaks, name = self._sized(sample, blocks).peaks, self._planner.blocks or ""
            inside = [block_of(peak.moment, name) is not None for peak in peaks]
            forward = (
                p for p, is_inside in zip(peaks, inside, strict=True) if is_inside and p.moment.phase == "forward"
            )
            self._inside[key] = inside, max((peak.parts[ACTIVATIONS] for peak in forward), default=0)
        return self._inside[key]

    def _sharding(self, layout: Layout, weights: float) -> float:
        """Over how many ranks the state of a rank's weights is sharded: all that average their gradients. Weights that
        an axis of samples shards, as those of experts, are not averaged along it.

        Args:
            layout: the layout.
            weights: bytes of a rank that has all blocks.
        """
        facts = self._facts_of(layout)
        axes = facts.axes
        averaging = facts.replicas * math.prod(axis.degree for axis in axes if axis.kind in _AVERAGING)
        experts = math.prod(axis.degree for axis in axes if axis.kind is AxisKind.DATA)
        if experts == 1:
            return averaging
        width = 2 if self._planner.dtype == "bfloat16" else 4
        model = math.prod(axis.degree for axis in axes if axis.kind is AxisKind.MODEL)
        missing = max(0.0, width * self._planner.parameters / model - weights)  # what the other ranks have
        share = min(1.0, missing / (experts - 1) / weights)
        return averaging / (1 - share + share * experts)

    # ---- time --------------------------------------------------------------------------------------------------------
    def _least_seconds(
        self,
        layout: Layout,
        sample: Sample,
        stages: Stages | None,
        times: float,
        micro_batches: int,
        *,
        head: bool = True,
        more: float = 0.0,
        like: Sample | None = None,
    ) -> float:
        """What the predicted time of a step is not below: the passes of all micro-batches, the update, and what of the
        reduction of gradients cannot be hidden; without ``head`` of what is not in blocks the products alone. Those of
        blocks are more by the factor ``1 + more``. ``like`` is a sample of the layout's own size that recomputes
        nothing. See :meth:`_memory`."""
        found = self._times_of(sample)
        passes, products = found.passes, found.products
        if times != 1:
            passes, products = found.of_more(times, self._growth.get(_kind(sample.family), 0.0))
        if like is not None:
            less, one = self._times_of(like), self._times_of(Sample(like.family, 1))
            recomputed = max(0.0, products.block - less.products.block)
            if sample.rows == 1:
                share = _ROUGHLY * (found.passes.over(one.passes) - 1)
                recomputed = max(recomputed, share * less.passes.block)
            passes = _Line(passes.base, less.passes.block + recomputed)
        base = passes.base if head else products.base
        passes = _Line(base, passes.block * (1 + more))
        facts, twice = self._facts_of(layout), Sample(sample.family, sample.rows, 2)
        following = None  # what a further micro-batch takes
        if times == 1 and like is None and sample.family == facts.family and self._ran(twice):
            following = self._times_of(twice).passes.without(found.passes)
        if stages is None:
            blocks = self._planner.layers
            each, rest, weights = (line.of_model(blocks) for line in (passes, found.rest, found.weights))
            further = 0.0 if following is None else following.of_model(blocks)
            hidden, waiting = 1.0, times * found.waiting.of_model(blocks)
        else:  # of the stage with most operations; only the last one has the head
            last = len(stages.blocks) - 1
            sizes = [sum(own) for own in stages.blocks]
            operations = [size * found.operations.block for size in sizes]
            operations[last] += found.operations.base
            slowest = operations.index(max(operations))
            ends = 0.0
            if slowest == last:
                ends = products.base
                ends += max(0.0, found.kernels.base - self._embedding_seconds(sample, 3, 12)) if head else 0.0
            each = sizes[slowest] * passes.block + ends
            further = 0.0 if following is None else sizes[slowest] * following.block + ends
            rest, weights = (sizes[slowest] * line.block for line in (found.rest, found.weights))
            hidden, waiting = 1 - stages.bubble, times * sizes[slowest] * found.waiting.block
        if "optimizer state" in facts.parts:
            rest /= self._sharding(layout, found.weights.of_model(self._planner.layers))
        reduction = self._reduction(layout, weights)
        overlap = min(1.0, self._machine.overlap.at())
        if following is None:
            # It adds to the gradients, reading and writing them, perhaps while it would wait otherwise.
            added = kernel_seconds(self._machine, Kernel(ELEMENTWISE, self._planner.dtype, 0, round(2 * weights)))
            further = each + max(0.0, added - waiting)
        passing = each + (micro_batches - 1) * further
        if stages is not None and slowest == 0 < last:
            # A gradient of the embedding is written by the first micro-batch, and read and written by each further one.
            passing += self._embedding_seconds(sample, 2 * micro_batches - 1, 0)
        least = passing / hidden + rest + (1 - overlap) * reduction
        if stages is None and times == 1:
            # Reduction begins in the last backward pass. Its second half, of weights, may run beside the update.
            tail = 0.0 if "weights" in facts.parts else reduction / 2
            before = passing - found.backward.of_model(self._planner.layers)
            least = max(least, before + reduction / 2 + max(rest, tail))
        return least

    def _embedding_seconds(self, sample: Sample, tables: int, outputs: int) -> float:
        """The time in which the table of the embedding of tokens is read or written so many times, and its output. In
        a micro-batch, in which the last stage has none, it is less than three times the table and a dozen times the
        output."""
        model: Any = self._planner.model
        table: torch.Tensor = model.get_input_embeddings().weight
        shards = math.prod(a.degree for plugin in sample.family for a in plugin.axes() if a.kind is AxisKind.MODEL)
        rows = sample.rows * self._planner.sequence
        moved = (2 if self._planner.dtype == "bfloat16" else 4) * (
            tables * table.numel() / shards + outputs * rows * table.shape[1]
        )
        return kernel_seconds(self._machine, Kernel(ELEMENTWISE, self._planner.dtype, 0, round(moved)))

    def _times_of(self, sample: Sample) -> _Times:
        key = self._key(sample)
        if key not in self._times:
            counts = self._samples[key]
            assert not isinstance(counts, str)
            averaging = {axis.name for plugin in sample.family for axis in plugin.axes() if axis.kind in _AVERAGING}
            self._times[key] = _Times(counts, self._planner.depths, self._machine, averaging)
        return self._times[key]

    def _reduction(self, layout: Layout, weights: float) -> float:
        """Seconds in which gradients of so many bytes are summed over replicas, and weights gathered if only their
        shards are updated, if nothing else is sent."""
        facts = self._facts_of(layout)
        replicas = facts.replicas
        if replicas == 1:
            return 0.0
        inside = math.prod(axis.degree for axis in facts.axes if axis.kind is not AxisKind.STAGE)
        sent = round(weights * (replicas - 1) / replicas)
        key = replicas, inside, sent
        if key in self._seconds:
            return self._seconds[key]
        group = tuple(range(0, replicas * inside, inside))

        def seconds(op: str, size: int) -> float:
            return collective_seconds(self._machine, Message(op, "dp", group, size, self._planner.dtype))

        found = min(seconds("all_reduce", 2 * sent), seconds("reduce_scatter", sent) + seconds("all_gather", sent))
        return self._seconds.setdefault(key, found)
