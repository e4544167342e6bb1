# SPDX-License-Identifier: Apache-2.0
"""What a search of layouts asks strategies: which configurations it may try, and how the blocks of a model are
distributed over the stages of a pipeline.

For the strategies of ``neuron_accel`` the answers are here. A plugin of another package answers by methods, all
optional:

- ``layouts(cls, space)``, a class method: the configurations that are tried, besides doing without the plugin. Classes
  are asked in the order in which they act; combinations that cannot run are ruled out later, by the plan and by a
  dry run.
- ``stages(self, model)``: how it distributes the blocks of a model that is not prepared, as :class:`Stages`; None if
  every rank has all of them.
- ``with_stages(self, blocks, sizes, microbatches)``: the plugin for a smaller model and batch, see :func:`with_stages`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import neuron_accel
from neuron_accel.contract import AxisKind, AxisSpec, StrategyPlugin
from neuron_accel_plan.timeline import NAMES, in_flight, make_timeline, schedule_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Stages:
    """How a plugin distributes the blocks of a model, and the micro-batches of a batch, over the ranks of an axis.

    Args:
        axis: name of the axis.
        blocks: for each rank along the axis, the number of blocks in each stage that it has.
        microbatches: number of micro-batches into which a rank's batch is split.
        multiple: the number of micro-batches is a multiple of this.
        in_flight: for each rank, the largest number of forward passes of stages whose activations it keeps at a time.
        bubble: fraction of time, from 0 to 1, in which the rank that computes longest waits for others.
        passes: for each rank, what it computes: the name of each pass, its start and its end, in the time of one
            forward pass. Reports draw it; may be empty.
    """

    axis: str
    blocks: tuple[tuple[int, ...], ...]
    microbatches: int
    in_flight: tuple[int, ...]
    bubble: float
    multiple: int = 1
    passes: tuple[tuple[tuple[str, float, float], ...], ...] = field(default=(), repr=False)


@dataclass(frozen=True, kw_only=True)
class LayoutSpace:
    """What a search of layouts is for, and what is chosen so far.

    Args:
        config: the configuration of the model, as of transformers.
        world_size: number of ranks.
        global_batch: samples in an optimizer step, over all ranks.
        sequence: tokens in a sample.
        model_groups: possible sizes of groups of neighbouring ranks that shard parameters.
        ranks_per_host: number of ranks of a machine.
        chosen: plugins that act earlier, configured.
    """

    config: Any
    world_size: int
    global_batch: int
    sequence: int
    model_groups: tuple[int, ...]
    ranks_per_host: int
    chosen: tuple[StrategyPlugin, ...] = ()

    def __repr__(self) -> str:
        what = f"{type(self.config).__name__} on {self.world_size} ranks"
        chosen = ", ".join(plugin.spec.name for plugin in self.chosen) or "none"
        return (
            f"<{type(self).__name__}: {what}, {self.global_batch} samples of {self.sequence} tokens; chosen: {chosen}>"
        )

    def degree(self, axis: str) -> int:
        """Number of ranks along an axis of the chosen plugins; 1 without it."""
        return math.prod(found.degree for found in self._axes if found.name == axis)

    @property
    def replicas(self) -> int:
        """Number of ranks that no axis of the chosen plugins takes."""
        return self.world_size // math.prod(axis.degree for axis in self._axes)

    @property
    def data_ranks(self) -> int:
        """Number of ranks with other samples, if all :attr:`replicas` are data-parallel."""
        data = (AxisKind.DATA, AxisKind.REPLICA)
        return self.replicas * math.prod(axis.degree for axis in self._axes if axis.kind in data)

    @functools.cached_property
    def _axes(self) -> tuple[AxisSpec, ...]:
        return tuple(axis for plugin in self.chosen for axis in plugin.axes())


# ---- layouts ---------------------------------------------------------------------------------------------------------
Configurations = Callable[[type[Any], LayoutSpace], Iterable[StrategyPlugin]]


def layouts_by(cls: type[StrategyPlugin]) -> Callable[[LayoutSpace], Iterable[StrategyPlugin]] | None:
    """Returns what gives the configurations of a class that a search tries; None if it offers none. A subclass offers
    those of its base class."""
    for base in cls.__mro__:
        if "layouts" in vars(base):
            return cls.layouts  # type: ignore[attr-defined]
        if base in _built_in():
            return functools.partial(_built_in()[base], cls)
    return None


@functools.cache
def _built_in() -> Mapping[type[Any], Configurations]:
    return {
        neuron_accel.ActivationCheckpointingPlugin: lambda cls, space: [cls(), cls(modules="core_attention")],
        neuron_accel.ChunkedLossPlugin: lambda cls, space: [cls()],
        neuron_accel.FlashAttentionPlugin: lambda cls, space: [cls()],
        neuron_accel.PipelineParallelPlugin: _pipelines,
        neuron_accel.SequenceParallelPlugin: lambda cls, space: [cls()] if space.degree("tp") > 1 else [],
        neuron_accel.TensorParallelPlugin: lambda cls, space: [
            cls(tensor_parallel_size=size) for size in space.model_groups if space.replicas % size == 0
        ],
        neuron_accel.Zero1Plugin: lambda cls, space: [cls()] if space.replicas > 1 else [],
    }


def _pipelines(cls: type[Any], space: LayoutSpace) -> Iterable[StrategyPlugin]:
    """Up to 16 stages, micro-batches of 1, 2 or 4 samples, at least as many as there are stages, and every schedule but
    GPipe, which has the bubble of 1F1B and keeps more."""
    layers = getattr(space.config, "num_hidden_layers", 0)
    for ranks in (2, 4, 8, 16):
        if ranks > layers or space.replicas % ranks:
            continue
        batch, rest = divmod(space.global_batch * ranks, space.data_ranks)
        for number in () if rest else [batch // size for size in (1, 2, 4) if batch % size == 0]:
            if number < ranks:
                continue
            plain = cls(pipeline_parallel_size=ranks, num_microbatches=number)
            yield plain
            yield dataclasses.replace(plain, schedule="zero-bubble")
            if 2 * ranks <= layers and number % ranks == 0:
                yield dataclasses.replace(plain, schedule="interleaved", virtual_stages=2)


# ---- stages ----------------------------------------------------------------------------------------------------------
def has_stages(plugin: StrategyPlugin) -> bool:
    """Whether a plugin may distribute blocks over stages."""
    return isinstance(plugin, neuron_accel.PipelineParallelPlugin) or hasattr(plugin, "stages")


def stages_of(plugin: StrategyPlugin, model: torch.nn.Module) -> Stages | None:
    """Returns how a plugin distributes the blocks of ``model``, which is not prepared; None if every rank has all of
    them. The bubble is that of passes of equal stages.

    Raises:
        UnsupportedModelError: if the model cannot be split so.
    """
    if not isinstance(plugin, neuron_accel.PipelineParallelPlugin):
        return plugin.stages(model) if has_stages(plugin) else None  # type: ignore[attr-defined]
    schedule = schedule_of(plugin)
    timeline = make_timeline(schedule)
    passes: list[list[tuple[str, float, float]]] = [[] for _ in range(schedule.ranks)]
    for span in timeline.spans:
        passes[span.rank].append((NAMES[span.action.kind], span.start, span.end))
    (axis,) = plugin.axes()
    return Stages(
        axis=axis.name,
        blocks=plugin.blocks(model),
        microbatches=plugin.num_microbatches,
        multiple=schedule.ranks if plugin.virtual_stages > 1 else 1,
        in_flight=tuple(in_flight(schedule, rank) for rank in range(schedule.ranks)),
        bubble=timeline.bubble_share,
        passes=tuple(map(tuple, passes)),
    )


def with_stages(
    plugin: StrategyPlugin, blocks: str, sizes: Sequence[Sequence[int]], microbatches: int
) -> StrategyPlugin:
    """Returns a plugin for a smaller model and batch, from which those of a large one are extrapolated.

    Args:
        plugin: the plugin; one without stages is returned as it is.
        blocks: FQN of the list of blocks.
        sizes: number of blocks in each stage of each rank, as in :class:`Stages`.
        microbatches: number of micro-batches.
    """
    if isinstance(plugin, neuron_accel.PipelineParallelPlugin):
        in_order = [own[index] for index in range(plugin.virtual_stages) for own in sizes]
        cuts = tuple(f"{blocks}.{start}" for start in itertools.accumulate(in_order[:-1]))
        return dataclasses.replace(plugin, stage_cuts=cuts, num_microbatches=microbatches)
    smaller = getattr(plugin, "with_stages", None)
    return plugin if smaller is None else smaller(blocks, sizes, microbatches)
