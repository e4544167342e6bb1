"""Configuration values as plain data, for JSON and YAML."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any


def to_plain(value: Any, fallback: Callable[[Any], Any] | None = None) -> Any:
    """``value`` as null, booleans, numbers, strings, lists, and dicts with string keys.

    Dtypes and enum members become their names and values, paths strings, tuples and sets (sorted) lists, dataclasses
    dicts of their constructor's arguments. The result depends on the value alone, so that ranks can compare it.

    Args:
        fallback: called for values without a plain form; by default that is an error.

    Raises:
        TypeError: if there is no plain form, or two keys of a mapping have the same.
    """
    if isinstance(value, Enum):
        return to_plain(value.value, fallback)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if is_dtype(value):
        return str(value).removeprefix("torch.")
    if isinstance(value, (list, tuple)):
        return [to_plain(item, fallback) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_plain(item, fallback) for item in value), key=lambda item: (type(item).__name__, repr(item)))
    if isinstance(value, Mapping):
        keys = {key: str(to_plain(key, fallback)) for key in value}
        if len(set(keys.values())) < len(keys):
            raise TypeError(f"the keys {list(value)} are not distinct as text")
        return {text: to_plain(value[key], fallback) for key, text in keys.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name), fallback) for f in dataclasses.fields(value) if f.init}
    if fallback is not None:
        return fallback(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} cannot be written as plain data")


def is_dtype(value: Any) -> bool:
    """Whether ``value`` is a ``torch.dtype``; does not import torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"
