"""Conversion of objects to bytes, and to tensors of a fixed size for devices that compile a graph for every shape."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def pack(payload: bytes, size: int) -> torch.Tensor:
    """Returns ``payload`` as a uint8 tensor of ``size`` elements, padded with zeros.

    Raises:
        ValueError: if ``payload`` is longer than ``size`` bytes.
    """
    if len(payload) > size:
        raise ValueError(f"a payload of {len(payload)} bytes does not fit into {size}")
    tensor = torch.zeros(size, dtype=torch.uint8)
    if payload:
        tensor[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return tensor


def unpack(tensor: torch.Tensor, length: int) -> bytes:
    """Inverse of :func:`pack`: returns the first ``length`` bytes of a uint8 tensor on any device."""
    return tensor[:length].cpu().numpy().tobytes()


def object_to_tensor(value: Any, size: int) -> torch.Tensor:
    """Pickles an object into a uint8 tensor of ``size`` elements on the CPU, to be sent to another rank.

    Raises:
        ValueError: if the pickled object has more than ``size`` bytes.
    """
    return pack(dump(value), size)


def tensor_to_object(tensor: torch.Tensor) -> Any:
    """Inverse of :func:`object_to_tensor`. Unpickles, so use it only for tensors that ranks of this run sent."""
    return load(unpack(tensor, tensor.numel()))


def dump(value: Any) -> bytes:
    """Pickles ``value``."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def load(payload: bytes) -> Any:
    """Inverse of :func:`dump`. Unpickles, so use it only for bytes that ranks of this run sent."""
    return pickle.loads(payload)
