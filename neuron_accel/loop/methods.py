# SPDX-License-Identifier: Apache-2.0
"""What surrounds the methods of an accelerator: names of arguments are checked, calls that every rank has to make are
events, what has no meaning in some runs is skipped; and callbacks do not keep the accelerator."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from neuron_accel.errors import ConfigurationError, UsageError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_CHECKPOINTS = frozenset({"save_state", "load_state", "save_model", "get_state_dict"})
"""Methods whose time belongs to checkpoints."""


def known_names_only(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a constructor or a method such that an unknown argument raises an error with the most similar name.

    The error is a ConfigurationError for a constructor and a UsageError for a method.
    """
    parameters = [p for p in list(inspect.signature(function).parameters.values())[1:] if p.kind is not p.VAR_KEYWORD]
    names = [p.name for p in parameters]
    by_position = sum(p.kind is not p.KEYWORD_ONLY for p in parameters)
    makes = function.__name__ == "__init__"
    subject, where = (
        ("NeuronAccelerator", "NeuronAccelerator(...)")
        if makes
        else (f"`{function.__name__}`", f"{function.__name__}(...)")
    )
    error = ConfigurationError if makes else UsageError

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise error(f"{name!r} is not an option of {subject}.", where=where, fix=did_you_mean(name, names))
        if len(args) - 1 > by_position:
            raise error(
                f"{subject} takes {'no' if not by_position else f'at most {by_position}'} positional arguments, but "
                f"got {args[by_position + 1]!r}.",
                where=where,
                fix=f"pass it by name: {', '.join(names[by_position : by_position + 3])}, ...",
            )
        return function(*args, **kwargs)

    return wrapper


def collective(method: F) -> F:
    """Decorates a method of an accelerator that every rank has to call: each call is an event, which the watchdog
    records."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = method.__name__
        part = "checkpoint" if name in _CHECKPOINTS else None
        with self.run.events.open(name, "call", part=part):
            return method(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


def skipped(result: Callable[..., Any], *, without_values: bool = True) -> Callable[[F], F]:
    """Decorates a method of an accelerator that does nothing in a run that only collects graphs.

    Args:
        result: computes from the method's arguments what it returns then.
        without_values: whether it does nothing in a dry run either, as what saves or loads values.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            skips = self.is_precompiling or (without_values and not self.run.backend.has_values)
            return result(*args, **kwargs) if skips else method(self, *args, **kwargs)

        return wrapper  # type: ignore[return-value]  # it has the signature of the method

    return decorate


def returns_none(*_: Any, **__: Any) -> None:
    """The result of methods that return None."""


def returns_false(*_: Any, **__: Any) -> bool:
    """The result of methods that return a bool."""
    return False


def returns_folder(output_dir: Any = None, *_: Any, **__: Any) -> str:
    """The result of methods that return the folder that they wrote."""
    return "" if output_dir is None else os.fspath(output_dir)


def returns_first_argument(tensor: Any, *_: Any, **__: Any) -> Any:
    """The result of methods that return a changed copy of their first argument."""
    return tensor


def weakly(method: Callable[..., T], otherwise: T | None = None) -> Callable[..., T]:
    """Returns a function that calls a bound method and does not keep its object, so that this is freed with its last
    user; afterwards it returns ``otherwise``."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = reference()
        return otherwise if bound is None else bound(*args, **kwargs)

    return call
