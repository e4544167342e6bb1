"""A trial run that only collects graphs: short, and over as soon as every phase was seen once."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.engine.errors import ConfigurationError
from neuron_accel.engine.plugin import Phase, PluginSpec, StrategyPlugin

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.run import Run


@dataclass(frozen=True, kw_only=True)
class PrecompilationPlugin(StrategyPlugin):
    """Ends a trial early: each pass over a prepared loader ends after ``max_steps`` steps' worth of batches, so that
    what comes after the first epoch (evaluation, say) is seen, too; and the process ends, well, before it would take
    more than ``max_steps`` optimizer steps.

    Args:
        max_steps: optimizer steps to take. The SDK recommends 10 to 15 for trainings with a schedule.
        batches_per_step: micro-batches that a step accumulates.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(name="precompilation", phase=Phase.OPTIMIZER)

    max_steps: int = 10
    batches_per_step: int = 1

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ConfigurationError(f"max_steps is {self.max_steps}; it takes a step to collect a graph.")

    def transform_dataloader(self, dataloader: Any, run: Run) -> Any:
        return ShortLoader(dataloader, self.max_steps * self.batches_per_step)

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        steps = run.state(self).setdefault("steps", {})
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if steps[id(optimizer)] > self.max_steps:
            run.backend.step_boundary()
            print(f"neuron-accel: collected graphs of {self.max_steps} steps; the trial ends here", file=sys.stderr)
            raise SystemExit(0)


class ShortLoader:
    """A loader that yields no more than ``most`` batches at a time, and is the loader otherwise."""

    def __init__(self, loader: Any, most: int) -> None:
        self.__dict__.update(_loader=loader, _most=most)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        try:
            yield from itertools.islice(batches, self._most)
        finally:
            with contextlib.suppress(AttributeError):
                batches.close()  # a generator, which would otherwise count as the loader in use
                if self._loader in self._loader.gradient_state.dataloader_references:
                    self._loader.end()

    def __len__(self) -> int:
        return min(len(self._loader), self._most)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)
