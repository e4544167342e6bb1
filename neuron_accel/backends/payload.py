# SPDX-License-Identifier: Apache-2.0
"""Conversion of objects to bytes, and the exchange of objects between processes over gloo.

Objects are pickled, so ranks trust each other, as stated in SECURITY.md.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from neuron_accel.errors import CommunicationError

LARGEST_OBJECT = 2**31
"""Largest pickled object, in bytes, that a rank accepts from another."""


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


def dump(value: Any) -> bytes:
    """Pickles ``value``."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def load(payload: bytes) -> Any:
    """Inverse of :func:`dump`. Unpickles, so use it only for bytes that ranks of this run sent."""
    return pickle.loads(payload)


# ---- between processes -----------------------------------------------------------------------------------------------
def all_gather(value: Any, group: Any) -> list[Any]:
    """Returns the picklable ``value`` of every rank of a gloo process group.

    Raises:
        CommunicationError: on every rank, if an object is larger than :data:`LARGEST_OBJECT`.
    """
    data = dump(value)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([lengths], [torch.tensor([len(data)])]).wait()
    sizes = [_checked(length, rank) for rank, length in enumerate(lengths)]
    rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    group.allgather([rows], [pack(data, max(sizes))]).wait()
    return [load(unpack(row, size)) for row, size in zip(rows, sizes, strict=True)]


def broadcast(value: Any, source: int, group: Any) -> Any:
    """Returns the picklable ``value`` of the rank ``source`` of a gloo process group.

    Raises:
        CommunicationError: on every rank, if the object is larger than :data:`LARGEST_OBJECT`.
    """
    data = dump(value) if group.rank() == source else b""
    length = torch.tensor([len(data)])
    group.broadcast(length, source).wait()
    size = _checked(length, source)
    packed = pack(data, size) if data else torch.empty(size, dtype=torch.uint8)
    group.broadcast(packed, source).wait()
    return value if data else load(unpack(packed, size))


def _checked(length: torch.Tensor, rank: int) -> int:
    size = int(length)
    if not 0 < size <= LARGEST_OBJECT:
        raise CommunicationError(
            f"Rank {rank} of the group sends an object of {size} bytes; at most {LARGEST_OBJECT} are accepted.",
            why="every rank of the group would allocate that much memory",
            fix="send less at once, or tensors",
        )
    return size
