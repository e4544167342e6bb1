"""What steps aside in a trial run that only collects graphs, where every value is zero and nothing is worth keeping."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from neuron_accel.backends.select import flag
from neuron_accel.engine.errors import ConfigurationError
from neuron_accel.engine.plugin import StrategyPlugin

TRIAL_VARIABLE = "NEURON_EXTRACT_GRAPHS_ONLY"
STEPS_VARIABLE = "NEURON_ACCEL_PRECOMPILE_STEPS"
LOOKS_AT_VALUES = "looks-at-values"
"""A capability that plugins provide which do nothing but look at values; a trial runs without them."""


def is_trial(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether neuron_parallel_compile runs this process to collect graphs."""
    return flag(environ, TRIAL_VARIABLE)


def for_trial(plugins: list[StrategyPlugin], accumulation: int, environ: Mapping[str, str]) -> list[StrategyPlugin]:
    """The plugins of a trial: those that only look at values stay away, one that ends it early comes.

    Raises:
        ConfigurationError: if the number of steps is none.
    """
    from neuron_accel.strategies.precompilation import PrecompilationPlugin

    text = environ.get(STEPS_VARIABLE, "").strip() or "10"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{STEPS_VARIABLE}={text} is no number of steps.", where=STEPS_VARIABLE)
    kept = [p for p in plugins if LOOKS_AT_VALUES not in getattr(getattr(p, "spec", None), "provides", ())]
    return [*kept, PrecompilationPlugin(max_steps=int(text), batches_per_step=accumulation)]


def steps_aside(result: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For methods of an accelerator: in a trial they do nothing.

    Args:
        result: what they return then, from the same arguments.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return result(*args, **kwargs) if self.is_precompiling else method(self, *args, **kwargs)

        return wrapper

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
