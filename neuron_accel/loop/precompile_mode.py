# SPDX-License-Identifier: Apache-2.0
"""Runs that only collect graphs, for neuron_parallel_compile: a few steps without side effects."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.backends.select import flag
from neuron_accel.engine.plan.plugin import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.runtime.run import PreparedModel, Run


# ---- Ending the run after a few steps of every phase -----------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class PrecompilationPlugin(StrategyPlugin):
    """Ends a run that only collects graphs after a few steps.

    Each pass over a prepared loader ends after the batches of ``max_steps`` steps, so that the graphs of what follows
    an epoch, such as an evaluation, are collected too. The process exits with code 0 before an optimizer takes more
    than ``max_steps`` steps. After the second step all pending operations, such as logged values, are executed once:
    the first step after an evaluation, or after loading a checkpoint, also begins with nothing pending, and its graph
    differs from that of a step that computes logged values as well.

    Args:
        max_steps: number of optimizer steps. The Neuron SDK recommends 10 to 15 for training with a schedule.
        batches_per_step: number of micro-batches that a step accumulates.

    Raises:
        ConfigurationError: if ``max_steps`` is less than 1.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="precompilation", api_version=4, phase=Phase.OPTIMIZER, provides=frozenset({"weights-in-passes"})
    )

    max_steps: int = 10
    batches_per_step: int = 1

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ConfigurationError(f"max_steps is {self.max_steps}; expected at least 1.")

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        for module in model.original.modules():  # an adapted model has that of transformers inside
            if hasattr(module, "_has_unfinished_sequences"):
                FullLength(module)

    def transform_dataloader(self, dataloader: Any, run: Run) -> Any:
        short = ShortLoader(dataloader, self.max_steps * self.batches_per_step, lambda: self._execute_once(run))
        run.state(self).setdefault("loaders", []).append(short)
        return short

    def _execute_once(self, run: Run) -> None:
        state = run.state(self)
        if not state.get("executed") and 2 in state.get("steps", {}).values():
            state["executed"] = True
            run.backend.step_boundary()

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        steps = run.state(self).setdefault("steps", {})
        steps[id(optimizer)] = steps.get(id(optimizer), 0) + 1
        if steps[id(optimizer)] > self.max_steps:
            run.backend.step_boundary()
            print(f"neuron-accel: collected the graphs of {self.max_steps} steps; the run ends here", file=sys.stderr)
            self._say_what_is_missing(run)
            raise SystemExit(0)
        yield

    def _say_what_is_missing(self, run: Run) -> None:
        loaders = run.state(self).get("loaders", [])
        unread = [str(number) for number, loader in enumerate(loaders, start=1) if not loader.was_read]
        if unread:
            print(
                f"neuron-accel: of {len(loaders)} prepared loaders no batch was read from number {', '.join(unread)}, "
                "for example because the evaluation comes later: its graphs are not collected, and training will wait "
                "for the compiler. Raise --max-steps, or evaluate before the first step if "
                "accelerator.is_precompiling",
                file=sys.stderr,
            )


class FullLength:
    """Makes ``generate`` of a model of transformers end at its maximum length, whatever was generated. It asks the
    device after each token whether all texts have ended: zero, which is always no, or with beams always yes.

    Args:
        model: a model of transformers; from then on it asks this object.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._left = model, 0
        model._prepare_generated_length, model._has_unfinished_sequences = self._begin, self._goes_on

    def _begin(self, *args: Any, input_ids_length: int, **more: Any) -> Any:
        config = type(self._model)._prepare_generated_length(
            self._model, *args, input_ids_length=input_ids_length, **more
        )
        self._left = config.max_length - input_ids_length
        if (config.num_beams or 1) > 1:  # token numbers that are read from the device become constants of a graph
            warnings.warn("The graphs of beam search are not collected; training will compile them.", stacklevel=2)
        return config

    def _goes_on(self, *args: Any, **more: Any) -> bool:
        type(self._model)._has_unfinished_sequences(self._model, *args, **more)  # its graphs are collected, too
        self._left -= 1
        return self._left >= 0


class ShortLoader:
    """A loader that yields at most ``most`` batches in each pass; all else is delegated to the loader that it wraps.

    Args:
        loader: a prepared loader.
        most: the largest number of batches.
        between: called before each batch except the first.

    Attributes:
        was_read: whether a batch was read.
    """

    def __init__(self, loader: Any, most: int, between: Callable[[], None]) -> None:
        self.__dict__.update(_loader=loader, _most=most, _between=between, was_read=False)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        try:
            for index, batch in enumerate(itertools.islice(batches, self._most)):
                if index:
                    self._between()
                self.__dict__["was_read"] = True
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


# ---- Methods and plugins without effect in a run that only collects graphs, in which every value is zero -------------
EXTRACT_GRAPHS_VARIABLE = "NEURON_EXTRACT_GRAPHS_ONLY"
STEPS_VARIABLE = "NEURON_ACCEL_PRECOMPILE_STEPS"
LOOKS_AT_VALUES = "looks-at-values"
"""Provided by plugins that only inspect values; a run that only collects graphs, and a dry run, leave them out."""


def is_precompiling(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether neuron_parallel_compile runs this process to collect graphs."""
    return flag(environ, EXTRACT_GRAPHS_VARIABLE)


def without_value_checks(plugins: list[StrategyPlugin]) -> list[StrategyPlugin]:
    """Returns the plugins without those that only inspect values, for a run that has none."""
    return [p for p in plugins if LOOKS_AT_VALUES not in getattr(getattr(p, "spec", None), "provides", ())]


def precompile_plugins(
    plugins: list[StrategyPlugin], accumulation: int, environ: Mapping[str, str]
) -> list[StrategyPlugin]:
    """Returns the plugins for a run that only collects graphs: without those that only inspect values, and with a
    :class:`PrecompilationPlugin`.

    Args:
        plugins: those of the accelerator.
        accumulation: number of micro-batches that a step accumulates.
        environ: environment variables.

    Raises:
        ConfigurationError: if the number of steps in the environment is not an integer of at least 1.
    """
    text = environ.get(STEPS_VARIABLE, "").strip() or "10"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"{STEPS_VARIABLE}={text} is not a number of steps.",
            where=STEPS_VARIABLE,
            fix="set it to an integer of at least 1",
        )
    return [*without_value_checks(plugins), PrecompilationPlugin(max_steps=int(text), batches_per_step=accumulation)]
