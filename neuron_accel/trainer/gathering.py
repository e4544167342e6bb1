# SPDX-License-Identifier: Apache-2.0
"""Trainers that gather samples by functions of Accelerate, and not by their accelerator.

``accelerate.utils.gather`` concatenates over all processes, so that where several have the same samples, rows are
repeated. A trainer that takes its own rows by ``process_index``, which counts samples, takes those of other ranks.
"""

from __future__ import annotations

import dis
import inspect
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather, gather_object

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.accelerator import NeuronAccelerator

_OVER_ALL_ROWS = {
    "scale_rewards": "batch",
    "multi_objective_aggregation": "normalize_then_sum",
    "normalize_advantages": True,
}
"""Arguments of TRL's trainers with which they divide by a standard deviation over all rows."""


def check_gathering(trainer: type, args: Any, accelerator: NeuronAccelerator) -> None:
    """Refuses a trainer that would train on rows of other ranks, or that counts rows twice.

    Args:
        trainer: the class of the Trainer.
        args: its arguments.
        accelerator: its accelerator.

    Raises:
        UsageError: if ranks have the same samples, and the trainer gathers over all of them.
    """
    samples, processes = accelerator.data_parallel_size, accelerator.world_size
    method = _gathering_method(trainer) if samples < processes else None
    if method is None:
        return
    if samples > 1:
        raise UsageError(
            f"{trainer.__name__} would train on samples of other ranks.",
            where=f"{method} with {samples} data-parallel ranks on {processes} processes",
            why="it gathers by functions of `accelerate.utils`, over all processes, of which several have the same "
            "samples, and takes its own by `process_index`, which counts samples",
            fix="use zero_1 or fully_sharded alone, or one group of ranks with the same samples; in a class of your "
            "own, gather by `self.accelerator.gather`",
        )
    given = [f"{name}={value!r}" for name, value in _OVER_ALL_ROWS.items() if getattr(args, name, None) == value]
    if given:
        raise UsageError(
            f"{trainer.__name__} would count each sample {processes} times in a standard deviation.",
            where=f"{method} with {', '.join(given)}",
            why="it gathers by functions of `accelerate.utils`, over all processes, which have the same samples",
            fix="leave the option out, or use zero_1 or fully_sharded instead",
        )


def _gathering_method(trainer: type) -> str | None:
    """Name of a method of the class, or of a class or function of its module that it uses, that gathers by a function
    of Accelerate and uses ``process_index``."""
    pending: list[Any] = list(trainer.__mro__)
    for owner in pending:  # it grows
        members = vars(owner) if isinstance(owner, type) else {"": owner}
        for name, value in members.items():
            function = inspect.unwrap(value) if callable(value) else value
            used = getattr(function, "__code__", None)
            if used is None:
                continue
            if "process_index" in used.co_names and _gathers(function):
                return f"{owner.__name__}.{name}".rstrip(".")
            helpers = [function.__globals__.get(each) for each in used.co_names]
            pending += [each for each in helpers if _is_of(owner.__module__, each) and each not in pending]
    return None


def _gathers(function: Any) -> bool:
    used = function.__code__
    names = {step.argval for step in dis.get_instructions(used) if step.opname == "LOAD_GLOBAL"}
    known = [function.__globals__.get(each) for each in names]
    imports = any(each.partition(".")[0] == "accelerate" for each in used.co_names)  # in the function itself
    return any(each is gather or each is gather_object for each in known) or (
        imports and not {"gather", "gather_object"}.isdisjoint(used.co_names)
    )


def _is_of(module: str, value: Any) -> bool:
    return (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__ == module
