# SPDX-License-Identifier: Apache-2.0
"""Stored tensors, which can be read with any layout.

A :class:`SourceTensor` is one tensor of the original model, or of optimizer state of the same layout, with all its
stored shards. A shard may be stored in several runs of elements, if ZeRO sharded it further. Any rank of any mesh reads
its own shard: the boxes of the stored layout and of the rank's layout are intersected, and only the bytes of the
intersections, and short gaps between them, are read.

Elements are read as unsigned integers of the same size, so that the bits of every dtype are preserved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.checkpoint.format.files import Extent
from neuron_accel.checkpoint.format.ranges import FileRanges, read_box
from neuron_accel.checkpoint.format.tensorfile import Place, item_size, place_of, places_of
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import Location

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A run of elements of one flattened shard in a file.

    Args:
        start, stop: range of elements of the shard.
        path: the file.
        offset: offset of the first byte in the file.
        key: in a file of pickled weights, the name of the tensor; ``offset`` is then relative to its first byte.
    """

    start: int
    stop: int
    path: Location
    offset: int
    key: str | None = None
    count: ClassVar[int] = 1

    def within(self, start: int, stop: int) -> Iterator[Chunk]:
        """Yields the chunk if it has some of the elements ``start`` to ``stop``."""
        if max(start, self.start) < min(stop, self.stop):
            yield self


@dataclass(frozen=True, kw_only=True)
class ChunkRun:
    """Chunks of equal size, one after another, at the same place in files of ranks ``step`` apart.

    Args:
        start: the first element.
        size: elements of a chunk.
        count: number of chunks.
        first, step: rank of the first chunk's file, and how much higher each following one's is.
        offset: offset of a chunk's first byte from the first byte after the header of its file.
        file: returns the path of a rank's file, and the size of its header in bytes.
    """

    start: int
    size: int
    count: int
    first: int
    step: int
    offset: int
    file: Callable[[int], tuple[Location, int]]

    @property
    def stop(self) -> int:
        return self.start + self.count * self.size

    @property
    def path(self) -> Location:
        """The first file."""
        return self.file(self.first)[0]

    def within(self, start: int, stop: int) -> Iterator[Chunk]:
        """Yields the chunks that have some of the elements ``start`` to ``stop``."""
        if max(start, self.start) >= min(stop, self.stop):
            return
        last = -(-(min(stop, self.stop) - self.start) // self.size)
        for number in range(max(0, start - self.start) // self.size, last):
            path, header = self.file(self.first + number * self.step)
            begin = self.start + number * self.size
            yield Chunk(start=begin, stop=begin + self.size, path=path, offset=header + self.offset)


@dataclass(kw_only=True)
class SourceTensor:
    """A stored tensor.

    Args:
        name: FQN in the original model.
        aliases: further names of a tied tensor.
        layout: its layout when it was saved.
        form: ``"parameter"`` if it has the shape of the parameter; ``"own"`` for state of another shape (scalars,
            factored moments).
        buffer: whether it is a buffer, not a parameter.
        position: of a parameter among those of its model; None if it is not known.
        parts: the chunks of each shard, or runs of them.
    """

    name: str
    layout: Layout
    aliases: tuple[str, ...] = ()
    form: str = "parameter"
    buffer: bool = False
    position: int | None = None
    parts: dict[Place, list[Chunk | ChunkRun]] = field(default_factory=dict)

    @cached_property
    def item_size(self) -> int:
        return item_size(self.layout.dtype)

    @property
    def nbytes(self) -> int:
        """Size of the full tensor in bytes, without padding."""
        return math.prod(self.layout.shape) * self.item_size

    def places(self) -> Iterator[Place]:
        """Yields all shards of its layout."""
        return places_of(self.layout)

    def check(self) -> None:
        """Checks that all shards are complete, without gaps and overlaps.

        Raises:
            CheckpointError: if a shard is not.
        """
        numel = math.prod(self.layout.local_shape)
        for place in self.places():
            end = 0
            for chunk in sorted(self.parts.get(place, ()), key=lambda c: (c.start, c.stop)):
                if chunk.start != end:
                    break
                end = chunk.stop
            if end != numel:
                at = ", ".join(f"{axis} {index}" for axis, index in place) or "any rank"
                raise CheckpointError(
                    f"The checkpoint does not contain all of {self.name!r}: the shard of {at} is incomplete.",
                    where=", ".join(sorted({str(c.path) for c in self.parts.get(place, ())})) or "no file",
                    fix="use another checkpoint",
                )
            self.parts[place] = sorted(self.parts.get(place, ()), key=lambda c: c.start)

    def extents(self) -> list[Extent] | None:
        """Returns the full tensor as consecutive ranges of bytes in files, or None if its shards are interleaved or
        padded. Call :meth:`check` before."""
        cuts = self.layout.cuts
        in_rows = len(cuts) == 1 and math.prod(self.layout.shape[: cuts[0].dim]) == 1 and len(cuts[0].blocks) == 1
        if cuts and not in_rows:
            return None
        parts = (part for place in self.places() for part in self.parts[place])
        chunks = [chunk for part in parts for chunk in part.within(part.start, part.stop)]
        if any(chunk.key is not None for chunk in chunks):
            return None
        extents = [Extent(c.path, c.offset, (c.stop - c.start) * self.item_size) for c in chunks]
        return extents if sum(extent.size for extent in extents) == self.nbytes else None

    def read(
        self,
        files: FileRanges,
        layout: Layout,
        at: Mapping[str, int],
        out: np.ndarray,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        """Reads a rank's shard of the tensor, or a range of its elements. Call :meth:`check` before.

        Args:
            files: open files.
            layout: layout of the tensor on the reading ranks, with the same global shape.
            at: coordinates of the reading rank.
            out: 1-D, contiguous, of the dtype that :func:`words` returns: elements ``start`` to ``stop`` of the rank's
                flattened shard. Padding is set to zero.
            start, stop: range of elements; by default all.
        """
        stop = math.prod(layout.local_shape) if stop is None else stop
        if stop <= start:
            return
        if layout.cuts == self.layout.cuts:
            self._read_flat(files, place_of(layout, at), start, stop, out)
            return
        shape = layout.local_shape or (1,)
        row = max(1, math.prod(shape[1:]))
        first, last = start // row, -(-stop // row)
        aligned = first * row == start and last * row == stop
        import numpy as np

        rows = out if aligned else np.empty((last - first) * row, dtype=out.dtype)
        if layout.padded:
            rows.fill(0)
        target = rows.reshape(last - first, *shape[1:])
        for place, source, wanted in self._boxes(layout, at, first, last):
            into, read = target[wanted], partial(self._read_elements, files, place)
            read_box(read, self.layout.local_shape or (1,), source, into)
        if not aligned:
            out[:] = rows[start - first * row : stop - first * row]

    def _boxes(
        self, layout: Layout, at: Mapping[str, int], first: int, last: int
    ) -> Iterator[tuple[Place, tuple[slice, ...], tuple[slice, ...]]]:
        """Yields the boxes to copy: stored shard, slices of that shard, slices of the reader's rows ``first`` to
        ``last``."""
        for piece in layout.pieces(at):
            box = _clip_rows(_filled(piece.global_slices), _filled(piece.local_slices), first, last)
            if box is None:
                continue
            wanted, local = box
            for place in self.places():
                for stored in self.layout.pieces(dict(place)):
                    there = _filled(stored.global_slices)
                    common = [
                        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(wanted, there, strict=True)
                    ]
                    if all(c.start < c.stop for c in common):
                        source = _relative(common, there, _filled(stored.local_slices))
                        mine = _relative(common, wanted, local)
                        rows = slice(mine[0].start - first, mine[0].stop - first)
                        yield place, source, (rows, *mine[1:])

    def _read_elements(self, files: FileRanges, place: Place, start: int, out: np.ndarray) -> None:
        self._read_flat(files, place, start, start + out.size, out)

    def _read_flat(self, files: FileRanges, place: Place, start: int, stop: int, out: np.ndarray) -> None:
        for chunk in (chunk for part in self.parts[place] for chunk in part.within(start, stop)):
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            offset = chunk.offset + (low - chunk.start) * self.item_size
            wanted = out[low - start : high - start]
            if chunk.key is None:
                files.read(chunk.path, offset, wanted)
            else:
                files.read_pickled(chunk.path, chunk.key, offset, wanted)


def words(size: int) -> Any:
    """Returns the unsigned integer dtype of numpy with ``size`` bytes."""
    import numpy as np

    return np.dtype(f"u{size}")


def _filled(slices: Iterable[slice]) -> tuple[slice, ...]:
    """Returns the slices of a box; a tensor without dims is treated as one of shape ``[1]``."""
    return tuple(slices) or (slice(0, 1),)


def _clip_rows(
    wanted: tuple[slice, ...], local: tuple[slice, ...], first: int, last: int
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns the part of a box whose local rows are between ``first`` and ``last``, or None if it is empty."""
    low, high = max(local[0].start, first), min(local[0].stop, last)
    if low >= high:
        return None
    shift = wanted[0].start - local[0].start
    return (slice(low + shift, high + shift), *wanted[1:]), (slice(low, high), *local[1:])


def _relative(common: Iterable[slice], of: Iterable[slice], into: Iterable[slice]) -> tuple[slice, ...]:
    """Returns the slices of ``into`` that correspond to ``common``, which is inside ``of``; ``of`` and ``into`` are the
    same box in two tensors."""
    return tuple(
        slice(c.start - o.start + i.start, c.stop - o.start + i.start) for c, o, i in zip(common, of, into, strict=True)
    )
