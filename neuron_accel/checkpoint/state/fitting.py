# SPDX-License-Identifier: Apache-2.0
"""Checks that state from a checkpoint fits the objects of a training run, before anything is changed.

Checksums detect damage, but a file may also have been written by another program, or with malicious intent.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    from neuron_accel.backends.randomness import DeviceGenerator

_WORDS = 624  # length of the state of a Mersenne Twister


def fits(saved: Any, present: Any) -> bool:
    """Returns whether ``saved`` is of the same kind as ``present``: both numbers, both strings, tensors of equal shape,
    or containers whose values are of the same kind. None fits everything."""
    if saved is None or present is None:
        return True
    if isinstance(present, bool):
        return isinstance(saved, bool)
    if isinstance(present, torch.Tensor) and present.dim():
        return isinstance(saved, torch.Tensor) and saved.shape == present.shape
    if isinstance(present, (int, float, np.number, torch.Tensor)):
        return _is_number(saved)
    if isinstance(present, str):
        return isinstance(saved, str)
    if isinstance(present, (list, tuple)):
        if not isinstance(saved, (list, tuple)):
            return False
        return not present or all(fits(item, present[min(i, len(present) - 1)]) for i, item in enumerate(saved))
    if isinstance(present, Mapping):
        return isinstance(saved, Mapping) and all(fits(saved[key], present[key]) for key in saved if key in present)
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, (int, np.integer)):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, (float, np.floating))  # also infinity, which ReduceLROnPlateau saves as its best metric


def check_by_name(value: Any, what: str, where: str | None = None, fit: Callable[[Any], bool] = lambda _: True) -> Any:
    """Returns ``value`` if it is a dict by name whose values ``fit``; raises CheckpointError otherwise."""
    if not isinstance(value, dict) or not all(isinstance(name, str) and fit(item) for name, item in value.items()):
        raise _absurd(what, value, where)
    return value


def check_counters(counters: Any) -> dict[str, int]:
    """Returns ``counters`` if they are non-negative integers by name; raises CheckpointError otherwise."""
    return check_by_name(counters, "counters", fit=lambda number: type(number) is int and 0 <= number < 2**63)


def check_options(saved: Any, present: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    """Checks the options of one group of an optimizer.

    Args:
        saved: the saved options.
        present: the current options of the group.
        defaults: the optimizer's ``defaults``.
        where: name of the group, for messages.

    Raises:
        CheckpointError: if an option is of another kind.
    """
    if not isinstance(saved, dict) or "params" in saved:
        raise _absurd("options", saved, where)
    for name, value in saved.items():
        now = defaults.get(name, present.get(name))
        number = isinstance(defaults.get(name), (int, float, tuple)) and not isinstance(now, bool)
        if not isinstance(name, str) or not fits(value, now) or (number and value is None):
            raise _absurd(f"option {name!r}", value, where)
        if isinstance(now, tuple) and len(value) != len(now):
            raise _absurd(f"option {name!r}", value, where)


def check_scheduler(scheduler: Any, saved: Any, where: str) -> None:
    """Checks the state of a scheduler. It must not replace methods or the optimizer. For torch's schedulers, each value
    must be of the same kind as the current one."""
    check_by_name(saved, "state", where)
    inner = getattr(scheduler, "scheduler", scheduler)
    present = inner.state_dict()
    if not isinstance(present, Mapping):
        return
    for name, value in saved.items():
        if name not in present and hasattr(inner, name):
            raise _absurd(f"entry {name!r}", value, where)
        if _is_of_torch(inner) and name in present and not fits(value, present[name]):
            raise _absurd(f"entry {name!r}", value, where)
    if _is_of_torch(inner):
        try:
            _without_functions(inner).load_state_dict(copy.deepcopy(saved))
        except Exception as error:  # torch's schedulers raise various types
            raise _absurd("state", saved, where) from error


def _is_of_torch(scheduler: Any) -> bool:
    return type(scheduler).__module__.startswith("torch.optim")


def _without_functions(scheduler: Any) -> Any:
    """A copy of a scheduler of torch that can load a state without a change of the scheduler or of its functions."""
    found = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        if name == "lr_lambdas":
            setattr(found, name, [SimpleNamespace() for _ in value])
        elif name == "_scale_fn_custom" and value is not None:
            setattr(found, name, SimpleNamespace())
        elif name == "_schedulers":
            setattr(found, name, [_without_functions(one) for one in value])
    return found


def check_position(loader: Any, saved: Any, where: str) -> None:
    """Checks the position of a data loader."""
    if saved is None or not hasattr(loader, "check_position"):
        return
    try:
        if set(saved) != {"epoch", "samples", "begin", "next"}:
            raise ValueError("it has other entries")
        for name in ("epoch", "samples"):
            if type(saved[name]) is not int or not 0 <= saved[name] < 2**63:
                raise ValueError(f"{name} is {saved[name]!r}")
        for order in (saved["begin"], saved["next"]):
            if order is not None:
                _check_order(order)
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"The position of a loader is not valid: {error}.", where=where) from error
    loader.check_position(saved)


def _check_order(order: Any) -> None:
    """Checks the states of torch's CPU generator, and the seed, that determine the order of an epoch."""
    states = dict(order)
    seed = states.pop("seed", 0)
    if seed is not None and (type(seed) is not int or not -(2**63) <= seed < 2**64):
        raise ValueError(f"the seed of its order is {seed!r:.40}")
    if "default" not in states or not set(states) <= {"default", "own", "drawn"}:
        raise ValueError(f"its order comes from {', '.join(map(repr, states))}")
    for state in states.values():
        torch.Generator().set_state(state)


def check_random(state: Any, device: DeviceGenerator) -> None:
    """Checks the states of random number generators, by setting them on generators that are not used otherwise.

    Raises:
        CheckpointError: if a state is not valid.
    """
    try:
        version, words, extra = state["python"]
        random.Random().setstate((version, tuple(map(operator.index, words)), extra))
        kind, keys, position, *_ = state["numpy"]
        if kind != "MT19937" or np.shape(keys) != (_WORDS,) or not 0 <= position <= _WORDS:
            raise ValueError("numpy's state is that of another generator")
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["torch"])
        if device.apart and "device" in state:
            present = device.get_state()
            ours = isinstance(state["device"], type(present)) and not isinstance(state["device"], bool)
            alike = not isinstance(present, torch.Tensor) or (
                ours and state["device"].dtype == present.dtype and state["device"].shape == present.shape
            )
            if not ours or not alike:
                raise ValueError("the device's state is that of another generator")
            if isinstance(present, int) and not 0 <= state["device"] < 2**64:
                raise ValueError("the device's state is out of range")
    except Exception as error:  # generators raise various types for invalid states
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"The state of the random numbers cannot be used: {reason}.") from error


def _absurd(what: str, value: Any, where: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"The saved {what} cannot be used: {value!r:.80}.",
        where=where,
        why="it was not written by `save_state`, or it belongs to another object",
        fix="use another checkpoint",
    )
