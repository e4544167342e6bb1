# SPDX-License-Identifier: Apache-2.0
"""The compositions with built-in strategies in which the conformance kit runs a plugin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neuron_accel.doors import PLUGINS, entry_points
from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.engine.plan.plugin import StrategyPlugin
from neuron_accel.engine.plan.registry import default_registry

from .parity import axes_of

MAX_RANKS = 8
"""Data parallelism is added to a composition only if it then has at most this many ranks."""


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Built-in strategies with which a plugin is composed.

    Args:
        built_in: creates the strategies.
        data: number of data-parallel ranks.
        lazy: whether lazy devices support it.
        sends: whether it needs point-to-point communication.
        needs: names of plugins of other packages, without which it is left out.
    """

    built_in: Callable[[], tuple[StrategyPlugin, ...]]
    data: int = 2
    lazy: bool = True
    sends: bool = False
    needs: frozenset[str] = frozenset()

    @property
    def is_installed(self) -> bool:
        return self.needs <= {point.name for point in entry_points(PLUGINS)}

    def exists_on(self, backend: str) -> bool:
        """Whether ranks of this ``backend`` of ``run_ranks`` support it, and its plugins are installed."""
        return (
            self.is_installed and not (backend == "xla" and not self.lazy) and not (backend == "native" and self.sends)
        )

    def beside(self, plugins: tuple[StrategyPlugin, ...]) -> tuple[StrategyPlugin, ...] | None:
        """``plugins`` and the built-in ones; None if a plugin would be in it twice."""
        own = self.built_in()
        return None if names_of(plugins) & names_of(own) else (*plugins, *own)

    def ranks(self, plugins: tuple[StrategyPlugin, ...], alone: int | None) -> int:
        """The number of ranks to run it on.

        Args:
            plugins: all plugins.
            alone: the number of ranks for a plugin without built-in strategies, if its author has set one.
        """
        product = self.fewest(plugins)
        if not self.built_in() and alone is not None:
            return alone
        data = self.data if product * self.data <= max(MAX_RANKS, product) else 1
        return max(product * data, 2)

    def fewest(self, plugins: tuple[StrategyPlugin, ...]) -> int:
        """The number of ranks without data parallelism."""
        return math.prod(axis.degree for plugin in plugins for axis in axes_of(plugin))


def names_of(plugins: Iterable[StrategyPlugin]) -> set[str]:
    """The names of plugins and their companions."""
    found: set[str] = set()
    for plugin in plugins:
        found |= {plugin.spec.name, *names_of(plugin.companions())}
    return found


def data_parallel_size(plugins: tuple[StrategyPlugin, ...], ranks: int) -> int:
    """The data-parallel size on this number of ranks."""
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


_GUARDS: Mapping[str, Mapping[str, Any]] = {
    "desync_guard": {"timeout_s": 30.0},
    "recompile_guard": {},
    "replica_check": {"every": 1},
    "finite_guard": {},
    "sum_check": {},
}


def _guards() -> tuple[StrategyPlugin, ...]:
    return tuple(default_registry().get(name)(**options) for name, options in _GUARDS.items())


COMPOSITIONS = {
    "alone": Composition(built_in=tuple, data=1),
    "zero1": Composition(built_in=_zero1),
    "tp2": Composition(built_in=_tensor),
    "tp2-sp": Composition(built_in=_tensor_and_sequence),
    "tp2-zero1": Composition(built_in=_tensor_and_zero1),
    "pp2": Composition(built_in=_pipeline, lazy=False, sends=True),
    "recompute": Composition(built_in=_recompute),
    "guards": Composition(built_in=_guards, needs=frozenset(_GUARDS)),
}
