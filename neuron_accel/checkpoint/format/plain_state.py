# SPDX-License-Identifier: Apache-2.0
"""Serializes the state of arbitrary objects as JSON and tensors, without pickle.

The ``state_dict()`` of schedulers, gradient scalers and objects of the user nearly always consists of numbers, strings,
containers and tensors. These are stored with their exact types. Any other type raises an error, because loading it
could run code.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from neuron_accel.errors import CheckpointError

_TAG = "$"


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Converts ``value`` to data for JSON, and adds its tensors and arrays to ``tensors``.

    Args:
        value: consists of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque, dict,
            OrderedDict, Counter, defaultdict, torch.Size, tensors, dtypes, devices, numpy arrays and numpy scalars.
        tensors: receives CPU tensors, under keys that begin with ``where``.
        where: name of the object that ``value`` belongs to, for keys and messages.

    Raises:
        CheckpointError: if a value cannot be stored; the error names its key.
    """
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "v": _put(value.detach(), tensors, where)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_TAG: "array", "v": _put(torch.from_numpy(np.ascontiguousarray(value)), tensors, where)} | (
            {"shape": list(value.shape)} if value.ndim == 0 else {}
        )
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {_TAG: "scalar", "dtype": value.dtype.name, "v": encode(value.item(), tensors, where)}
    for kind, (cls, to_plain, _) in _SIMPLE.items():
        if type(value) is cls:
            return {_TAG: kind, "v": to_plain(value)}
    for kind, cls in _SEQUENCES.items():
        if type(value) is cls:
            items = sorted(value, key=repr) if cls in (set, frozenset) else value
            encoded = [encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(items)]
            return encoded if cls is list else {_TAG: kind, "v": encoded}
    for kind, cls in _MAPPINGS.items():
        if type(value) is cls:
            return _encode_mapping(kind, value, tensors, where)
    raise CheckpointError(
        f"A value of type {type(value).__module__}.{type(value).__qualname__} cannot be saved.",
        where=where,
        why="checkpoints contain only numbers, strings, containers and tensors, so that loading one runs no code",
        fix="leave it out of `state_dict`, or represent it by such values",
    )


def _put(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], where: str) -> str:
    while where in tensors:  # different keys may have the same text
        where += "'"
    tensors[where] = tensor.to("cpu", copy=True).contiguous()
    return where


def _dtype(name: str) -> torch.dtype:
    result = getattr(torch, name)
    if not isinstance(result, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return result


_SIMPLE: dict[str, tuple[Callable[..., Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "float": (float, repr, float),  # infinite, or not a number
    "complex": (complex, lambda v: [repr(v.real), repr(v.imag)], lambda v: complex(float(v[0]), float(v[1]))),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), base64.b64decode),
    "dtype": (torch.dtype, lambda v: str(v).removeprefix("torch."), _dtype),
    "device": (torch.device, str, torch.device),
}
"""The class of a value, and how it is converted to plain data and back."""
_SEQUENCES: dict[str, Callable[..., Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "size": torch.Size,
}
_MAPPINGS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
    "defaultdict": defaultdict,
}


def _encode_mapping(kind: str, value: Mapping[Any, Any], tensors: dict[str, torch.Tensor], where: str) -> Any:
    if kind == "dict" and all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
    pairs = [
        [encode(key, tensors, f"{where} (a key)"), encode(item, tensors, f"{where}.{key}")]
        for key, item in value.items()
    ]
    # The factory of a defaultdict is code, and is not restored.
    return {_TAG: kind, "v": pairs}


def decode(value: Any, tensor: Callable[[str], torch.Tensor], where: str) -> Any:
    """Inverse of :func:`encode`.

    Args:
        value: data that :func:`encode` returned.
        tensor: returns the tensor for a key.
        where: name of the object, for messages.

    Raises:
        CheckpointError: if ``value`` was not returned by :func:`encode`.
    """
    try:
        return _decode(value, tensor)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(f"The saved state cannot be read: {error!r}.", where=where) from error


def _decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _decode(item, tensor) for key, item in value.items()}
    kind: Any = value[_TAG]
    inner: Any = value.get("v")
    if kind in _MAPPINGS:
        pairs = [(_decode(key, tensor), _decode(item, tensor)) for key, item in inner]
        return defaultdict(None, pairs) if kind == "defaultdict" else _MAPPINGS[kind](dict(pairs))
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(item, tensor) for item in inner)
    if kind == "tensor":
        return tensor(inner)
    if kind == "array":
        array = tensor(inner).numpy()
        return array.reshape(value["shape"]) if "shape" in value else array
    if kind == "scalar":
        dtype = np.dtype(value["dtype"])
        if dtype.kind not in "biuf":
            raise ValueError(f"{dtype} is not a numeric dtype")
        return dtype.type(_decode(inner, tensor))
    return _SIMPLE[kind][2](inner)
