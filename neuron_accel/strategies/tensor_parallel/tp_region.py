"""How activations enter and leave the regions in which the ranks of an axis compute different things.

All regions of a model share one :class:`TpRegion`. What lies between two regions is either the same on every rank
(:class:`ReplicatedFlow`) or a shard of the sequence (:class:`SequenceFlow`); a strategy may exchange one for the other.

Source: Shoeybi et al. 2019 (the conjugate operators f and g), Korthikanti et al. 2022 (g and its conjugate).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import (
    RankRandomness,
    chunk_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
)

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group
    from neuron_accel.models.architecture import Architecture


class Flow(ABC):
    """What the activations between regions are."""

    ranks_draw_apart: bool
    """Whether ranks already draw different random numbers outside regions."""

    @abstractmethod
    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """What flows between regions becomes the input of a region, whole on every rank."""

    @abstractmethod
    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        """The ranks' partial sums of a region's output become what flows between regions; in the same memory, perhaps,
        if they are given up."""


class ReplicatedFlow(Flow):
    """The same on every rank: nothing to do on entry, an all-reduce on exit; the other way round in backward."""

    ranks_draw_apart = False

    def __init__(self, backend: Backend, group: Group) -> None:
        self._backend, self._group = backend, group

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return copy_to_group(hidden, self._backend, self._group)

    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        return reduce_from_group(partial, self._backend, self._group, given_up=given_up)


class SequenceFlow(Flow):
    """A shard of the sequence, dim 1, on each rank: all-gather on entry, reduce-scatter on exit; the other way round in
    backward.

    A sequence that does not divide is padded at its end between regions; inside a region it has its true length. Some
    models pass their regions a list of tokens, [batch x sequence, hidden], and get one back.
    """

    ranks_draw_apart = True

    def __init__(self, backend: Backend, group: Group) -> None:
        self._backend, self._group = backend, group
        self._length = 0

    def split(self, hidden: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden], the same on every rank, to this rank's shard of it."""
        self._length = hidden.shape[1]
        return chunk_to_group(self._pad(hidden), self._backend, self._group, 1)

    def join(self, shard: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`split`; what follows must compute the same on every rank."""
        full = self._trim(gather_from_group(shard, self._backend, self._group, 1, grad="chunk"))
        self._remember_length(full)
        return full

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dim() == 2:
            length = -(-self._length // self._group.size)
            return self.enter(hidden.unflatten(0, (-1, length))).flatten(0, 1)
        return self._trim(gather_from_group(hidden, self._backend, self._group, 1, grad="reduce_scatter"))

    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        if partial.dim() == 2:
            return self.exit(partial.unflatten(0, (-1, self._length))).flatten(0, 1)
        return reduce_scatter_to_group(self._pad(partial), self._backend, self._group, 1)

    def _remember_length(self, output: torch.Tensor) -> None:
        """Makes the length of the sequence known again when a gradient comes back: activation checkpointing then runs
        regions again, perhaps after a forward pass over sequences of another length."""
        if output.requires_grad:
            length = self._length

            def restore(_: torch.Tensor) -> None:
                self._length = length

            output.register_hook(restore)

    def _pad(self, full: torch.Tensor) -> torch.Tensor:
        missing = -self._length % self._group.size
        if not missing:
            return full
        return F.pad(full, (0, 0) * (full.dim() - 2) + (0, missing))

    def _trim(self, full: torch.Tensor) -> torch.Tensor:
        # contiguous as a model's own hidden states are, which some regions view with other dims
        return full if full.shape[1] == self._length else full.narrow(1, 0, self._length).contiguous()


class TpRegion:
    """The one way in and out of all tensor-parallel regions of a model.

    Args:
        backend: performs the collectives.
        group: the ranks among which the model is divided.
        architecture: where the parts of the model are.
        randomness: of the ranks of ``group``, where others draw from it too.
    """

    def __init__(
        self,
        backend: Backend,
        group: Group,
        architecture: Architecture | None = None,
        randomness: RankRandomness | None = None,
    ) -> None:
        self.backend = backend
        self.group = group
        self.architecture = architecture
        self.flow: Flow = ReplicatedFlow(backend, group)
        self.randomness = randomness or RankRandomness(backend.device, group.index, backend.generator)

    def __deepcopy__(self, memo: dict[int, Any]) -> TpRegion:
        return self  # a copied model runs on the same ranks

    def enter(self, hidden: torch.Tensor, *, draws: bool) -> torch.Tensor:
        """Entry of a region; ``draws`` says whether random numbers are drawn inside."""
        if not self.flow.ranks_draw_apart:
            self.randomness.begin(draws)
        return self.flow.enter(hidden)

    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        """Exit of a region, at its row-wise projection; ``given_up`` says that ``partial`` is not used elsewhere."""
        self.leave()
        return self.flow.exit(partial, given_up=given_up)

    def leave(self) -> None:
        """What is drawn from here on is the same on every rank again. Harmless if it was already."""
        if not self.flow.ranks_draw_apart:
            self.randomness.end()


def tp_region_of(model: nn.Module) -> TpRegion | None:
    """What the sharded modules of a model share; None if none is sharded."""
    found = (getattr(module, "tp_region", None) for module in model.modules())
    return next((tp_region for tp_region in found if isinstance(tp_region, TpRegion)), None)
