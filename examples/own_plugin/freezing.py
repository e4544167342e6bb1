"""What trains: parameters are frozen and unfrozen by schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, ClassVar

import torch

from neuron_accel.contract import ParameterRecord, Phase, PluginSpec, PreparedModel, Run, StrategyPlugin
from neuron_accel.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class FreezingSchedule(StrategyPlugin):
    """Freezes parameters until or from a step on; gradual unfreezing is one of its schedules.

    A frozen parameter keeps its value and its optimizer state, and its gradient is neither computed nor sent. What was
    frozen when the model was prepared stays so. A lazy device compiles a graph each time something changes.

    Args:
        until: steps after which parameters begin to train, by patterns of their names.
        after: steps after which parameters no longer train, by patterns of their names.

    Source: Howard and Ruder, "Universal Language Model Fine-tuning for Text Classification" (2018, arXiv:1801.06146).
    """

    spec: ClassVar[PluginSpec] = PluginSpec(name="freezing_schedule", api_version=4, phase=Phase.ADAPTATION)

    until: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        for pattern in (*self.until, *self.after):
            if not any(fnmatch(name, pattern) for record in model.parameters for name in record.names):
                raise ConfigurationError(
                    f"No parameter is called {pattern!r}.",
                    where="plugin 'freezing_schedule'",
                    fix="compare it with the names in model.named_parameters()",
                )
        run.undo(lambda: self.thaw(run))
        # Records, not parameters: those are replaced when the model is sharded.
        run.state(self).setdefault("records", []).extend(record for record in model.parameters if record.trains)
        self.apply(run)

    def trains(self, record: ParameterRecord, steps: int) -> bool:
        def any_of(schedule: Mapping[str, int]) -> list[int]:
            return [limit for pattern, limit in schedule.items() for name in record.names if fnmatch(name, pattern)]

        return all(steps >= limit for limit in any_of(self.until)) and all(steps < x for x in any_of(self.after))

    def apply(self, run: Run) -> None:
        steps = run.state(self).setdefault("steps", 0)
        for record in run.state(self).get("records", []):
            parameter, trains = record.current, self.trains(record, steps)
            if parameter is not None and parameter.requires_grad != trains:  # None: on another rank
                parameter.requires_grad_(trains)
                parameter.grad = None  # else the optimizer would use the last one again

    def thaw(self, run: Run) -> None:
        for record in run.state(self)["records"]:
            if record.current is not None:
                record.current.requires_grad_(True)

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        yield
        if run.state(self).setdefault("clock", optimizer) is optimizer:  # of several, the first one counts
            run.state(self)["steps"] += 1
            self.apply(run)

    def save(self, run: Run) -> dict[str, Any]:
        return {"steps": run.state(self).get("steps", 0)}

    def load(self, state: dict[str, Any], run: Run) -> None:
        if state:
            run.state(self)["steps"] = state["steps"]
            self.apply(run)
