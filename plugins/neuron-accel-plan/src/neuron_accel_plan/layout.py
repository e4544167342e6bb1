# SPDX-License-Identifier: Apache-2.0
"""What one layout of one model needs: the memory of a rank by part, its traffic by axis, and its operations."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel import DryRun, Instance, find_instance
from neuron_accel.commands import dry_plan
from neuron_accel.contract import AxisKind
from neuron_accel.contract.families import model_without_weights
from neuron_accel.errors import ConfigurationError, PlanError, UnsupportedModelError, UsageError
from neuron_accel_plan.calibration import Machine, reserve_of
from neuron_accel_plan.graphs import Finding, findings
from neuron_accel_plan.models import find_model
from neuron_accel_plan.shapes import Results
from neuron_accel_plan.spaces import LayoutSpace, Stages, stages_of, with_stages
from neuron_accel_plan.step import StepCount, at_blocks, count_step, depths_of, extrapolate, repeat
from neuron_accel_plan.time import StepTime, predict_time

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.contract import Mesh, Plan, StrategyPlugin

DTYPES = ("bfloat16", "float32")
INSIDE, BETWEEN = "NeuronLink", "EFA"
"""Links within a machine and between machines."""
FITS, TIGHT, TOO_LARGE = "fits", "tight", "does NOT fit"


def verdict_of(peak: int, core_bytes: int, reserve: int) -> str:
    """Returns whether so many bytes fit a core, of which some are reserved: :data:`FITS`, :data:`TIGHT` or
    :data:`TOO_LARGE`."""
    return FITS if peak + reserve <= core_bytes else TIGHT if peak <= core_bytes else TOO_LARGE


@dataclass(frozen=True, kw_only=True)
class LayoutCount:
    """What one rank of a layout keeps, sends and computes in one optimizer step.

    Args:
        model: name of the model's class.
        parameters: number of parameters of the model.
        mesh: the mesh, as text.
        plugins: names of the plugins, those that the planner added included.
        rank: the rank that was counted.
        micro_batch: samples of a data-parallel rank in a micro-batch.
        accumulation: micro-batches in a step, accumulated ones and those of a pipeline.
        sequence: tokens in a sample; 0 if the samples are not known to consist of tokens.
        layers: number of blocks of the model; 0 if it is not known.
        extrapolated: whether the count is that of few blocks and micro-batches, extrapolated. Messages in buckets are
            then approximate, bytes exact but for the padding of buckets, and operations exact.
        step: what was counted.
        slowest: the count of the rank that computes most: another than ``rank`` if stages of a pipeline differ.
        bubble: fraction of time, from 0 to 1, in which the rank that computes longest waits for other stages.
        instance: the instance type, or None.
        core_bytes: memory of one of its cores, or None.
        reserve: bytes of it that are left to what is not counted: the runtime, compiled graphs and collectives.
        axes: the axes of the mesh, outer to inner, and their degrees.
        tokens: tokens in a step, over all ranks.
        work: operations of all ranks, by those of the model where a token visits only the experts that it has chosen,
            and nothing is recomputed or computed by several ranks; 1 if they were not counted.
        passes: of a pipeline, what the ranks of each stage compute and when, in the time of one forward pass.
    """

    model: str
    parameters: int
    mesh: str
    plugins: tuple[str, ...]
    rank: int
    micro_batch: int
    accumulation: int
    sequence: int
    layers: int
    extrapolated: bool
    step: StepCount
    slowest: StepCount
    bubble: float = 0.0
    instance: str | None = None
    core_bytes: int | None = None
    reserve: int = 0
    axes: tuple[tuple[str, int], ...] = ()
    tokens: int = 0
    work: float = 1.0
    passes: tuple[tuple[tuple[str, float, float], ...], ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.model}, {self.mesh}, rank {self.rank}; {self.step!r}>"

    def predict(self, calibration: Machine | None = None) -> StepTime:
        """Returns the predicted time of a step: that of the rank that computes longest, and the bubble.

        Args:
            calibration: measured constants, instead of the published ones.

        Raises:
            UsageError: without an instance and a calibration.
        """
        machine = calibration if self.instance is None else self.instance
        if machine is None:
            raise UsageError(
                "The time of a step cannot be predicted without an instance.",
                fix="name an instance, or calibrate this machine and give the file",
            )
        return predict_time(self.slowest, machine, calibration, bubble=self.bubble)

    def by_link(self) -> dict[str, int]:
        """Returns the bytes that the rank sends, by whether a group is within a machine; empty without an instance."""
        if self.instance is None:
            return {}
        full = find_instance(self.instance).hardware().full
        found = {INSIDE: 0, BETWEEN: 0}
        for flow in self.step.flows:
            extent, inner = 1, 1
            for name, degree in reversed(self.axes):
                inner *= degree
                if name in flow.axis.split(" x ") and degree > 1:
                    extent = inner
            found[BETWEEN if extent > full or (flow.axis == "world" and inner > full) else INSIDE] += flow.sent
        return found

    @property
    def batch(self) -> str:
        """The micro-batches of a data-parallel rank in a step, as text."""
        each = f"x {self.sequence} tokens" if self.sequence else "samples"
        return f"{self.accumulation} of {self.micro_batch} {each}"

    @property
    def fits(self) -> bool | None:
        """Whether the peak of memory leaves the reserve of a core; None without an instance."""
        return None if self.core_bytes is None else self.verdict == FITS

    @property
    def findings(self) -> list[Finding]:
        """What the compiler of the instance refuses, or may; empty without an instance."""
        return [] if self.instance is None else findings(self.step.noted)

    @property
    def compiles(self) -> bool:
        """Whether no finding is certain."""
        return not any(finding.certain for finding in self.findings)

    @property
    def verdict(self) -> str | None:
        """``"fits"``; ``"tight"``, if it fits only without the reserve; or ``"does NOT fit"``. None without an
        instance."""
        if self.core_bytes is None:
            return None
        return verdict_of(self.step.peak.total, self.core_bytes, self.reserve)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers and text: bytes, operations, messages."""
        peak = self.step.peak
        plain = {key: value for key, value in vars(self).items() if key not in ("step", "slowest", "passes")}
        return {
            **plain,
            "plugins": list(self.plugins),
            "fits": self.fits,
            "verdict": self.verdict,
            "compiler": [str(finding) for finding in self.findings],
            "memory": {"total": peak.total, "moment": str(peak.moment), "parts": dict(peak.parts)},
            "traffic": [asdict(flow) for flow in self.step.flows],
            "sent_by_link": self.by_link(),
            "operations": self.step.operations,
            "uncounted": list(self.step.uncounted),
        }


@dataclass(frozen=True)
class _Run:
    """A step to dry-run.

    Args:
        plugins: the strategies.
        rank: the rank.
        accumulation: number of calls of the model per optimizer step.
        rows: samples in a call of the model.
        depth: number of blocks of the model; None for all.
        warm_up: whether a step is run before the one that is counted.
    """

    plugins: tuple[StrategyPlugin, ...]
    rank: int
    accumulation: int
    rows: int
    depth: int | None
    warm_up: bool


class Planner:
    """Counts layouts of one model on a number of ranks. Steps that several layouts have in common are run once.

    Args:
        model, world_size, global_batch, sequence, instance, dtype, attention, reserve, foreach: see :func:`plan`.
        options: further options of the accelerator.

    Raises:
        ConfigurationError: for an unknown model, instance or option.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        *,
        world_size: int,
        global_batch: int,
        sequence: int,
        instance: str | None = None,
        dtype: str = "bfloat16",
        attention: str = "eager",
        reserve: int | None = None,
        foreach: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.instance: Instance | None = find_instance(instance) if isinstance(instance, str) else instance
        if dtype not in DTYPES:
            raise ConfigurationError(f"dtype={dtype!r} is not possible.", fix=f"pass {' or '.join(DTYPES)}")
        for name, number in (("world_size", world_size), ("global_batch", global_batch), ("sequence", sequence)):
            if number < 1:
                raise ConfigurationError(f"{name} is {number}.", fix="pass at least 1")
        self.core_bytes = None if self.instance is None else self.instance.core_bytes()
        self.reserve = checked_reserve(reserve, self.core_bytes)
        self.config = _configuration(model)
        self.config._attn_implementation, self.config.use_cache = attention, False
        _check_sequence(self.config, sequence)
        if self.instance is not None:  # the default counts the tokens of each expert, by their values: docs/xla.md
            _set_experts(self.config, "batched_mm")
        self.world_size, self.global_batch, self.sequence, self.dtype = world_size, global_batch, sequence, dtype
        if foreach is None:  # torch's optimizers update all parameters at once on the native device, as on CUDA
            foreach = self.instance is not None and self.instance.native(torch.__version__)
        self.foreach = foreach
        self._options = {k: v for k, v in (options or {}).items() if k != "gradient_accumulation_steps"}
        self.model = model_without_weights(self.config)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.blocks, self._period = _alike_blocks(self.config, self.model)
        self.depths = _depths_that_bound(self.config, self.model, self.blocks, self._period)  # of `shallow`
        self._counts: dict[str, StepCount] = {}
        self._results = Results()
        self._own_operations: int | None = None

    @property
    def layers(self) -> int:
        """Number of blocks of the model."""
        return getattr(self.config, "num_hidden_layers", 0)

    def make_plan(self, plugins: Sequence[StrategyPlugin]) -> Plan:
        """Returns the plan of a run with these plugins.

        Raises:
            PlanError: if they cannot run together, on this many ranks or on the instance.
        """
        kind = self.instance
        hardware = None if kind is None else kind.hardware(runtime=kind.runtime(torch.__version__))
        return dry_plan(plugins, world_size=self.world_size, hardware=hardware)

    def count(
        self,
        plugins: Sequence[StrategyPlugin],
        accumulation: int = 1,
        *,
        rank: int | None = None,
        full_depth: bool = False,
        quick: bool = False,
        only_if_fits: bool = False,
    ) -> LayoutCount:
        """Counts a layout.

        Args:
            plugins: the strategies.
            accumulation: micro-batches in a step.
            rank, full_depth: see :func:`plan`.
            quick: whether to run one step instead of two (see ``warm_up`` of
                :func:`~neuron_accel_plan.step.count_step`), and of a pipeline's stages between the first and the
                last only those with more blocks than both, or more micro-batches whose activations are kept.
            only_if_fits: whether to return the count of few micro-batches if these alone do not fit a core.

        Raises:
            PlanError, LayoutError, UnsupportedModelError: if the layout is not possible.
        """
        plan = self.make_plan([part for plugin in plugins for part in _axes_apart(plugin)])
        rows = self._rows(plan, accumulation)
        found = [(plugin, stages) for plugin in plan.plugins if (stages := stages_of(plugin, self.model)) is not None]
        pipeline, stages = found[0] if found else (None, None)
        if stages is not None and rows % stages.microbatches:
            raise PlanError(
                f"A batch of {rows} samples cannot be split into {stages.microbatches} micro-batches.",
                where=f"mesh {plan.mesh}, num_microbatches",
                why=f"a data-parallel rank has {rows} of the {self.global_batch} samples in each of its "
                f"{accumulation} accumulated batches",
                fix=f"choose {' or '.join(_divisors_near(stages.microbatches, rows))} micro-batches",
            )
        ranks = [rank or 0] if stages is None or rank is not None else _different_ranks(plan.mesh, stages, quick)
        gathered = any("weights" in plugin.spec.shards for plugin in plan.plugins)
        depths = depths_of(self._period, self.layers, gathered)
        extrapolated = self.blocks is not None and max(depths) < self.layers and not full_depth
        counts = {
            each: self._extrapolated(plan, pipeline, stages, accumulation, rows, each, not quick, depths, only_if_fits)
            if extrapolated
            else self._run(_Run(plan.plugins, each, accumulation, rows, depth=None, warm_up=not quick))
            for each in ranks
        }
        fullest = max(counts, key=lambda each: counts[each].peak.total)
        return LayoutCount(
            model=type(self.model).__name__,
            parameters=self.parameters,
            mesh=str(plan.mesh),
            plugins=tuple(plugin.spec.name for plugin in plan.plugins),
            rank=fullest,
            micro_batch=rows if stages is None else rows // stages.microbatches,
            accumulation=accumulation if stages is None else accumulation * stages.microbatches,
            sequence=self.sequence,
            layers=self.layers,
            extrapolated=extrapolated,
            step=counts[fullest],
            slowest=max(counts.values(), key=lambda count: count.operations),
            bubble=0.0 if stages is None else stages.bubble,
            passes=() if stages is None else stages.passes,
            instance=None if self.instance is None else self.instance.name,
            core_bytes=self.core_bytes,
            reserve=self.reserve,
            axes=tuple((axis.name, axis.degree) for axis in plan.mesh.axes),
            tokens=self.global_batch * self.sequence,
            work=self._work(plan, counts[fullest]),
        )

    def _work(self, plan: Plan, step: StepCount) -> float:
        """See ``work`` of :class:`LayoutCount`; counted for mixtures of experts outside of pipelines."""
        if self.blocks is None or plan.mesh.names(AxisKind.STAGE):
            return 1.0
        if not any(getattr(self.config, name, None) for name in _EXPERTS):
            return 1.0
        if self._own_operations is None:
            alone = copy.copy(self)
            alone.instance, alone.config = None, copy.deepcopy(self.config)
            _set_experts(alone.config, "grouped_mm")
            self._own_operations = extrapolate(alone.shallow([]), self.layers, self.blocks, 0, self.depths).operations
        return step.operations * self.world_size / (self._own_operations * self.global_batch)

    def accumulations(self, plugins: Sequence[StrategyPlugin]) -> list[int]:
        """Returns numbers of micro-batches to try, of a layout without a pipeline: the powers of two that divide a
        data-parallel rank's samples."""
        parts = tuple(part for plugin in plugins for part in (plugin.companions() or (plugin,)))
        if any(axis.kind is AxisKind.STAGE and axis.degree > 1 for plugin in parts for axis in plugin.axes()):
            return [1]
        rows = self.global_batch // self.space(parts).data_ranks
        return [number for number in (1 << n for n in range(rows.bit_length())) if rows % number == 0] or [1]

    def shallow(self, plugins: Sequence[StrategyPlugin], rows: int = 1, accumulation: int = 1) -> list[StepCount]:
        """Counts a first step of ``accumulation`` micro-batches of ``rows`` samples for each data-parallel rank, on the
        smallest mesh with these plugins, of models with each number of blocks in ``depths``.

        Raises:
            NeuronAccelError: if that is not possible.
            UnsupportedModelError: if the blocks of the model differ.
        """
        if self.blocks is None:
            raise UnsupportedModelError(
                f"The blocks of {type(self.model).__name__} differ, or there are few.",
                why="layouts are compared by one block, which stands for all",
                fix="count layouts one by one: give --world-size and the degrees",
            )
        small = copy.copy(self)
        small.world_size = math.prod(axis.degree for plugin in plugins for axis in plugin.axes())
        small.global_batch, small.instance = accumulation * rows * small.space(plugins).data_ranks, None
        plan = small.make_plan(plugins)
        return [
            small._dry(_Run(plan.plugins, 0, accumulation, rows, depth=depth, warm_up=False)) for depth in self.depths
        ]

    def space(self, plugins: Sequence[StrategyPlugin]) -> LayoutSpace:
        """Returns what a search of layouts has chosen with ``plugins``."""
        hardware = None if self.instance is None else self.instance.hardware()
        return LayoutSpace(
            config=self.config,
            world_size=self.world_size,
            global_batch=self.global_batch,
            sequence=self.sequence,
            model_groups=() if hardware is None else hardware.model_groups,
            ranks_per_host=self.world_size if hardware is None else hardware.full,
            chosen=tuple(plugins),
        )

    def _rows(self, plan: Plan, accumulation: int) -> int:
        ranks = plan.mesh.size(plan.mesh.data_axes)
        rows, rest = divmod(self.global_batch, ranks * accumulation)
        if rest or not rows:
            below = self.global_batch - rest
            near = [f"{batch}" for batch in (below, below + ranks * accumulation) if batch]
            raise PlanError(
                f"A global batch of {self.global_batch} samples cannot be split evenly.",
                where=f"mesh {plan.mesh}",
                why=f"there are {ranks} data-parallel ranks with {accumulation} micro-batches each",
                fix=f"choose a global batch of {' or '.join(near)}, or other degrees",
            )
        return rows

    def _extrapolated(
        self,
        plan: Plan,
        pipeline: StrategyPlugin | None,
        stages: Stages | None,
        accumulation: int,
        rows: int,
        rank: int,
        warm_up: bool,
        depths: tuple[int, int],
        only_if_fits: bool,
    ) -> StepCount:
        """Counts of a step, from steps with few blocks and micro-batches."""
        assert self.blocks is not None
        name = self.blocks
        position = 0 if stages is None else plan.mesh.coordinates(rank)[stages.axis]
        of_ranks = [(self.layers,)] if stages is None else stages.blocks
        own = of_ranks[position]
        in_order = [each[n] for n in range(len(own)) for each in of_ranks]  # by stage
        starts = [*itertools.accumulate(in_order, initial=0)][position : -1 : len(of_ranks)]
        blocks = [start + n for start, number in zip(starts, own, strict=True) for n in range(number)]

        def sizes(of_stages: Sequence[int]) -> list[Sequence[int]]:
            """Number of blocks in each stage of each rank: in those of other ranks, which it does not run, one."""
            return [of_stages if index == position else [1] * len(own) for index in range(len(of_ranks))]

        def run(
            of_stages: Sequence[int], plugins: tuple[StrategyPlugin, ...], accumulation: int, rows: int
        ) -> StepCount:
            if pipeline is not None:
                number = rows // rows_each
                plugins = tuple(with_stages(plugin, name, sizes(of_stages), number) for plugin in plugins)
            depth = sum(map(sum, sizes(of_stages)))
            return self._run(_Run(plugins, rank, accumulation, rows, depth=depth, warm_up=warm_up))

        def of_depth(plugins: tuple[StrategyPlugin, ...], accumulation: int, rows: int) -> StepCount:
            # Where stages have few blocks, all of them are no more work than two depths.
            if sum(own) <= sum(depths) * len(own) and (stages is None or self._period == 1):
                return at_blocks(run(own, plugins, accumulation, rows), name, blocks)
            shallow = [run([depth] * len(own), plugins, accumulation, rows) for depth in depths]
            return extrapolate(shallow, sum(own) / len(own), name, blocks[-1], depths)

        rows_each = 0 if stages is None else rows // stages.microbatches
        if stages is None or accumulation > 1:
            # Of what is sharded, a micro-batch between the first and the last may need most: it adds to all gradients,
            # and weights may stay gathered after it.
            few = 3 if any(plugin.spec.shards for plugin in plan.plugins) else 2
            if accumulation <= few:
                return of_depth(plan.plugins, accumulation, rows)
            counts = [of_depth(plan.plugins, 1, rows)]
            if only_if_fits and not self._fits(counts[0]):
                return counts[0]
            counts.append(of_depth(plan.plugins, few, rows))
            return repeat(counts, (1, few), accumulation, (1, 1, 1))
        # One micro-batch alone adds to no gradients, so that no further one is like it.
        numbers = (stages.multiple, 2 * stages.multiple) if stages.multiple > 1 else (2, 3)
        if stages.microbatches <= numbers[1]:
            return of_depth(plan.plugins, 1, rows)
        assert pipeline is not None
        kept, ones = [], [1] * len(own)
        for number in numbers:
            smaller = with_stages(pipeline, name, sizes(ones), number)
            few_stages = stages_of(smaller, self._shallow(sum(map(sum, sizes(ones)))))
            assert few_stages is not None
            kept.append(few_stages.in_flight[position])
        counts = [of_depth(plan.plugins, 1, numbers[0] * rows_each)]
        if only_if_fits and not self._fits(counts[0]):
            return counts[0]
        counts.append(of_depth(plan.plugins, 1, numbers[1] * rows_each))
        return repeat(counts, numbers, stages.microbatches, (*kept, stages.in_flight[position]))

    def _fits(self, count: StepCount) -> bool:
        return self.core_bytes is None or verdict_of(count.peak.total, self.core_bytes, self.reserve) == FITS

    @cache  # noqa: B019  lives as long as the planner
    def _shallow(self, depth: int) -> nn.Module:
        return model_without_weights(_with_depth(self.config, depth))

    def _run(self, run: _Run) -> StepCount:
        key = f"{self.world_size} {run!r}"  # options of plugins may have no hash
        if key not in self._counts:
            self._counts[key] = self._dry(run)
        return self._counts[key]

    def _dry(self, run: _Run) -> StepCount:
        with accelerate_set_aside():
            from neuron_accel import NeuronAccelerator

            accelerator = NeuronAccelerator(
                plugins=_without_companions(run.plugins),
                backend=DryRun(world_size=self.world_size, rank=run.rank),
                gradient_accumulation_steps=run.accumulation,
                **self._options,
            )
            shape = (run.rows, self.sequence)
            config = self.config if run.depth is None else _with_depth(self.config, run.depth)

            def build() -> nn.Module:
                return model_without_weights(config).to(getattr(torch, self.dtype))

            def batch() -> dict[str, torch.Tensor]:
                ids = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
                return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

            try:
                return count_step(
                    accelerator,
                    build,
                    batch,
                    optimizer=partial(torch.optim.AdamW, foreach=self.foreach),
                    blocks=self.blocks,
                    warm_up=run.warm_up,
                    results=self._results,
                )
            finally:
                accelerator.end_training()


def checked_reserve(reserve: int | None, core_bytes: int | None) -> int:
    """Returns the bytes of a core that are reserved: ``reserve``, or what is assumed; 0 without a core.

    Raises:
        ConfigurationError: if it is negative, more than a core has, or there is no core.
    """
    if reserve is None:
        return 0 if core_bytes is None else reserve_of(core_bytes)
    if core_bytes is None:
        raise ConfigurationError(
            "A reserve has no effect without an instance.", where="reserve", fix="name an instance, or leave it out"
        )
    if not 0 <= reserve < core_bytes:
        raise ConfigurationError(
            f"A reserve of {reserve / 2**30:.3g} GiB is not possible.",
            where="reserve",
            why=f"a core has {core_bytes / 2**30:.3g} GiB",
            fix="pass less than that, and at least 0",
        )
    return reserve


def _axes_apart(plugin: StrategyPlugin) -> tuple[StrategyPlugin, ...]:
    """The plugin, or its companions if these have the axes: stages of a pipeline are changed one plugin at a time."""
    companions = plugin.companions()
    return companions if any(companion.axes() for companion in companions) else (plugin,)


def _without_companions(plugins: Sequence[StrategyPlugin]) -> list[StrategyPlugin]:
    """The plugins of a plan as a user gives them: companions come with the plugin that they belong to."""
    companions = {companion.spec.name for plugin in plugins for companion in plugin.companions()}
    return [plugin for plugin in plugins if plugin.spec.name not in companions]


def _different_ranks(mesh: Mesh, stages: Stages, quick: bool) -> list[int]:
    """Returns the first rank of each stage to count: the first and the last, and of the others those that no other
    stage exceeds in blocks and micro-batches in flight; with ``quick`` only those that the first and the last stage,
    which have modules besides their blocks, do not exceed either.
    """
    size = len(stages.blocks)
    loads = {index: (sum(stages.blocks[index]), stages.in_flight[index]) for index in range(size)}
    ends = (loads.pop(0), loads.pop(size - 1, (0, 0)))

    def exceeded(load: tuple[int, int]) -> bool:
        others = {other for other in loads.values() if other != load} | (set(ends) if quick else set())
        return any(all(a >= b for a, b in zip(other, load, strict=True)) for other in others)

    inner = {load: index for index, load in reversed(loads.items()) if not exceeded(load)}
    return [mesh.rank({stages.axis: index}) for index in sorted({0, *inner.values(), size - 1})]


def _divisors_near(wanted: int, number: int) -> list[str]:
    """The divisors of ``number`` below and above ``wanted``."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    near = [
        max((n for n in divisors if n < wanted), default=None),
        min((n for n in divisors if n > wanted), default=None),
    ]
    return [str(n) for n in near if n is not None]


@contextmanager
def no_collection_of_what_is_there() -> Iterator[None]:
    """A context in which garbage collection examines new objects only: those since it was entered, or since
    :func:`forget_what_is_there`."""
    forget_what_is_there()
    try:
        yield
    finally:
        gc.unfreeze()


def forget_what_is_there() -> None:
    """Makes garbage collection examine only objects that are created from now on."""
    gc.collect()
    gc.freeze()


@contextmanager
def accelerate_set_aside() -> Iterator[None]:
    """A context in which Accelerate's state, which all accelerators of a process share, is a new one."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    classes = (PartialState, AcceleratorState, GradientState)
    kept = [dict(cls._shared_state) for cls in classes]
    for cls in classes:
        cls._shared_state.clear()
    try:
        yield
    finally:
        for cls, state in zip(classes, kept, strict=True):
            cls._shared_state.clear()
            cls._shared_state.update(state)


# ---- the model -------------------------------------------------------------------------------------------------------
def _configuration(model: Any) -> Any:
    """A copy of the transformers configuration that ``model`` is, or names."""
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        return copy.deepcopy(model)
    file = find_model(model)
    if isinstance(file, dict):
        return AutoConfig.for_model(**file)
    try:
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        if kind is None:
            raise ValueError("it has no model_type")
        return AutoConfig.from_pretrained(file)
    except (ValueError, KeyError, AttributeError, OSError) as error:
        raise ConfigurationError(
            f"{file} is not a configuration of transformers.",
            where="model",
            why=str(error).splitlines()[0],
            fix="pass the config.json that save_pretrained writes beside a model",
        ) from error


def _check_sequence(config: Any, sequence: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < sequence:
        raise ConfigurationError(
            f"A sequence of {sequence} tokens is longer than the model allows.",
            where="max_position_embeddings of the model",
            why=f"it has {longest} positions",
            fix=f"choose at most {longest} tokens, or change the model's configuration",
        )


def _set_experts(config: Any, implementation: str) -> None:
    """Sets how a mixture of experts is computed, if the model has one."""
    if any(getattr(config, name, None) for name in _EXPERTS):
        config._experts_implementation = implementation


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configurations."""


def _with_depth(config: Any, depth: int) -> Any:
    """A copy of a configuration, of a model with so many blocks."""
    shallow = copy.deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:  # an entry for each block
            setattr(shallow, name, (value * -(-depth // len(value)))[:depth])
    shallow.num_hidden_layers = depth
    return shallow


_FEWER = ("sliding_attention", "chunked_attention")
"""Kinds of blocks that attend to fewer tokens than others: they take at most as much time and memory."""


def _depths_that_bound(config: Any, full: nn.Module, blocks: str | None, period: int) -> tuple[int, int]:
    """The numbers of blocks of two models whose counts bound those of the model, instead of being extrapolated to them:
    as few as possible. Kinds of blocks that differ in what they attend to alone need not be in both, if the first block
    takes no more than the others."""
    depth = getattr(config, "num_hidden_layers", 0)
    first = (getattr(config, "layer_types", None) or [None])[0]
    if blocks is not None and first in _FEWER and depth % period == 0:
        shapes = [[p.shape for p in block.parameters()] for block in full.get_submodule(blocks).children()]
        if all(each == shapes[0] for each in shapes):
            return 1, 1 + period
    return depths_of(period, depth, least=1)


def _alike_blocks(config: Any, full: nn.Module) -> tuple[str | None, int]:
    """FQN of the list of the model's blocks and after how many of them their kinds repeat, 1 if all are alike; None if
    they do not, or there are no more blocks than would be run."""
    from torch import nn

    depth = getattr(config, "num_hidden_layers", None)
    lists = [
        name for name, module in full.named_modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not isinstance(depth, int) or len(lists) != 1:
        return None, 1
    found = full.get_submodule(lists[0]).children()
    kinds = getattr(config, "layer_types", None) or [None] * depth
    blocks = [
        (kind, [(name, p.shape) for name, p in block.named_parameters()])
        for kind, block in zip(kinds, found, strict=False)
    ]
    for period in range(1, depth):
        if max(depths_of(period, depth)) >= depth:
            break
        if blocks[period:] == blocks[:-period]:
            return lists[0], period
    return None, 1
