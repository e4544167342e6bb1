"""Who holds which part of a bucket: pure arithmetic on sizes.

A bucket is one flat buffer of ``degree`` equal chunks, one per rank. The two ways to lay parameters into it differ only
in where each begins: one after another, so that chunks cut through them ("even"), or such that none is cut
("parameters").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A run of elements of one flattened parameter in one rank's chunk.

    Args:
        parameter: index of the parameter in the bucket.
        start, stop: elements of the flattened parameter.
        offset: where ``start`` lies in the chunk.
        padding: elements without meaning that follow ``stop`` in the chunk and belong to the piece.
    """

    parameter: int
    start: int
    stop: int
    offset: int
    padding: int = 0

    @property
    def length(self) -> int:
        """Elements of the chunk, padding included."""
        return self.stop - self.start + self.padding


@dataclass(frozen=True)
class Partition:
    """The layout of one bucket.

    Args:
        degree: number of ranks.
        chunk: elements of each rank's chunk, padding included.
        offsets: where each parameter begins in the buffer of ``degree * chunk`` elements.
        sizes: elements of each parameter.
    """

    degree: int
    chunk: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.degree * self.chunk

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What lies in the chunk of ``rank``, in the order of the parameters."""
        begin, end = rank * self.chunk, (rank + 1) * self.chunk
        result = []
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(begin, offset), min(end, offset + size)
            if start < stop:
                result.append(Piece(parameter=index, start=start - offset, stop=stop - offset, offset=start - begin))
        return tuple(result)


def even(sizes: Sequence[int], degree: int) -> Partition:
    """Parameters one after another, cut wherever a chunk ends; less than ``degree`` elements of padding in all."""
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += size
    return Partition(degree=degree, chunk=max(1, -(-total // degree)), offsets=tuple(offsets), sizes=tuple(sizes))


def whole(sizes: Sequence[int], degree: int) -> Partition:
    """No parameter is cut; the largest go first, each to the rank with the least so far (longest processing time first,
    Graham 1969)."""
    loads = [0] * degree
    rank_of = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(degree), key=lambda r: (loads[r], r))
        rank_of[index] = rank
        loads[rank] += sizes[index]
    chunk = max(1, *loads)
    filled = [rank * chunk for rank in range(degree)]
    offsets = []
    for index, size in enumerate(sizes):
        offsets.append(filled[rank_of[index]])
        filled[rank_of[index]] += size
    return Partition(degree=degree, chunk=chunk, offsets=tuple(offsets), sizes=tuple(sizes))
