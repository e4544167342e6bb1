"""State of its own: a moving average of the weights, which is evaluated, and is saved and loaded with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from neuron_accel.contract import Phase, PluginSpec, Run, ShardedState, StrategyPlugin
from neuron_accel.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class WeightAverage(StrategyPlugin):
    """Keeps an exponential moving average of the weights that train, in float32.

    Each rank averages what it holds, so nothing is sent. Within ``averaged(accelerator.run)`` the model has the
    averages, to be evaluated or saved.

    Args:
        decay: how much of the average a step keeps; from 0 to less than 1.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="weight_average",
        api_version=4,
        phase=Phase.OPTIMIZER,
        conflicts=frozenset({"fully_sharded"}),  # between steps no rank has weights to read there
    )

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ConfigurationError(f"decay={self.decay} is not possible.", fix="choose one from 0 to less than 1")

    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Starts with the initial weights; now, so that a lazy device has one graph for all steps."""
        averages = run.state(self).setdefault("averages", {})
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            averages[parameter] = parameter.detach().float().clone()
        return optimizer

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        yield
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            run.state(self)["averages"][parameter].lerp_(parameter.detach().float(), 1 - self.decay)

    @contextmanager
    def averaged(self, run: Run) -> Iterator[None]:
        """A context in which the model has the averages. Enter it between steps, on every rank."""
        averages = run.state(self)["averages"]
        weights = {parameter: parameter.detach().clone() for parameter in averages}
        self.copy(averages, run)
        try:
            yield
        finally:
            self.copy(weights, run)

    @torch.no_grad()
    def copy(self, values: dict[torch.nn.Parameter, torch.Tensor], run: Run) -> None:
        for parameter, value in values.items():
            parameter.copy_(value)
        run.backend.step_boundary()  # a lazy device copies now, on every rank, whatever each reads next

    def save(self, run: Run) -> dict[str, Any]:
        """By name and laid out like the parameters, so that any mesh can load it."""
        averages, state = run.state(self).get("averages", {}), {}
        for index, model in enumerate(run.models):
            mine = {record.fqn: averages[record.current] for record in model.parameters if record.current in averages}
            state[f"model {index}"] = ShardedState(mine, index)
        return state

    def load(self, state: dict[str, Any], run: Run) -> None:
        """From a checkpoint without averages they start with its weights."""
        if not state:
            for parameter, average in run.state(self).get("averages", {}).items():
                average.copy_(parameter.detach())
        for sharded in state.values():
            for fqn, average in sharded.tensors.items():
                parameter = run.models[sharded.model].parameters[fqn].current
                run.state(self)["averages"][parameter].copy_(average)
