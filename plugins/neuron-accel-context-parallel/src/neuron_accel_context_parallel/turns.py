# SPDX-License-Identifier: Apache-2.0
"""Which queries of this rank are combined with which keys of another rank in each step of the ring.

On eager devices they are slices that depend on the rank. On lazy devices, where all ranks have to run the same graph,
the rank is a tensor, and ``torch.where`` selects one of two halves of equal cost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group


class Rows(ABC):
    """A selection of the tokens of a rank, which consist of an early and a late half."""

    @abstractmethod
    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """Selects these tokens along ``dim``."""

    @abstractmethod
    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        """The inverse of :meth:`take`: all tokens along ``dim``, with ``fill`` for those that are not selected."""


class All(Rows):
    """All tokens."""

    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        return tokens

    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        return part


@dataclass(frozen=True)
class Half(Rows):
    """The late half, or the early half."""

    late: bool

    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        return tokens.chunk(2, dim)[int(self.late)]

    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        rest = torch.full_like(part, fill)
        return torch.cat([rest, part] if self.late else [part, rest], dim)


@dataclass(frozen=True)
class ChosenHalf(Rows):
    """The late half if ``late``, a 0-dim bool tensor, is True, else the early half."""

    late: torch.Tensor

    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        early, late = tokens.chunk(2, dim)
        return torch.where(self.late, late, early)

    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        rest = torch.full_like(part, fill)
        return torch.cat([torch.where(self.late, rest, part), torch.where(self.late, part, rest)], dim)


@dataclass(frozen=True)
class Pair:
    """Queries of this rank and keys of another, where each query comes after each key."""

    queries: Rows
    keys: Rows


class Turns:
    """The steps of one rank around the ring.

    Args:
        backend, group: those of the ring.
        device: device of the keys.
    """

    def __init__(self, backend: Backend, group: Group, device: torch.device) -> None:
        self._degree = group.size
        self._index: int | torch.Tensor = group.index
        if backend.is_lazy:
            self._index = backend.chunk(torch.arange(group.size, device=device), group, 0)

    def source(self, turn: int) -> int | torch.Tensor:
        """The rank whose keys this rank has in a step: an int, or on lazy devices an int64 tensor [1]."""
        return (self._index - turn) % self._degree

    def pairs(self, turn: int) -> list[Pair]:
        """The queries and keys of a step after the first, in which a rank uses its own keys."""
        source = self.source(turn)
        if isinstance(source, torch.Tensor):
            later = (source > self._index).squeeze(0)
            return [Pair(Half(True), Half(False)), Pair(ChosenHalf(later), ChosenHalf(later))]
        return [Pair(Half(True), All()) if source > self._index else Pair(All(), Half(False))]
