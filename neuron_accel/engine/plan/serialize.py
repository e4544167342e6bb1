# SPDX-License-Identifier: Apache-2.0
"""Conversion of configuration values to plain data, for JSON and YAML."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any


def to_plain(value: Any, fallback: Callable[[Any], Any] | None = None) -> Any:
    """Converts ``value`` to None, booleans, numbers, strings, lists, and dicts with string keys.

    Dtypes become their names, enum members their values, paths strings, tuples and sets (sorted) lists, and dataclasses
    dicts of their constructor's arguments. The result depends on the value only, so that ranks can compare it.

    Args:
        value: the value.
        fallback: is called for values of other types; by default these raise an error.

    Raises:
        TypeError: if a value cannot be converted, or two keys of a mapping become the same string.
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
    """Returns whether ``value`` is a ``torch.dtype``, without importing torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"
