# SPDX-License-Identifier: Apache-2.0
"""How the elements of a bucket are distributed over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from neuron_accel.engine.optim.buckets import Bucket
    from neuron_accel.engine.runtime.run import Run

MOST_PADDING = 1.25
"""Size of a padded buffer, by that of its parameters, up to which parameters that are not split have equal chunks."""


# ---- Partitions of a bucket ------------------------------------------------------------------------------------------
# A bucket is one flat buffer of ``degree`` chunks, one per rank. The two partitions differ in the positions of the
# parameters: consecutive, so that a chunk may end inside a parameter (:func:`even`), or such that no parameter is in
# two chunks (:func:`unsplit`). Chunks are equal, unless parameters that are not split would need much padding.
@dataclass(frozen=True)
class Span:
    """A range of elements of one flattened parameter in a rank's chunk.

    Args:
        parameter: index of the parameter in the bucket.
        start, stop: range of elements of the flattened parameter.
        offset: position of ``start`` in the chunk.
        padding: number of padding elements that follow in the chunk.
    """

    parameter: int
    start: int
    stop: int
    offset: int
    padding: int = 0

    @property
    def length(self) -> int:
        """Number of elements in the chunk, padding included."""
        return self.stop - self.start + self.padding

    def of_chunk(self, chunk: torch.Tensor) -> torch.Tensor:
        """Returns its elements of a rank's chunk, padding included, as a view."""
        return chunk[self.offset : self.offset + self.stop - self.start + self.padding]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The positions of the parameters of one bucket.

    Args:
        degree: number of ranks.
        chunk: number of elements of each rank's chunk, padding included; of the largest if chunks differ.
        offsets: position of each parameter in the buffer.
        sizes: number of elements of each parameter.
        bounds: if chunks differ, the positions at which they begin, and the end of the last.
    """

    degree: int
    chunk: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    bounds: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        """Number of elements of the buffer, padding included."""
        return self.degree * self.chunk if self.bounds is None else self.bounds[-1]

    def place(self, rank: int) -> slice:
        """Returns the position of a rank's chunk in the buffer."""
        if self.bounds is not None:
            return slice(self.bounds[rank], self.bounds[rank + 1])
        return slice(rank * self.chunk, (rank + 1) * self.chunk)

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Returns the spans in the chunk of ``rank``, in the order of the parameters."""
        place = self.place(rank)
        begin, end = place.start, place.stop
        result = []
        for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            start, stop = max(begin, offset), min(end, offset + size)
            if start < stop:
                result.append(Span(parameter=index, start=start - offset, stop=stop - offset, offset=start - begin))
        return tuple(result)

    def join(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns the buffer, ``[numel]``, with these values of the parameters; None for zeros."""
        flat = torch.zeros(self.numel, dtype=dtype, device=device)
        for tensor, part in zip(tensors, self.split(flat), strict=True):
            if tensor is not None:
                part.copy_(tensor.reshape(-1))
        return flat

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the values of the parameters in a buffer, flattened."""
        return [flat[offset : offset + size] for offset, size in zip(self.offsets, self.sizes, strict=True)]


def even(sizes: Sequence[int], degree: int) -> Partition:
    """Returns a partition with consecutive parameters, which are split at the ends of chunks. It has less than
    ``degree`` elements of padding."""
    *offsets, total = accumulate(sizes, initial=0)
    return Partition(degree=degree, chunk=max(1, -(-total // degree)), offsets=tuple(offsets), sizes=tuple(sizes))


def owners_of(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Returns a rank for each parameter. The largest are assigned first, each to the rank with the fewest elements so
    far (longest processing time first, Graham 1969).

    Args:
        sizes: number of elements of each parameter.
        loads: number of elements that each rank has already, to which these are added.
    """
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = min(range(len(loads)), key=lambda r: (loads[r], r))
        owners[index] = rank
        loads[rank] += sizes[index]
    return owners


def unsplit(sizes: Sequence[int], degree: int, owners: Sequence[int]) -> Partition:
    """Returns the partition in which parameters are whole, on the ranks ``owners``. Chunks are equal if that pads the
    buffer by little."""
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(degree)]
    chunk, bounds = max(1, *loads), None
    begins = [rank * chunk for rank in range(degree)]
    if degree * chunk > MOST_PADDING * sum(sizes) and any(loads):
        bounds = tuple(accumulate(loads, initial=0))
        begins = [*bounds[:-1]]
    offsets = []
    for size, owner in zip(sizes, owners, strict=True):
        offsets.append(begins[owner])
        begins[owner] += size
    return Partition(degree=degree, chunk=chunk, offsets=tuple(offsets), sizes=tuple(sizes), bounds=bounds)


# ---- A partition that is the same on every rank, for devices that run one compiled graph on all of them --------------
# If parameters were split at the ends of equal chunks, each rank would have shards of different sizes at different
# positions: another graph, and on Trainium a compilation, for each rank. Therefore each parameter is split into as many
# shards of equal length as there are ranks, of which the last are padded, and chunk r of the buffer consists of the
# r-th shards of all parameters. The padding is less than one element per rank and parameter.
@dataclass(frozen=True, kw_only=True)
class LazyPartition(Partition):
    """A partition in which each parameter has a shard in every chunk; ``offsets`` are positions of the shards in a
    chunk.

    Args:
        lengths: number of elements of a rank's shard of each parameter, padding included.
    """

    lengths: tuple[int, ...]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Returns one span of each parameter; ``start`` to ``stop`` are its elements without padding."""
        return tuple(
            Span(
                parameter=index,
                start=min(rank * length, size),
                stop=min((rank + 1) * length, size),
                offset=offset,
                padding=length - (min((rank + 1) * length, size) - min(rank * length, size)),
            )
            for index, (offset, size, length) in enumerate(zip(self.offsets, self.sizes, self.lengths, strict=True))
        )

    def join(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        rows = []
        for tensor, size, length in zip(tensors, self.sizes, self.lengths, strict=True):
            if tensor is None:
                rows.append(torch.zeros(self.degree, length, dtype=dtype, device=device))
                continue
            flat, missing = tensor.reshape(-1).to(dtype), self.degree * length - size
            rows.append((F.pad(flat, (0, missing)) if missing else flat).view(self.degree, length))
        return torch.cat(rows, 1).reshape(-1)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        rows = flat.view(self.degree, self.chunk)
        full = [
            rows[:, offset : offset + length].reshape(-1)
            for offset, length in zip(self.offsets, self.lengths, strict=True)
        ]
        return [value if len(value) == size else value[:size] for value, size in zip(full, self.sizes, strict=True)]


def lazy_partition(sizes: Sequence[int], degree: int) -> LazyPartition:
    """Returns the partition of each parameter into ``degree`` shards of equal length."""
    lengths = [max(1, -(-size // degree)) for size in sizes]
    *offsets, total = accumulate(lengths, initial=0)
    return LazyPartition(
        degree=degree, chunk=max(1, total), offsets=tuple(offsets), sizes=tuple(sizes), lengths=tuple(lengths)
    )


def partition_of(bucket: Bucket, run: Run, *, owners: Sequence[int] | None = None) -> Partition:
    """Returns the positions of a bucket's parameters in its buffer: for a device that runs one compiled graph on all
    ranks, which then need equal shards, those of :func:`lazy_partition`.

    Args:
        bucket: the parameters.
        run: the run.
        owners: ranks of the parameters, if none may have elements on several ranks.
    """
    sizes, degree = [p.numel() for p in bucket.parameters], run.group(*bucket.reduction_axes).size
    if run.backend.is_lazy:
        return lazy_partition(sizes, degree)
    return even(sizes, degree) if owners is None else unsplit(sizes, degree, owners)
