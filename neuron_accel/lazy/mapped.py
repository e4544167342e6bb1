# SPDX-License-Identifier: Apache-2.0
"""Reads slices of tensors in memory-mapped files, without using the mapping.

Reading through a mapping makes entire pages resident in the process, including those that the system reads ahead, as
long as the mapping exists. Instead, the file and offset of a mapped tensor are found through ``/proc/self/maps``
(proc(5)). Long runs of elements are read with pread; slices of many short runs, as of weights that are sharded along
their last dim, are copied out of short-lived mappings of two megabytes of the file.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from neuron_accel.checkpoint.format.ranges import FileRanges, read_box
from neuron_accel.errors import CheckpointError

Box = tuple[tuple[int, int], ...]
"""Start and stop of a slice along each dim."""

_BUFFER = 1 << 20
_LONG_RUN = 256 << 10
"""Shortest run of elements, in bytes, that is read with a call of its own."""
_GAP = 4 << 10
"""Longest gap between runs, in bytes, that is read over."""
_WINDOW = 2 << 20
"""Bytes of a file that are mapped at a time."""
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class Mapping:
    """A mapping of a file: addresses ``start`` to ``stop`` contain the bytes of the file from ``offset`` on."""

    start: int
    stop: int
    offset: int
    inode: int
    path: str


@dataclass(frozen=True)
class MappedTensor:
    """A tensor in a file.

    Args:
        tensor: the mapped tensor, which keeps the mapping alive.
        path: path of the file.
        inode: inode of the file, to detect that it was replaced.
        offset: offset in bytes of the tensor in the file.
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
    """Finds the files of memory-mapped tensors."""

    _starts: list[int] = field(default_factory=list)
    _lines: list[str] = field(default_factory=list)
    """Of ``/proc/self/maps``: one for each mapping, ordered by address."""

    def find(self, tensor: torch.Tensor) -> MappedTensor | None:
        """Returns the tensor with its place in a file, or None if it is not mapped or not contiguous."""
        if tensor.device.type != "cpu" or not tensor.numel() or not tensor.is_contiguous():
            return None
        start = tensor.data_ptr()
        found = self._lookup(start)
        if found is None and _MAPS.exists():
            self._lines = _MAPS.read_text().splitlines()
            self._starts = [int(line[: line.index("-")], 16) for line in self._lines]
            found = self._lookup(start)
        if found is None or start + tensor.numel() * tensor.element_size() > found.stop:
            return None
        return MappedTensor(tensor.detach(), found.path, found.inode, found.offset + start - found.start)

    def _lookup(self, address: int) -> Mapping | None:
        """Returns the mapping of a file that contains an address, if there is one."""
        place = bisect_right(self._starts, address) - 1
        if place < 0:
            return None
        addresses, access, offset, _, inode, *path = self._lines[place].split(maxsplit=5)
        start, stop = (int(bound, 16) for bound in addresses.split("-"))
        is_file = path and path[0].startswith("/") and not path[0].endswith("(deleted)") and "x" not in access
        if address >= stop or not is_file:
            return None
        return Mapping(start, stop, int(offset, 16), int(inode), path[0])


class Reader:
    """Reads slices of mapped tensors. A context manager, which closes the files.

    Attributes:
        bytes_read: number of bytes read so far.
    """

    def __init__(self) -> None:
        self._files = FileRanges()
        self._checked: set[str] = set()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: Any) -> None:
        self._files.__exit__()

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def read(self, source: MappedTensor, box: Box, out: torch.Tensor) -> None:
        """Reads a slice of a tensor into ``out``.

        Args:
            source: the tensor in a file.
            box: the slice.
            out: a tensor of the shape of ``box`` and any dtype, to which values are converted.

        Raises:
            CheckpointError: if the file cannot be read, or was replaced.
        """
        if out.numel() == 0:
            return
        self._check(source)
        shape = source.shape or (1,)
        if out.dim() == 0:
            box, out = ((0, 1),), out.view(1)
        dtype = source.tensor.dtype
        first = len(shape) - 1  # from this dim on, the elements of the box are contiguous
        while first > 0 and box[first] == (0, shape[first]):
            first -= 1
        run = (box[first][1] - box[first][0]) * math.prod(shape[first + 1 :]) * dtype.itemsize
        direct = out.dtype == dtype and out.is_contiguous() and out.device.type == "cpu"
        if source.offset % dtype.itemsize == 0 and (run < _LONG_RUN or not direct):
            self._copy(source, shape, box, out)
            return
        step = max(1, _BUFFER // max(1, out[0].numel() * dtype.itemsize)) if not direct else out.shape[0]
        for begin in range(0, out.shape[0], step):
            target = out[begin : begin + step]
            rows = (box[0][0] + begin, box[0][0] + begin + target.shape[0])
            buffer = target if direct else torch.empty(target.shape, dtype=dtype)
            self._fill(source, shape, (rows, *box[1:]), buffer)
            if not direct:
                target.copy_(buffer)

    def _copy(self, source: MappedTensor, shape: Sequence[int], box: Box, out: torch.Tensor) -> None:
        """Copies a slice out of mappings."""
        dtype = source.tensor.dtype
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        for part in _windows(box, strides, _WINDOW // dtype.itemsize):
            start = sum(low * stride for (low, _), stride in zip(part, strides, strict=True))
            count = _span(part, strides)
            sizes = [high - low for low, high in part]
            memory, before = self._files.mapped(
                source.path,
                source.offset + start * dtype.itemsize,
                count * dtype.itemsize,
                math.prod(sizes) * dtype.itemsize,
            )
            place = tuple(slice(low - b[0], high - b[0]) for (low, high), b in zip(part, box, strict=True))
            stored = torch.frombuffer(memory, dtype=dtype, count=count, offset=before)
            out[place].copy_(stored.as_strided(sizes, strides))
            del stored, memory  # closes the mapping

    def _fill(self, source: MappedTensor, shape: Sequence[int], box: Box, out: torch.Tensor) -> None:
        """Reads a slice into a contiguous ``out`` of the tensor's dtype."""
        item = out.element_size()
        slices = [slice(start, stop) for start, stop in box]
        slices[-1] = slice(slices[-1].start * item, slices[-1].stop * item)

        def read(start: int, into: Any) -> None:
            self._files.read(source.path, source.offset + start, into)

        into = out.view(-1).view(torch.uint8).view(*out.shape[:-1], out.shape[-1] * item)
        read_box(read, (*shape[:-1], shape[-1] * item), slices, into.numpy(), gap=_GAP)

    def _check(self, source: MappedTensor) -> None:
        if source.path in self._checked:
            return
        if self._files.inode(source.path) != source.inode:
            raise CheckpointError(
                f"{source.path!r} is another file than when the model was built.",
                where=source.path,
                why="its weights are read when the model is prepared, and it was replaced in between",
                fix="do not change the file before the model is prepared",
            )
        self._checked.add(source.path)


def _span(box: Box, strides: Sequence[int]) -> int:
    """Returns the number of elements from the first one of a box to its last one."""
    return 1 + sum((stop - start - 1) * stride for (start, stop), stride in zip(box, strides, strict=True))


def _windows(box: Box, strides: Sequence[int], most: int) -> Iterator[Box]:
    """Yields the parts of a box such that each spans at most ``most`` elements of the file."""
    if _span(box, strides) <= most:
        yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, most // strides[dim])
    for begin in range(start, stop, step):
        yield from _windows((*box[:dim], (begin, min(begin + step, stop)), *box[dim + 1 :]), strides, most)
