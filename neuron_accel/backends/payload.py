"""Objects as bytes, and as tensors of one size, for devices that compile every shape they meet."""

from __future__ import annotations

import pickle
from typing import Any

import torch


def pack(payload: bytes, size: int) -> torch.Tensor:
    """``payload`` as a uint8 tensor of ``size`` elements, zeros at the end."""
    if len(payload) > size:
        raise ValueError(f"a payload of {len(payload)} bytes does not fit into {size}")
    tensor = torch.zeros(size, dtype=torch.uint8)
    if payload:
        tensor[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    return tensor


def unpack(tensor: torch.Tensor, length: int) -> bytes:
    """Inverse of :func:`pack`: the first ``length`` bytes of a uint8 tensor on any device."""
    return tensor[:length].cpu().numpy().tobytes()


def object_to_tensor(value: Any, size: int) -> torch.Tensor:
    """A picklable object as a uint8 tensor of ``size`` elements on the CPU, for ranks that send to each other.

    Raises:
        ValueError: if it does not fit.
    """
    return pack(dump(value), size)


def tensor_to_object(tensor: torch.Tensor) -> Any:
    """Inverse of :func:`object_to_tensor`. Only for what this run's own ranks sent."""
    return load(unpack(tensor, tensor.numel()))


def dump(value: Any) -> bytes:
    """``value`` as bytes."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def load(payload: bytes) -> Any:
    """Inverse of :func:`dump`. Only for what this run's own ranks sent."""
    return pickle.loads(payload)
