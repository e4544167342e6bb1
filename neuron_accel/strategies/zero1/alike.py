"""A way to cut parameters that is the same on every rank, for devices that run one compiled graph on all of them.

Cut at the ends of equal chunks, each rank would have pieces of other sizes, at other places: another graph, and on
Trainium a compilation, for each. So every parameter is cut by itself, into as many pieces of equal length as there are
ranks, the last ones padded, and the buffer is ordered by rank first: chunk r consists of the r-th pieces of all
parameters. The padding is less than one element per rank and parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from neuron_accel.strategies.zero1.partition import Partition, Piece


@dataclass(frozen=True)
class AlikePartition(Partition):
    """The layout of one bucket; ``offsets`` are those of a parameter's piece within a chunk.

    Args:
        lengths: elements of each rank's piece of each parameter, padding included.
    """

    lengths: tuple[int, ...]

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """One of each parameter; ``start`` to ``stop`` are those of its elements that are not padding."""
        return tuple(
            Piece(
                parameter=index,
                start=min(rank * length, size),
                stop=min((rank + 1) * length, size),
                offset=offset,
                padding=length - (min((rank + 1) * length, size) - min(rank * length, size)),
            )
            for index, (offset, size, length) in enumerate(zip(self.offsets, self.sizes, self.lengths, strict=True))
        )

    def join(self, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The buffer, ``[numel]``, with these values of the parameters; None counts as zeros."""
        rows = []
        for tensor, size, length in zip(tensors, self.sizes, self.lengths, strict=True):
            if tensor is None:
                rows.append(torch.zeros(self.degree, length, dtype=dtype, device=device))
                continue
            flat, missing = tensor.reshape(-1).to(dtype), self.degree * length - size
            rows.append((F.pad(flat, (0, missing)) if missing else flat).view(self.degree, length))
        return torch.cat(rows, 1).reshape(-1)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' values in a buffer, flattened."""
        rows = flat.view(self.degree, self.chunk)
        wholes = [
            rows[:, offset : offset + length].reshape(-1)
            for offset, length in zip(self.offsets, self.lengths, strict=True)
        ]
        return [value if len(value) == size else value[:size] for value, size in zip(wholes, self.sizes, strict=True)]


def alike(sizes: Sequence[int], degree: int) -> AlikePartition:
    """Every parameter cut into ``degree`` pieces of equal length."""
    lengths = [max(1, -(-size // degree)) for size in sizes]
    offsets, total = [], 0
    for length in lengths:
        offsets.append(total)
        total += length
    return AlikePartition(
        degree=degree, chunk=max(1, total), offsets=tuple(offsets), sizes=tuple(sizes), lengths=tuple(lengths)
    )
