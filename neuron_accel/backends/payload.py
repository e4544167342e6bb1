# SPDX-License-Identifier: Apache-2.0
"""Conversion of objects to bytes, and the exchange of objects between processes over gloo.

Objects are pickled, so ranks trust each other, as stated in SECURITY.md.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from neuron_accel.errors import CommunicationError

LARGEST_OBJECT = 2**31
"""Largest pickled object, in bytes, that a rank accepts from another."""

_SMALL, _OF_GATHERS = 120, (1 << 30) + 1
"""Bytes of an object in the first message of a gather, and the tag of its messages."""


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
    sizes = [_checked(int(length), rank) for rank, length in enumerate(lengths)]
    rows = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    group.allgather([rows], [pack(data, max(sizes))]).wait()
    return [load(unpack(row, size)) for row, size in zip(rows, sizes, strict=True)]


def gather(value: Any, group: Any, join: Callable[[Any, Any], Any] | None = None) -> Any:
    """Returns the picklable values of all ranks of a gloo process group to its first rank, and None to the others,
    which do not wait for it: a list, or all joined in pairs, in the order of ranks.

    Raises:
        CommunicationError: on the sending and the receiving rank, if an object is larger than :data:`LARGEST_OBJECT`.
    """
    rank, size, distance = group.rank(), group.size(), 1
    if join is None:
        return _send(value, 0, group) if rank else [value, *(_receive(other, group) for other in range(1, size))]
    while distance < size:
        if rank % (2 * distance):
            return _send(value, rank - distance, group)
        if rank + distance < size:
            try:
                value = join(value, _receive(rank + distance, group))
            except CommunicationError:  # those that wait for this rank refuse too
                if rank:
                    _announce(LARGEST_OBJECT + 1, b"", rank - (rank & -rank), group)
                raise
        distance *= 2
    return value


def _announce(size: int, first: bytes, target: int, group: Any) -> None:
    group.send([pack(size.to_bytes(8, "little") + first, 8 + _SMALL)], target, _OF_GATHERS).wait()


def _send(value: Any, target: int, group: Any) -> None:
    """Sends an object: its size and first bytes, which is all of a small one, and the rest, unless it is too large."""
    data = dump(value)
    _announce(len(data), data[:_SMALL], target, group)
    if _checked(len(data), group.rank()) > _SMALL:
        group.send([pack(data[_SMALL:], len(data) - _SMALL)], target, _OF_GATHERS).wait()


def _receive(rank: int, group: Any) -> Any:
    def received(size: int) -> bytes:
        message = torch.empty(size, dtype=torch.uint8)
        group.recv([message], rank, _OF_GATHERS).wait()
        return unpack(message, size)

    first = received(8 + _SMALL)
    size = _checked(int.from_bytes(first[:8], "little"), rank)
    return load(first[8 : 8 + size] + (received(size - _SMALL) if size > _SMALL else b""))


def broadcast(value: Any, source: int, group: Any) -> Any:
    """Returns the picklable ``value`` of the rank ``source`` of a gloo process group.

    Raises:
        CommunicationError: on every rank, if the object is larger than :data:`LARGEST_OBJECT`.
    """
    data = dump(value) if group.rank() == source else b""
    length = torch.tensor([len(data)])
    group.broadcast(length, source).wait()
    size = _checked(int(length), source)
    packed = pack(data, size) if data else torch.empty(size, dtype=torch.uint8)
    group.broadcast(packed, source).wait()
    return value if data else load(unpack(packed, size))


def _checked(size: int, rank: int) -> int:
    if not 0 < size <= LARGEST_OBJECT:
        raise CommunicationError(
            f"Rank {rank} of the group sends an object of {size} bytes; at most {LARGEST_OBJECT} are accepted.",
            why="every rank of the group would allocate that much memory",
            fix="send less at once, or tensors",
        )
    return size
