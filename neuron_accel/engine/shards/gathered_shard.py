# SPDX-License-Identifier: Apache-2.0
"""This rank's shard of parameters whose values are gathered only while the model uses them.

The parameters of a bucket are views of one flat buffer. Its storage is freed and allocated anew, while the buffer
itself and what autograd has saved of it stay, as in PyTorch's ``fully_shard``. While it is freed, parameters keep their
shape, their values are NaN, and a use outside of the forward and backward pass of their module is an error
(:mod:`~neuron_accel.engine.shards.released`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.backends.group import Then
from neuron_accel.engine.sharding.parameters import WeightShard
from neuron_accel.engine.shards.eager_shard import EagerShard, UnequalShard
from neuron_accel.engine.shards.released import release, restore
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group, Pending
    from neuron_accel.engine.shards.shard import ParameterShard


class GatheredShard(EagerShard):
    """The shard of a bucket of one unit (:class:`~neuron_accel.engine.shards.unit.Unit`).

    Args:
        read: called with this shard before one of its parameters is read in full: frees the one that was read before.
        own: this rank's weights, ``[partition.chunk]``, if the parameters have no values yet.
        near: the ranks between which parameters are gathered again after :meth:`reshard`; None for all.

    Attributes:
        is_gathered: whether the parameters have their values.
        is_held: whether they keep them, and may be written to, until :meth:`hold` is called again.
    """

    def __init__(
        self,
        *,
        read: Callable[[GatheredShard], None],
        own: torch.Tensor | None = None,
        near: Group | None = None,
        **common: Any,
    ) -> None:
        self._read, self._near = read, near
        self._near_part: torch.Tensor | None = None  # what this rank keeps of the values since they were resharded
        self.is_held = False
        self._given = own
        super().__init__(**common)
        self._given = None
        self._arriving: Pending | None = None
        self._use(self._flat)
        self._nbytes = self._storage.nbytes()
        self._make_empty()
        self._versions = [parameter._version for parameter in self.parameters]
        self.is_gathered = True
        if self.is_sharded:
            self._describe()
            self.release()

    def _use(self, flat: torch.Tensor) -> None:
        """Weights are gathered into this buffer from now on."""
        self._flat, self._views, self._storage = flat, self._split(flat), flat.untyped_storage()

    def _make_empty(self) -> None:
        # NaN in the shape of each parameter, in the memory of one element: torch refuses to write to it, but for fills.
        self._filled_with = torch.full((len(self._views),), float("nan"), dtype=self.bucket.dtype, device=self._device)
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

    def _describe(self) -> None:
        """Records which elements of each parameter this rank keeps."""
        pieces = {piece.span.parameter: piece for piece in self.pieces}
        for index, record in enumerate(self.bucket.records):
            piece = pieces.get(index)
            own = self._own[:0] if piece is None else self._own_part(piece)
            record.weights = WeightShard(
                read=partial(_same, own),
                start=0 if piece is None else piece.span.start,
                stop=0 if piece is None else piece.span.stop,
                axes=self.bucket.reduction_axes,
                gather=partial(self._full_weight, index),
                changed=self.release,
                hold=self.hold,
            )

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks keep a part of the parameters."""
        return self.group.size > 1

    @property
    def is_arriving(self) -> bool:
        """Whether the values are being gathered."""
        return self._arriving is not None

    # ---- the values of the parameters --------------------------------------------------------------------------------
    def start_gather(self) -> None:
        """Starts to gather, unless that is under way or done. Collective."""
        if self.is_gathered or self._arriving is not None:
            return
        with torch.no_grad():
            self.sync_user_weights()
        self._storage.resize_(self._nbytes)
        self._arriving = self._start_gather()

    def _start_gather(self) -> Pending:
        own, group = (self._own, self.group) if self._near_part is None else (self._near_part, self._near)
        return self.run.backend.start_all_gather_into(self._flat, own, group)  # type: ignore[arg-type]

    def gather(self) -> None:
        """The parameters have their values when this returns. Collective."""
        self.start_gather()
        if self._arriving is None:
            return
        self._arriving.wait()
        self._arriving = self._near_part = None
        restore(self.parameters)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view
        self._versions = [parameter._version for parameter in self.parameters]
        self.is_gathered = True

    def reshard(self) -> None:
        """Frees the gathered values, but for this rank's part among the near ranks."""
        if self._near is None or not self.is_sharded or not self.is_gathered:
            self.release()
            return
        self.sync_user_weights()
        part = self.run.backend.chunk(self._flat, self._near).clone()
        self.release()
        self._near_part = part

    def release(self, *, kept: bool = False) -> None:
        """Frees the gathered values, unless they are held. If the loop may have kept tensors of them, these keep their
        values."""
        if self.is_held:
            return
        self._near_part = None
        if not self.is_sharded:
            return
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        elif self.is_gathered:
            self.sync_user_weights()
        else:
            return
        self.is_gathered = False
        for parameter, empty in zip(self.parameters, self._empty, strict=True):
            parameter.data = empty
        self._versions = [parameter._version for parameter in self.parameters]
        release(self.parameters)
        if kept:
            self._use(torch.empty_like(self._flat))
        self._storage.resize_(0)

    def hold(self, held: bool) -> None:
        """Gathers the values, to be read and written, and keeps them; or takes what was written, and frees them.
        Collective."""
        if held:
            self.gather()
        elif self.is_held:
            self.sync_user_weights()
        was_held, self.is_held = self.is_held, held
        if not held:
            self.release(kept=was_held)

    def dissolve(self) -> None:
        """Gives the parameters their values in full, in memory of their own; this shard is not used any more.
        Collective."""
        self.release()  # a rank that has run out of data has not gathered them
        self.gather()
        for parameter, view, record in zip(self.parameters, self._views, self.bucket.records, strict=True):
            parameter.data = view.clone()
            record.weights = None
        self.is_gathered = False

    def _full_weight(self, index: int) -> torch.Tensor:
        self._read(self)
        self.gather()
        return self._views[index]

    def _own_part(self, piece: ParameterShard) -> torch.Tensor:
        return piece.span.of_chunk(self._own)

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
    def before_update(self, state: Any, *, by_gradients: bool) -> dict[torch.Tensor, list[torch.nn.Parameter]]:
        if self.is_held:
            raise UsageError(
                "The optimizer cannot step while the loop writes to the full weights.",
                where="`accelerator.full_weights`",
                why="the weights that it holds would be those before the step",
                fix="leave the context before `optimizer.step()`",
            )
        return super().before_update(state, by_gradients=by_gradients)

    def send_weights(self) -> Callable[[], None]:
        """Nothing travels before the next forward pass."""
        if self.has_masters:
            with torch.no_grad():
                self._own.copy_(self._chunk)
        self.release()
        return lambda: None

    def reload(self) -> None:
        if self.has_masters:
            with torch.no_grad():
                self._chunk.copy_(self._own)

    def sync_user_weights(self) -> None:
        """Takes values that a loop has assigned, ``parameter.data = ...``, or written into a parameter, into the
        shard."""
        if not self.is_sharded:
            super().sync_user_weights()
            return
        with torch._C.DisableTorchFunctionSubclass():  # they are read without values
            self._take_written()

    def _take_written(self) -> None:
        present = self._views if self.is_gathered else self._empty
        written = self._find_written()
        places = [(p.data_ptr(), expected.data_ptr()) for p, expected in zip(self.parameters, present, strict=True)]
        assigned = [index for index, (address, expected) in enumerate(places) if address != expected]
        for index in assigned:
            if not self.is_gathered:
                self._check_has_values(index, self.parameters[index])
            self._check_assigned(index)
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
                    self._take_into_masters(self._own)

    def _move(self) -> None:
        """Gives the parameters other memory: a loop may keep what an assigned one had, and assign it again."""
        if self.is_gathered:
            self._use(self._new_flat())
            with torch.no_grad():
                self._move_weights()
        else:
            self._make_empty()
            for parameter, empty in zip(self.parameters, self._empty, strict=True):
                parameter.data = empty
        self._versions = [parameter._version for parameter in self.parameters]

    def _take_assigned(self, assigned: list[int]) -> None:
        super()._take_assigned(assigned)
        self._use(self._flat)
        self._own = self._chunk_of(self._flat)

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
        self._near_part = None
        for piece in self.pieces:
            if piece.span.parameter != index:
                continue
            new = value.reshape(-1)[piece.span.start : piece.span.stop]
            self._own_part(piece).copy_(new)
            if self.has_masters:  # they keep the digits that a weight does not have, unless it has changed
                with torch.no_grad():
                    master, new = piece.master, new.view(piece.master.shape)
                    master.copy_(torch.where(master.to(new.dtype) == new, master, new.to(master.dtype)))


class UnequalGatheredShard(GatheredShard, UnequalShard):
    """The shard of a bucket of whole parameters whose chunks differ, see
    :class:`~neuron_accel.engine.shards.eager_shard.UnequalShard`.

    Ranks sum buffers that are zero outside of their chunks: twice the bytes of an all-gather, and no padding.
    """

    def _start_gather(self) -> Pending:
        flat = self._flat
        self._chunk_of(flat.zero_()).copy_(self._own)
        return Then(self.run.backend.start_all_reduce(flat, self.group), flat.copy_)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
