"""What the graph of a forward pass depends on, beside weights: shapes, dtypes and Python values of what goes in."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

Signature = dict[str, str]
"""Name of an input to what is known of it: a tensor's dtype and shape, or a value."""

_OURS = str(Path(__file__).resolve().parents[2])
_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch,) if module.__file__)


def signature_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Signature:
    """The inputs of a call of ``module``, by the names of its ``forward``."""
    found: Signature = {}
    for name, value in _named(module, args, kwargs):
        _describe(name, value, found)
    return found


def _named(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    try:
        names = [
            name
            for name, parameter in inspect.signature(module.forward).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        names = []
    positional = [(names[i] if i < len(names) else f"argument {i}", value) for i, value in enumerate(args)]
    return [*positional, *kwargs.items()]


def _describe(name: str, value: Any, found: Signature) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    elif value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        found[name] = repr(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _describe(f"{name}[{key!r}]", item, found)
    elif isinstance(value, (list, tuple)):
        found[f"len({name})"] = str(len(value))
        for index, item in enumerate(value):
            _describe(f"{name}[{index}]", item, found)
    else:
        found[name] = f"a {type(value).__name__}"


def differences(old: Signature, new: Signature) -> list[str]:
    """``"input_ids: int64[2, 12] -> int64[2, 7]"`` for each input that changed."""
    return [
        f"{name}: {old.get(name, '(not given)')} -> {new.get(name, '(not given)')}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def nearest(signature: Signature, known: list[Signature]) -> Signature:
    """Of the signatures that are known the one that differs least; the latest of several."""
    return min(reversed(known), key=lambda other: len(differences(other, signature)))


def place_in_users_code() -> str:
    """``"train.py:31"``: the innermost frame outside of this package and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, "<", *_LIBRARIES)):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown place"
