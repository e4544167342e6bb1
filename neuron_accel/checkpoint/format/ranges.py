"""Ranges of bytes, and boxes of tensors, read from files."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import failure, open_file
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

_BUFFER = 16 << 20


class FileRanges:
    """Files, each opened once. A context manager; threads may share it.

    Attributes:
        bytes_read: how many bytes have been read.
    """

    def __init__(self) -> None:
        self.bytes_read = 0
        self._lock = threading.Lock()
        self._open: dict[Path | str, int] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_: Any) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def _descriptor(self, path: Path | str) -> int:
        found = self._open.get(path)
        if found is not None:
            return found
        with self._lock:
            if path not in self._open:
                self._open[path] = open_file(path)
            return self._open[path]

    def inode(self, path: Path | str) -> int:
        """The number of the file that is read."""
        try:
            return os.fstat(self._descriptor(path)).st_ino
        except OSError as error:
            raise failure("read", path, error) from error

    def read(self, path: Path | str, offset: int, out: np.ndarray) -> None:
        """Fills ``out`` (1-D, contiguous) with the bytes at ``offset``.

        Raises:
            CheckpointError: if the file cannot be read, or ends before.
        """
        try:
            descriptor, view = self._descriptor(path), out.data.cast("B")
            while view:
                count = os.preadv(descriptor, [view], offset)
                if count == 0:
                    raise CheckpointError(
                        f"{Path(path).name!r} ends too early.", where=str(path), why="it was truncated"
                    )
                view, offset = view[count:], offset + count
        except OSError as error:
            raise failure("read", path, error) from error
        with self._lock:
            self.bytes_read += out.nbytes


def read_box(
    read: Callable[[int, np.ndarray], None],
    shape: Sequence[int],
    box: Sequence[slice],
    out: np.ndarray,
    gap: int | None = None,
) -> None:
    """Reads a box of a tensor that lies row after row in a file.

    Args:
        read: fills a 1-D array with the tensor's elements from a number on.
        shape: of the tensor; at least one dim.
        box: start and stop along every dim.
        out: of the shape of ``box``.
        gap: how many bytes between wanted ones are rather read than jumped over; None: however many.
    """
    import numpy as np

    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    first = len(shape) - 1  # along this dim, and inside of it, what is wanted lies side by side
    while first > 0 and box[first] == slice(0, shape[first]):
        first -= 1
    run, joined = (box[first].stop - box[first].start) * strides[first], first
    while joined > 0 and strides[joined - 1] * out.itemsize <= _BUFFER:  # along this dim, with what is in between
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
