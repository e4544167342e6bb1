# SPDX-License-Identifier: Apache-2.0
"""Gathered parameters in a flat buffer, whose storage is freed and allocated anew.

The buffer itself and what autograd has saved of it stay, as in PyTorch's ``fully_shard``. While it is freed, parameters
keep their shape, their values are NaN, and a use outside of the forward and backward pass of their module is an error
(:mod:`~neuron_accel.engine.shards.released`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from neuron_accel.backends.group import Then
from neuron_accel.engine.shards.eager_shard import EagerShard, UnequalShard
from neuron_accel.engine.shards.gathered_shard import GatheredShard
from neuron_accel.engine.shards.released import release, restore
from neuron_accel.engine.shards.shard import updated
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group, Pending


class EagerGatheredShard(GatheredShard, EagerShard):
    """See :class:`GatheredShard`; parameters are views of one flat buffer."""

    can_hold: ClassVar[bool] = True

    def _use(self, flat: torch.Tensor) -> None:
        """Weights are gathered into this buffer from now on."""
        self._flat, self.values, self._storage = flat, self._split(flat), flat.untyped_storage()

    def _make_empty(self) -> None:
        self._use(self._flat)
        self._nbytes = self._storage.nbytes()
        self._empty_anew()

    def _empty_anew(self) -> None:
        # NaN in the shape of each parameter, in the memory of one element: torch refuses to write to it, but for fills.
        self._filled_with = torch.full((len(self._shapes),), float("nan"), dtype=self.bucket.dtype, device=self._device)
        self._empty = [self._filled_with[i].expand(shape) for i, shape in enumerate(self._shapes)]

    def _new_flat(self) -> torch.Tensor:
        if self._given is None:
            return super()._new_flat()
        return torch.empty(self.partition.numel, dtype=self.bucket.dtype, device=self._device)  # its pages stay unused

    def _move_weights(self) -> torch.Tensor:
        if self._given is None:
            return super()._move_weights()
        for parameter, view in zip(self.parameters, self._split(self._flat), strict=True):
            parameter.data = view  # without values, and soon without memory
        return self._given.to(self._device)

    def _masters_of(self, chunk: torch.Tensor) -> torch.Tensor:
        self._own = chunk.clone() if self.is_sharded and self._given is None else chunk
        return self._own.to(self.optimizer_dtype, copy=True) if self.has_masters else self._own

    # ---- the values of the parameters --------------------------------------------------------------------------------
    def _own_weights_now(self) -> torch.Tensor:
        return self._own

    def _own_part(self, index: int) -> torch.Tensor:
        found = (piece.span.of_chunk(self._own) for piece in self.pieces if piece.span.parameter == index)
        return next(found, self._own[:0])

    def _start(self, own: torch.Tensor, group: Group) -> Pending:
        self._storage.resize_(self._nbytes)
        return self._gather_into(self._flat, own, group)

    def _gather_into(self, flat: torch.Tensor, own: torch.Tensor, group: Group) -> Pending:
        return self.run.backend.start_all_gather_into(flat, own, group)

    def _arrived(self, flat: Any) -> Sequence[torch.Tensor]:
        restore(self.parameters)
        return self.values

    def _near_chunk(self) -> torch.Tensor:
        return self.run.backend.chunk(self._flat, self._near).clone()  # type: ignore[arg-type]  # there are near ranks

    def _free(self, *, kept: bool = False) -> None:
        self.is_gathered = False
        self._set(self._empty)
        release(self.parameters)
        if kept:
            self._use(torch.empty_like(self._flat))
        self._storage.resize_(0)

    def _full_values(self) -> Sequence[torch.Tensor]:
        self.gather()
        return self.values

    # ---- gradients ---------------------------------------------------------------------------------------------------
    @property
    def is_alone(self) -> bool:
        """Whether its buffer is that of one parameter, whose gradient is sent from where autograd has put it."""
        return self.is_sharded and len(self.parameters) == 1 and not self._padding

    def send_gradients(self) -> None:
        gradient = self.parameters[0].grad if self.is_alone else None
        if gradient is not None and self._is_buffer(gradient):
            self._take_as_buffer(gradient)
        super().send_gradients()

    def _is_buffer(self, gradient: torch.Tensor) -> bool:
        dense = type(gradient) is torch.Tensor and gradient.layout is torch.strided
        return dense and gradient.dtype == self.reduce_dtype and gradient.is_contiguous()

    def _room(self) -> torch.Tensor:
        """Returns memory for this rank's shard of the gradients that are being reduced, which no step keeps."""
        return torch.empty(self._chunk.numel(), dtype=self.optimizer_dtype, device=self._device)

    # ---- what the optimizer does -------------------------------------------------------------------------------------
    def send_weights(self) -> Callable[[], Any]:
        if self.is_sharded and self.has_masters:
            with torch.no_grad():
                self._own.copy_(self._chunk)
        return super().send_weights()

    def reload(self) -> None:
        if not self.is_sharded:
            super().reload()
        elif self.has_masters:
            with torch.no_grad():
                self._chunk.copy_(self._own)

    # ---- what a loop writes ------------------------------------------------------------------------------------------
    def _take_written(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # they are read without values
            self._find_and_take()

    def _find_and_take(self) -> None:
        present = self.values if self.is_gathered else self._empty
        written = self._find_written()
        places = [(p.data_ptr(), expected.data_ptr()) for p, expected in zip(self.parameters, present, strict=True)]
        assigned = [index for index, (address, expected) in enumerate(places) if address != expected]
        for index in assigned:
            if not self.is_gathered:
                self._check_has_values(index, self.parameters[index])
            self._check_form(index)
        self._check_memory(assigned)
        for index in assigned:
            self._take(index, self.parameters[index].detach())
        for index in set(written).difference(assigned):
            self._take(index, self.parameters[index].detach().clone())
            if not self.is_gathered:
                self._filled_with[index] = float("nan")
        if assigned:
            self._move()
        if self.is_held:  # a write through `.data` does not count, so all values are taken
            with torch.no_grad():
                self._own.copy_(self._chunk_of(self._flat))
                if self.has_masters:
                    self._chunk.copy_(updated(self._chunk, self._own))

    def _move(self) -> None:
        """Gives the parameters other memory: a loop may keep what an assigned one had, and assign it again."""
        if self.is_gathered:
            self._use(self._new_flat())
            with torch.no_grad():
                self._move_weights()
        else:
            self._empty_anew()
        self._set(self.values if self.is_gathered else self._empty)

    def _check_has_values(self, index: int, parameter: torch.Tensor) -> None:
        """Raises UsageError if a tensor was assigned that was computed from a parameter without values."""
        if parameter.detach().isnan().any():
            raise UsageError(
                f"NaN was assigned to the weight {self.bucket.records[index].fqn!r}.",
                where=f"plugin {self._plugin!r}",
                why="each rank keeps some elements of every parameter, and its values are NaN outside of the forward "
                "and backward pass: so is what is computed from them",
                fix="read and write weights inside `with accelerator.full_weights(model):`",
            )

    def _find_written(self) -> list[int]:
        """The parameters that were written to in place; while they have no values, only a fill can."""
        before, self._versions = self._versions, [parameter._version for parameter in self.parameters]
        if self.is_gathered:
            return [index for index, version in enumerate(self._versions) if version != before[index]]
        if self._versions == before and not self.run.backend.reads_are_free:
            return []
        return (~self._filled_with.isnan()).nonzero().flatten().tolist()

    def _take(self, index: int, value: torch.Tensor) -> None:
        self.near_part = None
        for piece in self.pieces:
            if piece.span.parameter != index:
                continue
            new = value.reshape(-1)[piece.span.start : piece.span.stop]
            piece.span.of_chunk(self._own).copy_(new)
            if self.has_masters:  # they keep the digits that a weight does not have, unless it has changed
                with torch.no_grad():
                    piece.master.copy_(updated(piece.master, new.view(piece.master.shape)))


class UnequalGatheredShard(EagerGatheredShard, UnequalShard):
    """The shard of a bucket of whole parameters whose chunks differ, see
    :class:`~neuron_accel.engine.shards.eager_shard.UnequalShard`.

    Ranks sum buffers that are zero outside of their chunks: twice the bytes of an all-gather, and no padding.
    """

    def _gather_into(self, flat: torch.Tensor, own: torch.Tensor, group: Group) -> Pending:
        self._chunk_of(flat.zero_()).copy_(own)
        return Then(self.run.backend.start_all_reduce(flat, group), flat.copy_)
