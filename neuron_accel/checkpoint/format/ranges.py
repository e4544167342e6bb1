# SPDX-License-Identifier: Apache-2.0
"""Reading ranges of bytes, and boxes of tensors, from files."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import failure, map_range, open_file, too_short
from neuron_accel.checkpoint.format.pickled import is_mapped, read_pickled
from neuron_accel.storage import Location, RemotePath

if TYPE_CHECKING:
    import numpy as np
    import torch

_BUFFER = 16 << 20
_AHEAD = 64 << 10
"""Bytes that are read at once of a file at a URL if fewer are asked for: small tensors are often beside each other, and
a request takes longer than these bytes."""
_MOST_AHEAD = 16


class FileRanges:
    """Reads ranges of files, and of tensors in pickled files, each of which is opened once. A context manager, which
    closes the files; thread-safe.

    Of a file at a URL, each range is requested by itself.

    Attributes:
        bytes_read: number of bytes read so far.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._open: dict[Path | str, int] = {}
        self._ahead: OrderedDict[tuple[RemotePath, int], bytes] = OrderedDict()  # by file and offset
        self._pickled: dict[Location, dict[str, torch.Tensor]] = {}
        self._held: dict[Location, dict[str, torch.Tensor]] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_: Any) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._ahead.clear()
        self._pickled.clear()
        self._held.clear()

    def _descriptor(self, path: Path | str) -> int:
        found = self._open.get(path)
        if found is not None:
            return found
        with self._lock:
            if path not in self._open:
                self._open[path] = open_file(path)
            return self._open[path]

    def inode(self, path: Path | str) -> int:
        """Returns the inode of a file.

        Raises:
            CheckpointError: if the file cannot be opened.
        """
        try:
            return os.fstat(self._descriptor(path)).st_ino
        except OSError as error:
            raise failure("read", path, error) from error

    def read(self, path: Location | str, offset: int, out: np.ndarray) -> None:
        """Fills ``out`` (1-D, contiguous) with the bytes of a file from ``offset`` on.

        Raises:
            CheckpointError: if the file cannot be read, or is too short.
        """
        view = out.data.cast("B")
        try:
            if isinstance(path, RemotePath):
                self._request(path, offset, view)
            else:
                descriptor = self._descriptor(path)
                while view:
                    count = os.preadv(descriptor, [view], offset)
                    if count == 0:
                        raise too_short(path)
                    view, offset = view[count:], offset + count
        except OSError as error:
            raise failure("read", path, error) from error
        with self._lock:
            self.bytes_read += out.nbytes

    def mapped(self, path: Path | str, offset: int, size: int, wanted: int) -> tuple[mmap.mmap, int]:
        """Maps a range of a local file into memory. For ranges of which many small parts are needed, that is faster
        than reading each of them.

        Args:
            path: the file.
            offset, size: the range in bytes.
            wanted: how many of the bytes will be used, which are counted in ``bytes_read``.

        Returns:
            The mapping, which may be written to without changing the file, and the position of the range in it.

        Raises:
            CheckpointError: if the file cannot be read, or is too short.
        """
        before = offset % mmap.ALLOCATIONGRANULARITY
        try:
            memory = map_range(self._descriptor(path), offset - before, before + size, access=mmap.ACCESS_COPY)
        except EOFError:
            raise too_short(path) from None
        except OSError as error:
            raise failure("read", path, error) from error
        with self._lock:
            self.bytes_read += wanted
        return memory, before

    def hold(self, path: Location, tensors: dict[str, torch.Tensor]) -> None:
        """Registers tensors that were already read from ``path``, by the names that :meth:`read_pickled` will use."""
        self._held[path] = tensors

    def read_pickled(self, path: Location, key: str, offset: int, out: np.ndarray) -> None:
        """Reads bytes of the tensor ``key`` of a file of pickled weights into ``out``; ``offset`` is relative to its
        first byte."""
        import torch

        with self._lock:
            if path in self._held:
                tensors = self._held[path]
            elif path not in self._pickled:
                for other in [p for p in self._pickled if not is_mapped(p)]:
                    del self._pickled[other]  # files that are not mapped take memory, so only one is kept
                self._pickled[path] = tensors = read_pickled(path)
            else:
                tensors = self._pickled[path]
            tensors[key] = flat = tensors[key].contiguous().reshape(-1)
        out.view("u1")[:] = flat.view(torch.uint8).numpy()[offset : offset + out.nbytes]

    def _request(self, path: RemotePath, offset: int, view: memoryview) -> None:
        """Fills ``view`` with the bytes of a file at a URL."""
        if len(view) < _AHEAD:
            view[:] = self._near(path, offset, len(view))
            return
        for part in path.ranges(offset, len(view)):
            view[: len(part)] = part
            view = view[len(part) :]
        if view:
            raise too_short(path)

    def _near(self, path: RemotePath, offset: int, size: int) -> bytes:
        """Returns a few bytes, which are often among those that were read before."""
        with self._lock:
            for (other, start), held in self._ahead.items():
                if other == path and start <= offset and offset + size <= start + len(held):
                    return held[offset - start : offset - start + size]
        held = path.read_range(offset, _AHEAD)
        if len(held) < size:
            raise too_short(path)
        with self._lock:
            self._ahead[path, offset] = held
            while len(self._ahead) > _MOST_AHEAD:
                self._ahead.popitem(last=False)
        return held[:size]


def read_box(
    read: Callable[[int, np.ndarray], None],
    shape: Sequence[int],
    box: Sequence[slice],
    out: np.ndarray,
    gap: int | None = None,
) -> None:
    """Reads a box of a tensor that is stored in row-major order in a file.

    Args:
        read: a function ``read(start, array)`` that fills a 1-D array with the tensor's elements from ``start`` on.
        shape: shape of the tensor, with at least one dim.
        box: start and stop along each dim.
        out: array of the shape of ``box``.
        gap: longest gap, in bytes, that is read instead of skipped; None to read gaps of any length.
    """
    import numpy as np

    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    first = len(shape) - 1  # from this dim on, the elements of the box are contiguous
    while first > 0 and box[first] == slice(0, shape[first]):
        first -= 1
    run, joined = (box[first].stop - box[first].start) * strides[first], first
    while joined > 0 and strides[joined - 1] * out.itemsize <= _BUFFER:  # from this dim on, gaps are read too
        if gap is not None and (strides[joined - 1] - run) * out.itemsize >= gap:
            break
        joined -= 1
        run += (box[joined].stop - box[joined].start - 1) * strides[joined]
    row, rows, inner = strides[joined], box[joined], box[joined + 1 :]
    low = sum(s.start * stride for s, stride in zip(inner, strides[joined + 1 :], strict=True))
    high = sum((s.stop - 1) * stride for s, stride in zip(inner, strides[joined + 1 :], strict=True)) + 1
    wanted = (slice(None), *inner)
    step = max(1, _BUFFER // (row * out.itemsize))
    for place in itertools.product(*(range(s.start, s.stop) for s in box[:joined])):
        base = sum(i * stride for i, stride in zip(place, strides, strict=False))
        target = out[tuple(i - s.start for i, s in zip(place, box, strict=False))]
        if joined == first and target.flags.c_contiguous:
            read(base + rows.start * row, target.reshape(-1))
            continue
        for begin in range(rows.start, rows.stop, step):
            count = min(step, rows.stop - begin)
            buffer = np.empty(count * row, dtype=out.dtype)
            span = slice(low, (count - 1) * row + high)
            read(base + begin * row + low, buffer[span])
            target[begin - rows.start : begin - rows.start + count] = buffer.reshape(count, *shape[joined + 1 :])[
                wanted
            ]
