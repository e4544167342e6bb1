"""A trial run that only collects graphs, for neuron_parallel_compile: short, and without side effects."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from neuron_accel.backends.select import flag
from neuron_accel.engine.plan.plugin import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.runtime.run import Run

F = TypeVar("F", bound=Callable[..., Any])


# ---- A trial run that only collects graphs: short, and over as soon as every phase was seen once ---------------------
@dataclass(frozen=True, kw_only=True)
class PrecompilationPlugin(StrategyPlugin):
    """Ends a trial early: each pass over a prepared loader ends after ``max_steps`` steps' worth of batches, so that
    what comes after the first epoch (evaluation, say) is seen, too; and the process ends, well, before it would take
    more than ``max_steps`` optimizer steps. After the second step everything that is pending, such as values that are
    logged, is executed once: the first step after an evaluation, or after loading a checkpoint, begins like that, and
    is another graph than one that computes them as well.

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
        return ShortLoader(dataloader, self.max_steps * self.batches_per_step, lambda: self._execute_once(run))

    def _execute_once(self, run: Run) -> None:
        state = run.state(self)
        if not state.get("executed") and 2 in state.get("steps", {}).values():
            state["executed"] = True
            run.backend.step_boundary()

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        steps = run.state(self).setdefault("steps", {})
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if steps[id(optimizer)] > self.max_steps:
            run.backend.step_boundary()
            print(f"neuron-accel: collected graphs of {self.max_steps} steps; the trial ends here", file=sys.stderr)
            raise SystemExit(0)


class ShortLoader:
    """A loader that yields no more than ``most`` batches at a time, and is the loader otherwise.

    Args:
        between: called before each batch but the first.
    """

    def __init__(self, loader: Any, most: int, between: Callable[[], None]) -> None:
        self.__dict__.update(_loader=loader, _most=most, _between=between)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        try:
            for index, batch in enumerate(itertools.islice(batches, self._most)):
                if index:
                    self._between()
                yield batch
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


# ---- What steps aside in a trial run that only collects graphs, where every value is zero and nothing is worth keeping
TRIAL_VARIABLE = "NEURON_EXTRACT_GRAPHS_ONLY"
STEPS_VARIABLE = "NEURON_ACCEL_PRECOMPILE_STEPS"
LOOKS_AT_VALUES = "looks-at-values"
"""The capability of plugins that only inspect values; a trial runs without them."""


def is_trial(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether neuron_parallel_compile runs this process to collect graphs."""
    return flag(environ, TRIAL_VARIABLE)


def for_trial(plugins: list[StrategyPlugin], accumulation: int, environ: Mapping[str, str]) -> list[StrategyPlugin]:
    """The plugins of a trial: without those that only inspect values, with one that ends it early.

    Raises:
        ConfigurationError: if the number of steps is none.
    """

    text = environ.get(STEPS_VARIABLE, "").strip() or "10"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{STEPS_VARIABLE}={text} is not a number of steps.", where=STEPS_VARIABLE)
    kept = [p for p in plugins if LOOKS_AT_VALUES not in getattr(getattr(p, "spec", None), "provides", ())]
    return [*kept, PrecompilationPlugin(max_steps=int(text), batches_per_step=accumulation)]


def steps_aside(result: Callable[..., Any]) -> Callable[[F], F]:
    """For methods of an accelerator: in a trial they do nothing.

    Args:
        result: what they return then, from the same arguments.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return result(*args, **kwargs) if self.is_precompiling else method(self, *args, **kwargs)

        return wrapper  # type: ignore[return-value]  # it has the signature of the method

    return decorate


def nothing(*_: Any, **__: Any) -> None:
    """Of methods that return nothing."""


def no(*_: Any, **__: Any) -> bool:
    """Of questions."""
    return False


def folder(output_dir: Any = None, *_: Any, **__: Any) -> str:
    """Of methods that return the folder they wrote."""
    return "" if output_dir is None else os.fspath(output_dir)


def itself(tensor: Any, *_: Any, **__: Any) -> Any:
    """Of methods that return what they were given, changed."""
    return tensor
