"""Which queries of this rank meet which keys of another in each turn of the ring.

Where the rank is a number of the program, slices; where it has to be data because all ranks run the same graph,
choices between two halves that cost the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group


class Rows(ABC):
    """Some of the tokens of a rank, which has an early and a late half."""

    @abstractmethod
    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        """These tokens out of all along ``dim``."""

    @abstractmethod
    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        """All tokens along ``dim``: ``part`` where these are, ``fill`` elsewhere."""


class All(Rows):
    """Every token."""

    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        return tokens

    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        return part


@dataclass(frozen=True)
class Half(Rows):
    """The late half, or the early one."""

    late: bool

    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        return tokens.chunk(2, dim)[int(self.late)]

    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        rest = torch.full_like(part, fill)
        return torch.cat([rest, part] if self.late else [part, rest], dim)


@dataclass(frozen=True)
class ChosenHalf(Rows):
    """The late half or the early one, as ``late``, a bool tensor without dims, says."""

    late: torch.Tensor

    def take(self, tokens: torch.Tensor, dim: int) -> torch.Tensor:
        early, late = tokens.chunk(2, dim)
        return torch.where(self.late, late, early)

    def lay(self, part: torch.Tensor, dim: int, fill: float) -> torch.Tensor:
        rest = torch.full_like(part, fill)
        return torch.cat([torch.where(self.late, rest, part), torch.where(self.late, part, rest)], dim)


@dataclass(frozen=True)
class Pair:
    """Queries of this rank and keys of another, each of which sees all of the others as far as order is concerned."""

    queries: Rows
    keys: Rows


class Turns:
    """The turns of one rank.

    Args:
        backend, group: of the ring.
        device: of what turns.
    """

    def __init__(self, backend: Backend, group: Group, device: torch.device) -> None:
        self._degree = group.size
        self._index: int | torch.Tensor = group.index
        if backend.is_lazy:
            self._index = backend.chunk(torch.arange(group.size, device=device), group, 0)

    def source(self, turn: int) -> int | torch.Tensor:
        """The rank whose keys are here in a turn: an int, or an int64 tensor [1]."""
        return (self._index - turn) % self._degree

    def pairs(self, turn: int) -> list[Pair]:
        """What meets in a turn after the first, in which a rank has its own keys."""
        source = self.source(turn)
        if isinstance(source, torch.Tensor):
            later = (source > self._index).squeeze(0)
            return [Pair(Half(True), Half(False)), Pair(ChosenHalf(later), ChosenHalf(later))]
        return [Pair(Half(True), All()) if source > self._index else Pair(All(), Half(False))]
