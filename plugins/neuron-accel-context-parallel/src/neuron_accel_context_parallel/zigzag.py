# SPDX-License-Identifier: Apache-2.0
"""How a sequence is sharded over ranks.

A sequence is padded to 2 x degree chunks of equal length; rank r has chunks r and 2 x degree - 1 - r, one early and one
late. Under a causal mask every rank then computes the same number of scores, and half a block in every step of the
ring: all its queries with the early keys of a rank before it, or its late queries with all keys of a rank after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group


def padded_length(length: int, degree: int) -> int:
    """The sequence length after padding."""
    return -(-length // (2 * degree)) * 2 * degree


def table(length: int, degree: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The positions of each rank in ascending order, int64 [degree, length / degree]; ``length`` has to be a multiple
    of 2 x degree."""
    chunks = torch.arange(length, device=device).view(2 * degree, -1)
    return torch.cat([chunks[:degree], chunks[degree:].flip(0)], 1)


class Zigzag:
    """Shards sequences over the ranks of a group.

    Args:
        backend: performs the collectives.
        group: the ranks.
    """

    def __init__(self, backend: Backend, group: Group) -> None:
        self.backend, self.group = backend, group

    @property
    def degree(self) -> int:
        """The number of ranks."""
        return self.group.size

    def order(self, length: int, device: torch.device) -> torch.Tensor:
        """The positions of all ranks, concatenated by rank: int64 [padded length]."""
        return table(padded_length(length, self.degree), self.degree, device).flatten()

    def pad(self, full: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        """Pads dim ``dim`` of ``full`` to the padded length, with ``fill``."""
        missing = padded_length(full.shape[dim], self.degree) - full.shape[dim]
        return F.pad(full, (0, 0) * (full.dim() - 1 - dim) + (0, missing), value=fill) if missing else full

    def shard(self, full: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        """This rank's shard along ``dim`` of a tensor that every rank has in full."""
        ordered = self.pad(full, dim, fill).index_select(dim, self.order(full.shape[dim], full.device))
        return self.backend.chunk(ordered, self.group, dim).contiguous()

    def restore(self, ordered: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        """The inverse of :meth:`order`: the first ``length`` positions in the order of the sequence."""
        places = torch.argsort(self.order(length, ordered.device))[:length]
        return ordered.index_select(dim, places)
