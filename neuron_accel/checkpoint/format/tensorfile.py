# SPDX-License-Identifier: Apache-2.0
"""Reads and writes headers of safetensors files, without torch, and says how they describe tensors of a checkpoint.

A file consists of the length of the header (eight bytes, little endian), a JSON header, and the bytes of the tensors
(https://github.com/huggingface/safetensors, "Format"). Headers are not trusted: all sizes and offsets are checked
against the size of the file before they are used.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neuron_accel.checkpoint.format.files import failure, open_file
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import Location, RemotePath

_MAX_HEADER = 100_000_000  # the limit of the reference implementation
_FIRST = 64 << 10  # what is read of a file at a URL at first, which often is the whole header

_ALIGNMENT = 64
"""Multiple of bytes at which the first tensor of a file begins: the size of a cache line, without which the system
copies files to tensors at two thirds of the rate."""

_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
_NAMES = {code: name for name, (code, _) in _DTYPES.items()}


def item_size(dtype: str) -> int:
    """Returns the size in bytes of one element of a dtype, given by its torch name.

    Raises:
        CheckpointError: if the format does not support the dtype.
    """
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"Tensors of dtype {dtype} cannot be stored.", why="safetensors has no such dtype", fix="convert it first"
        )
    return _DTYPES[dtype][1]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Description of a tensor in a file.

    Args:
        dtype: torch's name of the dtype, such as ``"bfloat16"``.
        shape: shape as stored.
        offset: offset of the first byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * item_size(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a file: its tensors by key, its metadata, and the size of the file."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    size: int
    """Size of the file in bytes."""


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes of a header, including its length.

    Args:
        tensors: key, dtype (torch's name) and shape of each tensor, in the order of their bytes.
        metadata: strings by name.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + math.prod(shape) * item_size(dtype)
        entries[key] = {"dtype": _DTYPES[dtype][0], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Location) -> Header:
    """Reads and checks the header of a file.

    Raises:
        CheckpointError: if the file cannot be read, or its header is not valid.
    """
    try:
        if isinstance(path, RemotePath):
            size, first = path.size, path.read_range(0, _FIRST)
            length = _length(path, first[:8], size)
            text = first[8 : 8 + length] + path.read_range(_FIRST, 8 + length - _FIRST if 8 + length > _FIRST else 0)
        else:
            with open(open_file(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = _length(path, file.read(8), size)
                text = file.read(length)
    except OSError as error:
        raise failure("read", path, error) from error
    try:
        entries = json.loads(text.decode(), object_pairs_hook=unique_keys)
        if not isinstance(entries, dict):
            raise ValueError("its header is not an object")
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("its metadata are not strings")
        tensors = {key: _entry(value, 8 + length) for key, value in entries.items()}
        _check_contiguous(tensors.values(), 8 + length, size)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _invalid(path, str(error) or type(error).__name__) from error
    return Header(tensors=tensors, metadata=metadata, size=size)


def _length(path: Location, prefix: bytes, size: int) -> int:
    """Returns the length of the header of a file of ``size`` bytes, which is in its first eight."""
    length: int = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
    if not 0 <= length <= min(_MAX_HEADER, size - 8):
        raise _invalid(path, "the length of its header is impossible")
    return length


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key comes twice")
    return result


def _entry(value: Any, base: int) -> StoredTensor:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("an entry does not describe a tensor")
    shape, offsets = value["shape"], value["data_offsets"]
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [-1]
    if not all(type(n) is int and n >= 0 for n in numbers) or len(offsets) != 2:
        raise ValueError("a shape or an offset is impossible")
    if value["dtype"] not in _NAMES:
        raise ValueError(f"dtype {value['dtype']!r} is not known")
    tensor = StoredTensor(dtype=_NAMES[value["dtype"]], shape=tuple(shape), offset=base + offsets[0])
    if tensor.nbytes != offsets[1] - offsets[0]:
        raise ValueError("a tensor's size is not that of its shape")
    return tensor


def _check_contiguous(tensors: Iterable[StoredTensor], begin: int, size: int) -> None:
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != begin:
            raise ValueError("tensors overlap or leave gaps")
        begin += tensor.nbytes
    if begin != size:
        raise ValueError(f"it has {size} bytes and its header describes {begin}")


def _invalid(path: Location, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} is not a complete safetensors file: {why}.",
        where=str(path),
        fix="restore the file from a copy, or use another checkpoint",
    )


# ---- How the metadata of a file describe its tensors -----------------------------------------------------------------
METADATA = "neuron_accel"
"""Key, in the metadata of a safetensors file, of the description of its tensors."""

Place = tuple[tuple[str, int], ...]
"""Identifies a shard: for the axis of each cut, the coordinate of the first rank that holds it."""


def model_collection(index: int) -> str:
    """Returns the name of the collection of the parameters and buffers of the model at ``index``."""
    return f"model.{index}"


def state_collection(index: int, entry: str) -> str:
    """Returns the name of the collection of one entry of an optimizer's state, such as ``exp_avg``."""
    return f"optimizer.{index}.state.{entry}"


def plugin_collection(plugin: str, key: str) -> str:
    """Returns the name of the collection of a plugin's state ``key`` that is sharded like the parameters."""
    return f"plugin.{plugin}.{key}"


def master_collection(index: int) -> str:
    """Returns the name of the collection of an optimizer's master weights, if they are separate from the model's
    weights."""
    return f"optimizer.{index}.master"


def described_header(tensors: Iterable[tuple[str, str, tuple[int, ...], Mapping[str, Any]]]) -> bytes:
    """Returns the header of a file of a checkpoint.

    Args:
        tensors: key, dtype, shape and description of each tensor, in the order of their bytes. A description has the
            tensor's collection and name, its ``layout``, and ``at`` which place of it the tensor is.
    """
    tensors = list(tensors)
    described = {key: description for key, _, _, description in tensors}
    metadata = {"format": "pt", METADATA: json.dumps({"version": 1, "tensors": described}, separators=(",", ":"))}
    return encode_header([tensor[:3] for tensor in tensors], metadata)


def place_of(layout: Layout, at: Mapping[str, int]) -> Place:
    """Returns which shard of ``layout`` the rank at coordinates ``at`` holds."""
    result = []
    for cut in layout.cuts:
        index = at.get(cut.axis, 0)
        result.append((cut.axis, index - index % cut.replicas))
    return tuple(result)


def places_of(layout: Layout) -> Iterator[Place]:
    """Yields all shards of ``layout``."""
    places: list[Place] = [()]
    for cut in layout.cuts:
        places = [(*p, (cut.axis, i)) for p in places for i in range(0, cut.degree, cut.replicas)]
    return iter(places)
