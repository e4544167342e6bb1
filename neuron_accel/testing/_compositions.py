"""The compositions in which the conformance kit tries a plugin: with every built-in strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.engine.plan.plugin import StrategyPlugin
from neuron_accel.testing.parity import axes_of

MOST_RANKS = 8
"""Data parallelism is added to a composition only while it has no more ranks than this."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Built-in strategies beside a plugin.

    Args:
        built_in: makes them.
        data: wanted number of data-parallel ranks.
        lazy: whether there is such a thing on lazy devices.
        sends: whether it sends from rank to rank.
    """

    built_in: Callable[[], tuple[StrategyPlugin, ...]]
    data: int = 2
    lazy: bool = True
    sends: bool = False

    def exists_on(self, backend: str) -> bool:
        """Whether there is such a thing on ranks that ``run_ranks`` calls ``backend``."""
        return not (backend == "xla" and not self.lazy) and not (backend == "native" and self.sends)

    def beside(self, plugins: tuple[StrategyPlugin, ...]) -> tuple[StrategyPlugin, ...] | None:
        """``plugins`` and the built-in ones; None if it would have one of them twice."""
        own = self.built_in()
        return None if names_of(plugins) & names_of(own) else (*plugins, *own)

    def ranks(self, plugins: tuple[StrategyPlugin, ...], alone: int | None) -> int:
        """On how many ranks to try it; ``plugins`` are all, ``alone`` is the author's wish for a plugin by itself."""
        product = self.fewest(plugins)
        if not self.built_in() and alone is not None:
            return alone
        data = self.data if product * self.data <= max(MOST_RANKS, product) else 1
        return max(product * data, 2)

    def fewest(self, plugins: tuple[StrategyPlugin, ...]) -> int:
        """Ranks without data parallelism."""
        return math.prod(axis.degree for plugin in plugins for axis in axes_of(plugin))


def names_of(plugins: Iterable[StrategyPlugin]) -> set[str]:
    """Of plugins and their companions."""
    found: set[str] = set()
    for plugin in plugins:
        found |= {plugin.spec.name, *names_of(plugin.companions())}
    return found


def data_parallel_size(plugins: tuple[StrategyPlugin, ...], ranks: int) -> int:
    """How many of these ranks see different samples."""
    axes = [axis for plugin in plugins for axis in axes_of(plugin)]
    return ranks // math.prod(axis.degree for axis in axes if axis.kind not in (AxisKind.DATA, AxisKind.REPLICA))


def _zero1() -> tuple[StrategyPlugin, ...]:
    from neuron_accel import Zero1Plugin

    return (Zero1Plugin(),)


def _tensor() -> tuple[StrategyPlugin, ...]:
    from neuron_accel import TensorParallelPlugin

    return (TensorParallelPlugin(tensor_parallel_size=2),)


def _tensor_and_sequence() -> tuple[StrategyPlugin, ...]:
    from neuron_accel import SequenceParallelPlugin

    return (*_tensor(), SequenceParallelPlugin())


def _tensor_and_zero1() -> tuple[StrategyPlugin, ...]:
    return (*_tensor(), *_zero1())


def _pipeline() -> tuple[StrategyPlugin, ...]:
    from neuron_accel import PipelineParallelPlugin

    return (PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2),)


def _recompute() -> tuple[StrategyPlugin, ...]:
    from neuron_accel import ActivationCheckpointingPlugin

    return (ActivationCheckpointingPlugin(),)


def _guards() -> tuple[StrategyPlugin, ...]:
    from neuron_accel.strategies.guards import DesyncGuard, FiniteGuard, RecompileGuard, ReplicaCheck

    return (DesyncGuard(timeout_s=30.0), RecompileGuard(), ReplicaCheck(every=1), FiniteGuard())


COMPOSITIONS = {
    "alone": Composition(built_in=tuple, data=1),
    "zero1": Composition(built_in=_zero1),
    "tp2": Composition(built_in=_tensor),
    "tp2-sp": Composition(built_in=_tensor_and_sequence),
    "tp2-zero1": Composition(built_in=_tensor_and_zero1),
    "pp2": Composition(built_in=_pipeline, lazy=False, sends=True),
    "recompute": Composition(built_in=_recompute),
    "guards": Composition(built_in=_guards),
}
