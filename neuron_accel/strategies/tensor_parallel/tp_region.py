"""How activations enter and leave the regions in which the ranks of an axis compute different results.

All regions of a model share one :class:`TpRegion`. The activations between two regions are either the same on every
rank (:class:`ReplicatedFlow`) or a shard of the sequence (:class:`SequenceFlow`); a strategy may exchange one for the
other.

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
    """How the activations between regions are placed."""

    ranks_draw_apart: bool
    """Whether ranks already draw different random numbers outside regions."""

    @abstractmethod
    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turns the activations between regions into the input of a region, full on every rank."""

    @abstractmethod
    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        """Turns the ranks' partial sums of a region's output into the activations between regions; if ``given_up``,
        possibly in the same memory."""


class ReplicatedFlow(Flow):
    """The same on every rank: nothing to do on entry, an all-reduce on exit; the reverse in backward."""

    ranks_draw_apart = False

    def __init__(self, backend: Backend, group: Group) -> None:
        self._backend, self._group = backend, group

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        return copy_to_group(hidden, self._backend, self._group)

    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        return reduce_from_group(partial, self._backend, self._group, given_up=given_up)


class SequenceFlow(Flow):
    """A shard of the sequence, dim 1, on each rank: all-gather on entry, reduce-scatter on exit; the reverse in
    backward.

    A sequence whose length is not divisible is padded at its end between regions; inside a region it has its true
    length. Some models pass their regions a list of tokens, [batch x sequence, hidden], and get one back.
    """

    ranks_draw_apart = True

    def __init__(self, backend: Backend, group: Group) -> None:
        self._backend, self._group = backend, group
        self._length = 0

    def split(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's shard of [batch, sequence, hidden], which is the same on every rank."""
        self._length = hidden.shape[1]
        return chunk_to_group(self._pad(hidden), self._backend, self._group, 1)

    def join(self, shard: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`split`; every rank must compute the same with the result."""
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
        """Restores the length of the sequence when a gradient arrives: activation checkpointing then recomputes
        regions, perhaps after a forward pass over sequences of another length."""
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
        group: the ranks among which the model is sharded.
        architecture: where the modules of the model are.
        randomness: the random state of the ranks of ``group``, where others use it, too.
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
        """From here on, random numbers are the same on every rank again. Does nothing if they are already."""
        if not self.flow.ranks_draw_apart:
            self.randomness.end()


def tp_region_of(model: nn.Module) -> TpRegion | None:
    """The region that the sharded modules of a model share; None if none is sharded."""
    found = (getattr(module, "tp_region", None) for module in model.modules())
    return next((tp_region for tp_region in found if isinstance(tp_region, TpRegion)), None)
