"""Tensors in files that are mapped into memory, read without touching the mapping.

What is read through a mapping becomes part of the process, in whole pages and with what the system reads ahead. So it
is looked up which file lies where (``/proc/self/maps``, proc(5)), and boxes of a tensor are read with pread, the bytes
that are wanted and no others, unless what lies between is so short that another call would cost more.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from neuron_accel.errors import CheckpointError

Box = tuple[tuple[int, int], ...]
"""Start and stop along every dim."""

_BUFFER = 8 << 20
_GAP = 512
"""Bytes that are rather read than jumped over."""
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Mapping:
    """A part of a file in memory: bytes ``start`` to ``stop`` of the address space hold the file from ``offset`` on."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a file.

    Args:
        tensor: the tensor as it is mapped; kept, so that the mapping stays.
        path: the file.
        inode: its number, by which a file that took its place is noticed.
        offset: of the tensor's first byte.
    """

    tensor: torch.Tensor
    path: str
    inode: int
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass
class Mappings:
    """Looks up which tensors are parts of mapped files."""

    _known: list[Mapping] = field(default_factory=list)

    def find(self, tensor: torch.Tensor) -> MappedTensor | None:
        """Where a tensor lies in a file; None if it does not, or not in one piece."""
        if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        start = tensor.data_ptr()
        found = self._lookup(start)
        if found is None:
            self._known = _read_maps()
            found = self._lookup(start)
        if found is None or start + tensor.numel() * tensor.element_size() > found.stop:
            return None
        return MappedTensor(tensor.detach(), found.path, found.inode, found.offset + start - found.start)

    def _lookup(self, address: int) -> Mapping | None:
        place = bisect_right([mapping.start for mapping in self._known], address) - 1
        if place < 0 or address >= self._known[place].stop:
            return None
        return self._known[place]

    def forget(self) -> None:
        """Addresses may have changed their meaning."""
        self._known = []


def _read_maps() -> list[Mapping]:
    """What of files is mapped privately, by address; nothing where the system does not say."""
    if not _MAPS.exists():
        return []
    found = []
    for line in _MAPS.read_text().splitlines():
        addresses, access, offset, _, inode, *path = line.split(maxsplit=5)
        if path and path[0].startswith("/") and not path[0].endswith("(deleted)") and "x" not in access:
            start, stop = (int(address, 16) for address in addresses.split("-"))
            found.append(Mapping(start, stop, int(offset, 16), int(inode), path[0]))
    return found


class Reader:
    """Reads boxes of mapped tensors; a context manager.

    Attributes:
        bytes_read: how many bytes have been read.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: dict[str, int] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(self, source: MappedTensor, box: Box, out: torch.Tensor) -> None:
        """Fills ``out``, of the shape of ``box`` and any dtype, with that part of the tensor."""
        if out.numel() == 0:
            return
        shape = source.shape or (1,)
        if out.dim() == 0:
            box, out = ((0, 1),), out.view(1)
        dtype = source.tensor.dtype
        step = max(1, _BUFFER // max(1, out[0].numel() * dtype.itemsize))
        for begin in range(0, out.shape[0], step):
            target = out[begin : begin + step]
            rows = (box[0][0] + begin, box[0][0] + begin + target.shape[0])
            direct = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
            buffer = target if direct else torch.empty(target.shape, dtype=dtype)
            self._fill(source, shape, (rows, *box[1:]), buffer)
            if not direct:
                target.copy_(buffer)

    def _fill(self, source: MappedTensor, shape: Sequence[int], box: Box, out: torch.Tensor) -> None:
        item = out.element_size()
        strides = [1] * len(shape)
        for dim in reversed(range(len(shape) - 1)):
            strides[dim] = strides[dim + 1] * shape[dim + 1]
        whole = len(shape)  # dims from here on are wanted whole
        while whole > 0 and box[whole - 1] == (0, shape[whole - 1]):
            whole -= 1
        last = max(whole - 1, 0)  # along this dim a run of elements lies side by side
        run = (box[last][1] - box[last][0]) * strides[last]
        flat = out.view(-1).view(torch.uint8)
        leading = box[:last]
        together = last > 0 and (strides[last - 1] - run) * item < _GAP
        if together:
            leading, rows = box[: last - 1], box[last - 1]
        base = box[last][0] * strides[last]
        at = 0
        for place in itertools.product(*(range(*bounds) for bounds in leading)):
            start = base + sum(i * stride for i, stride in zip(place, strides, strict=False))
            if not together:
                at = self._read(source, start * item, flat, at, run * item)
                continue
            count, row = rows[1] - rows[0], strides[last - 1]
            span = torch.empty(((count - 1) * row + run) * item, dtype=torch.uint8)
            self._read(source, (start + rows[0] * row) * item, span, 0, span.numel())
            pieces = span.as_strided((count, run * item), (row * item, 1))
            flat[at : at + count * run * item].view(count, run * item).copy_(pieces)
            at += count * run * item

    def _read(self, source: MappedTensor, offset: int, out: torch.Tensor, at: int, size: int) -> int:
        view = memoryview(out.numpy())[at : at + size]  # type: ignore[arg-type]
        place = source.offset + offset
        try:
            descriptor = self._descriptor(source)
            while view:
                count = os.preadv(descriptor, [view], place)
                if count == 0:
                    raise CheckpointError(f"{source.path!r} ends too early.", where=source.path, why="it was truncated")
                self.bytes_read += count
                view, place = view[count:], place + count
        except OSError as error:
            raise CheckpointError(f"{source.path!r} cannot be read: {error}", where=source.path) from error
        return at + size

    def _descriptor(self, source: MappedTensor) -> int:
        if source.path not in self._open:
            self._open[source.path] = os.open(source.path, os.O_RDONLY)
            if os.fstat(self._open[source.path]).st_ino != source.inode:
                raise CheckpointError(
                    f"{source.path!r} is another file than when the model was built.",
                    where=source.path,
                    why="its weights are read when the model is prepared, and it was replaced in between",
                    fix="leave the file alone until the model is prepared",
                )
        return self._open[source.path]
