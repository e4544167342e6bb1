"""Tensors in files, read with any other layout.

A :class:`SourceTensor` is one tensor of the original model (or of the optimizer's state, which is sharded like it)
together with all its stored shards, by the coordinates that hold them, and runs of elements of a shard where ZeRO
sharded it further. Reading gives any rank of any mesh its own shard, by intersecting the boxes of two layouts; only
bytes that lie between those wanted are read in addition.

Elements are moved as opaque words, so that every dtype arrives with its exact bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import Extent
from neuron_accel.checkpoint.format.pickled import is_mapped, read_pickled
from neuron_accel.checkpoint.format.ranges import FileRanges, read_box
from neuron_accel.checkpoint.format.tensorfile import item_size
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import torch

Place = tuple[tuple[str, int], ...]
"""Which shard: for every axis of a cut the coordinate of the first rank that holds it."""


class Bytes(FileRanges):
    """The source of chunks. A context manager; threads may share it."""

    def __init__(self) -> None:
        super().__init__()
        self._pickled: dict[Path, dict[str, torch.Tensor]] = {}
        self._held: dict[Path, dict[str, torch.Tensor]] = {}

    def __exit__(self, *_: Any) -> None:
        super().__exit__()
        self._pickled.clear()
        self._held.clear()

    def hold(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Makes tensors that were read from ``path`` already, by whatever names, those that :meth:`read_pickled`
        finds there."""
        self._held[path] = tensors

    def read_pickled(self, path: Path, key: str, offset: int, out: np.ndarray) -> None:
        """The same for the tensor ``key`` of a file of pickled weights; ``offset`` counts from its first byte."""
        import torch

        with self._lock:
            if path in self._held:
                tensors = self._held[path]
            elif path not in self._pickled:
                for other in [p for p in self._pickled if not is_mapped(p)]:
                    del self._pickled[other]  # of those that take memory, one at a time
                self._pickled[path] = tensors = read_pickled(path)
            else:
                tensors = self._pickled[path]
            tensors[key] = flat = tensors[key].contiguous().reshape(-1)
        out.view("u1")[:] = flat.view(torch.uint8).numpy()[offset : offset + out.nbytes]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A run of elements of one flattened shard in a file.

    Args:
        start, stop: which elements of the shard.
        path: the file.
        offset: of the first byte.
        key: in a file of pickled weights, the name of the tensor; ``offset`` counts from its first byte then.
    """

    start: int
    stop: int
    path: Path
    offset: int
    key: str | None = None


@dataclass(kw_only=True)
class SourceTensor:
    """One stored tensor.

    Args:
        name: FQN in the original model.
        aliases: names tied to it.
        layout: its layout when it was saved.
        form: ``"parameter"``: has the shape of the parameter, or ``"own"``: has its own (scalars, factored moments).
        buffer: whether it is a buffer, not a parameter.
        parts: the chunks of each shard.
    """

    name: str
    layout: Layout
    aliases: tuple[str, ...] = ()
    form: str = "parameter"
    buffer: bool = False
    parts: dict[Place, list[Chunk]] = field(default_factory=dict)

    @cached_property
    def item_size(self) -> int:
        return item_size(self.layout.dtype)

    @property
    def nbytes(self) -> int:
        """The size of the full tensor, without padding."""
        return math.prod(self.layout.shape) * self.item_size

    def places(self) -> Iterator[Place]:
        """Every shard there has to be."""
        return places_of(self.layout)

    def check(self) -> None:
        """Checks that all shards are complete, without gaps and overlaps.

        Raises:
            CheckpointError: if not.
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
                    f"The checkpoint does not hold all of {self.name!r}: the shard of {at} is incomplete.",
                    where=", ".join(sorted({str(c.path) for c in self.parts.get(place, ())})) or "no file",
                    fix="use another checkpoint",
                )
            self.parts[place] = sorted(self.parts.get(place, ()), key=lambda c: c.start)

    def extents(self) -> list[Extent] | None:
        """The full tensor as consecutive ranges of bytes, if it is stored like that; call :meth:`check`
        before. None where they are interleaved or padded."""
        cuts = self.layout.cuts
        in_rows = len(cuts) == 1 and math.prod(self.layout.shape[: cuts[0].dim]) == 1 and len(cuts[0].blocks) == 1
        if cuts and not in_rows:
            return None
        chunks = [chunk for place in self.places() for chunk in self.parts[place]]
        if any(chunk.key is not None for chunk in chunks):
            return None
        extents = [Extent(c.path, c.offset, (c.stop - c.start) * self.item_size) for c in chunks]
        return extents if sum(extent.size for extent in extents) == self.nbytes else None

    def read(
        self,
        files: Bytes,
        layout: Layout,
        at: Mapping[str, int],
        out: np.ndarray,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        """Reads what a rank needs of the tensor; call :meth:`check` before.

        Args:
            files: open files.
            layout: the reader's layout of the tensor; of the same global shape.
            at: the reader's coordinates.
            out: 1-D, contiguous, of words of the size of an element: elements ``start`` to ``stop`` of the reader's
                flattened shard. Padding becomes zero.
            start, stop: by default the full shard.
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
        """Boxes to copy: shard, slices of the shard, slices of the reader's rows ``first`` to ``last``."""
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

    def _read_elements(self, files: Bytes, place: Place, start: int, out: np.ndarray) -> None:
        self._read_flat(files, place, start, start + out.size, out)

    def _read_flat(self, files: Bytes, place: Place, start: int, stop: int, out: np.ndarray) -> None:
        for chunk in self.parts[place]:
            low, high = max(start, chunk.start), min(stop, chunk.stop)
            if low < high:
                offset = chunk.offset + (low - chunk.start) * self.item_size
                wanted = out[low - start : high - start]
                if chunk.key is None:
                    files.read(chunk.path, offset, wanted)
                else:
                    files.read_pickled(chunk.path, chunk.key, offset, wanted)


def place_of(layout: Layout, at: Mapping[str, int]) -> Place:
    """Which shard of ``layout`` the rank at ``at`` holds."""
    result = []
    for cut in layout.cuts:
        index = at.get(cut.axis, 0)
        result.append((cut.axis, index - index % cut.replicas))
    return tuple(result)


def places_of(layout: Layout) -> Iterator[Place]:
    """Every shard of ``layout``."""
    places: list[Place] = [()]
    for cut in layout.cuts:
        places = [(*p, (cut.axis, i)) for p in places for i in range(0, cut.degree, cut.replicas)]
    return iter(places)


def words(size: int) -> Any:
    """The numpy dtype of opaque elements of ``size`` bytes."""
    import numpy as np

    return np.dtype(f"u{size}")


def _filled(slices: Iterable[slice]) -> tuple[slice, ...]:
    """The slices of a box; a tensor without dims is one of a single element."""
    return tuple(slices) or (slice(0, 1),)


def _clip_rows(
    wanted: tuple[slice, ...], local: tuple[slice, ...], first: int, last: int
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The slice of a box whose local rows are between ``first`` and ``last``."""
    low, high = max(local[0].start, first), min(local[0].stop, last)
    if low >= high:
        return None
    shift = wanted[0].start - local[0].start
    return (slice(low + shift, high + shift), *wanted[1:]), (slice(low, high), *local[1:])


def _relative(common: Iterable[slice], of: Iterable[slice], into: Iterable[slice]) -> tuple[slice, ...]:
    """``common``, which is inside ``of``, as slices of the destination of ``of``: ``into``."""
    return tuple(
        slice(c.start - o.start + i.start, c.stop - o.start + i.start) for c, o, i in zip(common, of, into, strict=True)
    )
