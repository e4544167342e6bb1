"""Plugins with a fault, which the fuzzer must find."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ScalesGradients(StrategyPlugin):
    """Every gradient is one percent too large."""

    spec = PluginSpec(name="scales_gradients", api_version=4, phase=Phase.MEMORY)

    def step(self, optimizer: Any, run: Any) -> Iterator[None]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1.01)
        yield


@dataclass(frozen=True, kw_only=True)
class Trips(StrategyPlugin):
    """Raises what no user understands."""

    spec = PluginSpec(name="trips", api_version=4, phase=Phase.MEMORY)

    def step(self, optimizer: Any, run: Any) -> Iterator[None]:
        raise KeyError("params")
        yield


@dataclass(frozen=True, kw_only=True)
class Waits(StrategyPlugin):
    """Never gets anywhere."""

    spec = PluginSpec(name="waits", api_version=4, phase=Phase.MEMORY)

    def step(self, optimizer: Any, run: Any) -> Iterator[None]:
        time.sleep(60)
        yield


@dataclass(frozen=True, kw_only=True)
class Refuses(StrategyPlugin):
    """Says in words that it cannot."""

    spec = PluginSpec(name="refuses", api_version=4, phase=Phase.MEMORY)

    def step(self, optimizer: Any, run: Any) -> Iterator[None]:
        raise PlanError("Not like this.")
        yield
