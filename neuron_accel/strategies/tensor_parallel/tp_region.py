# SPDX-License-Identifier: Apache-2.0
"""How activations enter and leave tensor-parallel regions, in which ranks compute different results.

All regions of a model share one :class:`TpRegion`. The activations between two regions are either replicated
(:class:`ReplicatedFlow`) or sharded along the sequence (:class:`SequenceFlow`, which sequence parallelism installs).

Source: Shoeybi et al. 2019 (the conjugate operators f and g), Korthikanti et al. 2022 (g and its conjugate).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import (
    RankRandomness,
    UsageError,
    chunk_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
)
from neuron_accel.strategies.tensor_parallel.overlap import (
    ColumnWise,
    forget_products,
    gather_and_multiply,
    gathers_late,
    overlapping_layers,
)

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group
    from neuron_accel.contract.families import Architecture


class Flow(ABC):
    """Placement of the activations between regions."""

    ranks_draw_apart: bool
    """Whether ranks already draw different random numbers outside regions."""

    @abstractmethod
    def enter(self, hidden: torch.Tensor, region: nn.Module | None = None) -> torch.Tensor:
        """Converts the activations between regions to the input of a region, which is the full tensor on every rank.

        Args:
            hidden: the activations.
            region: the module that receives the result.
        """

    @abstractmethod
    def left(self, region: nn.Module, *, completed: bool) -> None:
        """Is called when the module of a region returns, or raises an error: then it was not ``completed``."""

    @abstractmethod
    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        """Converts the ranks' partial sums of a region's output to the activations between regions. If ``given_up``,
        the memory of ``partial`` may be reused."""


class ReplicatedFlow(Flow):
    """Replicated activations: identity on entry, all-reduce on exit; the reverse in backward."""

    ranks_draw_apart = False

    def __init__(self, backend: Backend, group: Group) -> None:
        self._backend, self._group = backend, group

    def enter(self, hidden: torch.Tensor, region: nn.Module | None = None) -> torch.Tensor:
        return copy_to_group(hidden, self._backend, self._group)

    def left(self, region: nn.Module, *, completed: bool) -> None:
        """Has no effect."""

    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        return reduce_from_group(partial, self._backend, self._group, given_up=given_up)


class SequenceFlow(Flow):
    """Activations sharded along the sequence, dim 1: all-gather on entry, reduce-scatter on exit; the reverse in
    backward.

    Between regions, a sequence whose length is not divisible is padded at its end; inside a region it has its true
    length. In some models the input and output of regions are [batch x sequence, hidden].

    Args:
        backend, group: of the collectives.
        overlap_gather: whether column-wise layers compute while the input of their region is being gathered, see
            :mod:`~neuron_accel.strategies.tensor_parallel.overlap`. torch.compile, which ends its graph at a
            collective, traces the region without.
        regather: whether these layers keep this rank's shard of that input, and gather it again in the backward pass;
            also not under torch.compile.
    """

    ranks_draw_apart = True

    def __init__(self, backend: Backend, group: Group, *, overlap_gather: bool = False, regather: bool = False) -> None:
        self._backend, self._group = backend, group
        self.overlap_gather, self.regather = overlap_gather, regather
        self._length = 0

    def split(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard of [batch, sequence, hidden], which is replicated."""
        self._length = hidden.shape[1]
        return chunk_to_group(self._pad(hidden), self._backend, self._group, 1)

    def join(self, shard: torch.Tensor) -> torch.Tensor:
        """Inverse of :meth:`split`. Every rank must compute the same with the result."""
        full = self._trim(gather_from_group(shard, self._backend, self._group, 1, grad="chunk"))
        self._remember_length(full)
        return full

    def enter(self, hidden: torch.Tensor, region: nn.Module | None = None) -> torch.Tensor:
        if region is not None and gathers_late(region):
            return hidden
        ahead = self.overlap_gather or self.regather
        if ahead and region is not None and not torch.compiler.is_compiling():
            layers = [layer for _, layer in overlapping_layers(region, hidden.shape[-1])]
            if layers and hidden.dim() in (2, 3):
                return self._enter_with_products(hidden, layers)
        return self.gather(hidden)

    def gather(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the full input of a region; in backward its gradients are summed over ranks."""
        if hidden.dim() == 2:
            return self.gather(self._unflatten(hidden)).flatten(0, 1)
        return self._trim(gather_from_group(hidden, self._backend, self._group, 1, grad="reduce_scatter"))

    def _enter_with_products(self, hidden: torch.Tensor, layers: list[ColumnWise]) -> torch.Tensor:
        flat = hidden.dim() == 2
        shard = self._unflatten(hidden) if flat else hidden
        full, products = gather_and_multiply(
            *(shard, layers, self._backend, self._group, self._length),
            overlaps=self.overlap_gather,
            regather=self.regather,
        )
        full = full.flatten(0, 1) if flat else full
        for layer, product in products:
            layer._ahead = full, product.flatten(0, 1) if flat else product
        return full

    def _unflatten(self, hidden: torch.Tensor) -> torch.Tensor:
        """Converts a shard [batch x positions, hidden] to [batch, positions, hidden]."""
        return hidden.unflatten(0, (-1, -(-self._length // self._group.size)))

    def left(self, region: nn.Module, *, completed: bool) -> None:
        if (self.overlap_gather or self.regather) and not torch.compiler.is_compiling():
            forget_products(region, completed=completed)

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
        # Contiguous, since some regions call view on the hidden states.
        return full if full.shape[1] == self._length else full.narrow(1, 0, self._length).contiguous()


class TpRegion:
    """Entry and exit of all tensor-parallel regions of a model.

    Args:
        backend: performs the collectives.
        group: the ranks over which the model is sharded.
        architecture: the architecture of the model.
        randomness: makes random numbers differ between the ranks of ``group``, if it is shared with others.
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
        return self  # a copied model communicates in the same group

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "A tensor-parallel model cannot be pickled.",
            why="this rank has shards of its weights, and communicates with the ranks that have the others",
            fix="copy.deepcopy(model) for evaluation; accelerator.save_model(model, folder) or get_state_dict(model) "
            "for the full weights",
        )

    def enter(self, hidden: torch.Tensor, *, draws: bool, region: nn.Module | None = None) -> torch.Tensor:
        """Is called at the entry of a region. ``draws``: whether random numbers are drawn inside; ``region``: the
        module that receives the result."""
        if not self.flow.ranks_draw_apart:
            self.randomness.begin(draws)
        return self.flow.enter(hidden, region)

    def exit(self, partial: torch.Tensor, *, given_up: bool = False) -> torch.Tensor:
        """Is called at the exit of a region, its row-wise projection. ``given_up``: whether ``partial`` is not used
        afterwards."""
        self.leave()
        return self.flow.exit(partial, given_up=given_up)

    def leave(self) -> None:
        """Makes random numbers equal on all ranks again. Has no effect if they already are."""
        if not self.flow.ranks_draw_apart:
            self.randomness.end()


def tp_region_of(model: nn.Module) -> TpRegion | None:
    """Returns the object that the sharded modules of a model share; None if none is sharded."""
    found = (getattr(module, "tp_region", None) for module in model.modules())
    return next((tp_region for tp_region in found if isinstance(tp_region, TpRegion)), None)
