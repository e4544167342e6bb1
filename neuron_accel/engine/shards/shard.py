# SPDX-License-Identifier: Apache-2.0
"""This rank's shard of a bucket: gradients are reduce-scattered to it, it is updated, and weights are all-gathered.

There are two kinds. :class:`~neuron_accel.engine.shards.eager_shard.EagerShard` keeps parameters as views of one
flat buffer, so that they are gathered in place. :class:`~neuron_accel.engine.shards.lazy_shard.LazyShard` is for
devices that run one compiled graph on all ranks. ``parameter.grad`` is a
:class:`~neuron_accel.engine.shards.sharded_grad.ShardedGrad`, which reads the shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from operator import gt
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from neuron_accel.engine.optim.buckets import Bucket
from neuron_accel.engine.optim.norms import GradientPart
from neuron_accel.engine.shards.partition import Partition, Span
from neuron_accel.engine.shards.sharded_grad import ShardedGrad
from neuron_accel.errors import DesyncError, UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group, Pending
    from neuron_accel.engine.runtime.run import Run


@dataclass
class ParameterShard:
    """This rank's shard of one parameter, in the optimizer.

    Args:
        parameter: the model's parameter.
        span: its elements.
        master: the tensor that the optimizer updates, a view of the rank's chunk in the optimizer's dtype: ``[stop -
            start]``, or of the parameter's shape if that has no dims or shards are full parameters.
    """

    parameter: nn.Parameter
    span: Span
    master: nn.Parameter

    def __repr__(self) -> str:
        return f"<ParameterShard: elements {self.span.start} to {self.span.stop} of {self.parameter.numel()}>"

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient of these elements."""
        return self.master.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.master.grad = value


class BucketShard(ABC):
    """This rank's shard of one bucket, with the reduction of its gradients and the gathering of its weights.

    Args:
        bucket: the parameters.
        partition: their positions in the buffer.
        run: the run.
        samples: number of ranks over which gradients are averaged; more than the size of :attr:`group` if the
            parameters are sharded over some of them.
        optimizer_dtype: dtype of the master weights.
        reduce_dtype: dtype in which gradients are sent and summed.
        plugin: name of the plugin, for messages.
        apart: whether each parameter is updated by itself and, if it is not split, in its own shape.

    Attributes:
        parameters: those of the bucket.
        group: the ranks over which optimizer state is sharded, which hold the same parameters.
        norm_axes: for each parameter, the axes along which ranks hold other elements, and the replicas of each.
        pieces: the parameter shards of this rank.
        used: for each parameter, whether this rank had a gradient in the last backward pass.
        used_anywhere: for each parameter, whether any rank had a gradient since gradients were last dropped.
    """

    pieces: list[ParameterShard]

    def __init__(
        self,
        *,
        bucket: Bucket,
        partition: Partition,
        run: Run,
        samples: int,
        optimizer_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        plugin: str,
        apart: bool = False,
    ) -> None:
        self.bucket, self.partition, self.run = bucket, partition, run
        self.group = run.group(*bucket.reduction_axes)
        self.parameters, self._plugin, self._apart = bucket.parameters, plugin, apart
        self._device = self.parameters[0].device
        self._shapes = [parameter.shape for parameter in self.parameters]  # a loop may assign others, an error
        self.norm_axes = [((*record.axes, *bucket.reduction_axes), record.replicas) for record in bucket.records]
        self.samples, self.optimizer_dtype, self.reduce_dtype = samples, optimizer_dtype, reduce_dtype
        self.used = [False] * len(bucket.parameters)
        self.used_anywhere = [False] * len(bucket.parameters)
        self._pending: Pending | None = None
        self._reduced: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None
        self._visible: list[ShardedGrad | None] = [None] * len(bucket.parameters)  # as they were shown
        self._gathered: list[torch.Tensor] = []  # the full gradient of each parameter, which the user may change

    def __repr__(self) -> str:
        parameters, ranks = f"{type(self).__name__} of {len(self.parameters)} parameters", self.partition.degree
        return f"<{parameters}: {self.partition.chunk} elements, as many on each of {ranks} ranks>"

    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns values of the parameters in the order of the buffer, ``[partition.numel]``; None for zeros."""
        dtype = next((value.dtype for value in values if value is not None), self.bucket.dtype)
        return self.partition.join(values, dtype, self._device)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the values of the parameters in a buffer, in their shapes."""
        return [part.view(shape) for part, shape in zip(self.partition.split(flat), self._shapes, strict=True)]

    def _part(self, chunk: torch.Tensor, piece: ParameterShard) -> torch.Tensor:
        """Returns the slice of a chunk that belongs to ``piece``, which may be changed in place."""
        return piece.span.of_chunk(chunk)

    def _chunk_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this rank's chunk of a buffer, without communication."""
        return self.run.backend.chunk(flat, self.group)

    def _gather_chunks(self, chunk: torch.Tensor) -> torch.Tensor:
        """Returns the buffer of which every rank has a chunk. Collective."""
        return self.run.backend.all_gather(chunk, self.group)

    # ---- what the optimizer updates ----------------------------------------------------------------------------------
    def updated(self) -> list[tuple[nn.Parameter, Sequence[ParameterShard]]]:
        """Returns the tensors that the optimizer updates, each with the parameter shards that it consists of."""
        return [(piece.master, [piece]) for piece in self.pieces]

    joins: ClassVar[bool] = False
    """Whether updated tensors consist of several parameter shards, so that :meth:`before_update` may split them."""

    def before_update(
        self, state: MutableMapping[torch.Tensor, dict[str, Any]], *, by_gradients: bool
    ) -> dict[torch.Tensor, list[nn.Parameter]]:
        """Called before the optimizer's step, or another method.

        Args:
            state: the optimizer's state.
            by_gradients: whether gradients are used. Updated tensors are split of which only some parameters have one,
                and so is their state.

        Returns:
            The tensors that are no longer updated, each with those that are updated instead.
        """
        return {}

    def after_update(self) -> None:  # noqa: B027  # only shards that join need it
        """Called after the optimizer's step, or another method, if the shard :attr:`joins`."""

    def open(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> MutableMapping[Any, dict[str, Any]]:
        """Returns the optimizer's state by the master weights of parameter shards. State and master weights can be read
        and written until :meth:`close`."""
        return state

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """Applies values that were written since :meth:`open`. Returns the same as :meth:`before_update`."""
        return {}

    # ---- weights -----------------------------------------------------------------------------------------------------
    @abstractmethod
    def send_weights(self) -> Callable[[], Any]:
        """Starts to gather the updated weights; returns a function that completes it."""

    @abstractmethod
    def sync_user_weights(self) -> None:
        """Applies weights that the user has assigned or written to, in whatever way."""

    def _check_form(self, index: int) -> None:
        """Raises UsageError if the tensor that was assigned to a parameter is not a valid one."""
        parameter, shape, dtype = self.parameters[index], self._shapes[index], self.bucket.dtype
        if parameter.shape != shape or parameter.dtype != dtype or parameter.device != self._device:
            raise UsageError(
                f"The weight {self.bucket.records[index].fqn!r} is {parameter.dtype} {tuple(parameter.shape)} on "
                f"{parameter.device} now; expected {dtype} {tuple(shape)} on {self._device}.",
                where=f"plugin {self._plugin!r}",
                why="its optimizer's state was sharded for the earlier tensor",
                fix="convert or move a model before `prepare`",
            )

    def before_save(self) -> None:
        """Called before a checkpoint is written. Collective."""
        self.sync_user_weights()

    @abstractmethod
    def reload(self) -> None:
        """Sets the master weights from the model's weights, after these were changed."""

    # ---- gradients that are being reduced ----------------------------------------------------------------------------
    @abstractmethod
    def take_gradient(self, index: int) -> None:
        """Called when the gradient of a parameter has arrived, before :meth:`send_gradients`."""

    @abstractmethod
    def send_gradients(self) -> None:
        """Starts the reduce-scatter of the bucket's gradients and releases them."""

    def complete(self) -> None:
        """Waits for the pending reduce-scatter, if there is one."""
        if self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None

    def receive_gradients(self, used: Sequence[bool], scale: float, partial: Group) -> None:
        """Waits for the reduced gradients and adds them to those of each parameter shard.

        Args:
            used: for each parameter of the bucket, whether any rank had a gradient.
            scale: factor of the sum.
            partial: the group over which the gradients are still partial sums.
        """
        gradient = self._scaled_sum(scale, partial)
        if self._gradient is not None:
            gradient = self._own_gradient() + gradient
            used = [a or b for a, b in zip(used, self.used_anywhere, strict=True)]
        self.used_anywhere = list(used)
        self._hand_out(gradient)
        self._show([index for index, is_used in enumerate(used) if is_used])

    @abstractmethod
    def _scaled_sum(self, scale: float, partial: Group) -> torch.Tensor:
        """Returns the reduced gradients, ``[partition.chunk]``, in the optimizer's dtype, multiplied by ``scale``."""

    # ---- reduced gradients -------------------------------------------------------------------------------------------
    def gradient_parts(self, wanted: Collection[nn.Parameter]) -> list[GradientPart]:
        """Returns this rank's shards of the reduced gradients of the ``wanted`` parameters, which may be changed in
        place."""
        self.before_change()
        mine = {piece.span.parameter: piece for piece in self.pieces}
        parts = []
        for index, parameter in enumerate(self.parameters):
            if parameter in wanted and self.used_anywhere[index]:
                piece = mine.get(index)
                parts.append(GradientPart(piece.master.grad if piece else None, *self.norm_axes[index]))
        return parts

    def _hand_out(self, gradient: torch.Tensor) -> None:
        """Sets the shard to ``gradient``, ``[partition.chunk]``, and the gradient of each parameter shard to its
        slice."""
        self._gradient = gradient
        self._gathered = []
        for piece in self.pieces:
            piece.master.grad = self._part(gradient, piece) if self.used_anywhere[piece.span.parameter] else None

    def drop_gradients(self) -> None:
        """Drops gradients, also ``parameter.grad``."""
        self._gradient = None
        self._gathered = []
        self.used_anywhere = [False] * len(self.parameters)
        for piece in self.pieces:
            piece.master.grad = None
        for parameter in self.parameters:
            if isinstance(parameter.grad, ShardedGrad):
                parameter.grad = None

    def zero_gradients(self) -> None:
        """Sets reduced gradients to zero, and drops gradients of this rank alone."""
        kept = [p.grad is not None and p.grad is shown for p, shown in self._shown]
        self._forget_all_but(kept)
        if self._gradient is None:
            self.drop_gradients()
        else:
            self._gathered = []
            self._hand_out(self._gradient.zero_())
        for parameter, shown in self._shown:
            if self._gradient is not None and shown is not None and parameter.grad is shown:
                shown.take_waiting()
            else:
                parameter.grad = None

    # ---- parameter.grad ----------------------------------------------------------------------------------------------
    def _show(self, indices: Sequence[int]) -> None:
        """Sets ``parameter.grad`` of these parameters."""
        for index in indices:
            shown = self._visible[index]
            if shown is None:
                shown = self._visible[index] = ShardedGrad(self.parameters[index], self, index)
            self.parameters[index].grad = shown

    @property
    def _shown(self) -> Iterator[tuple[nn.Parameter, ShardedGrad | None]]:
        return zip(self.parameters, self._visible, strict=True)

    def sync_user_edits(self) -> None:
        """Applies changes of the user: gradients that were changed in place, dropped or replaced. Replacements are
        treated as reduced, as with plain data parallelism."""
        self._take_edits()
        self._forget_all_but([p.grad is not None for p in self.parameters])
        given = [None if p.grad is None or p.grad is shown else p.grad.detach() for p, shown in self._shown]
        indices = [index for index, gradient in enumerate(given) if gradient is not None]
        if not indices:
            return
        chunk = self._chunk_of(self._join(given)).to(self.optimizer_dtype)
        own = torch.zeros_like(chunk) if self._gradient is None else self._gradient
        self.used_anywhere = [used or index in indices for index, used in enumerate(self.used_anywhere)]
        self._hand_out(own)
        for piece in self.pieces:
            if piece.grad is not None and piece.span.parameter in indices:
                piece.grad.copy_(self._part(chunk, piece))
        self._show(indices)

    def before_change(self) -> None:
        """Must be called before the shard is changed in place, on every rank. Discards gathered gradients."""
        self._take_edits()
        self._gathered = []

    @property
    def has_unreduced(self) -> bool:
        """Whether a parameter has a gradient of this rank alone."""
        return any(p.grad is not None and p.grad is not shown for p, shown in self._shown)

    def full_gradient(self, index: int) -> torch.Tensor:
        """Returns the reduced gradient of one parameter, in its shape and dtype. Changes in place are applied to the
        shard. Collective.

        Raises:
            UsageError: if gradients have been dropped.
            DesyncError: if other ranks read another gradient.
        """
        if self._gradient is None or not self.used_anywhere[index]:
            raise UsageError(
                f"The gradient of {self.bucket.records[index].fqn!r} has been dropped.",
                where="`parameter.grad` with a sharded optimizer, kept beyond `zero_grad`",
                why="it is gathered from all ranks when it is read",
                fix="read it before `zero_grad`, or keep a clone of it",
            )
        if not self._gathered:
            self._check_all_read(index)
            own = self._own_gradient().to(self.bucket.dtype)
            self._gathered = self._split(self._gather_chunks(own))
        return self._gathered[index]

    def zero_gradient(self, index: int) -> None:
        """Sets the shard of one parameter's gradient to zero."""
        self.before_change()
        for piece in self.pieces:
            if piece.span.parameter == index and piece.grad is not None:
                piece.grad.zero_()

    def gather_gradients(self) -> list[torch.Tensor | None]:
        """Returns the unsharded reduced gradients of the bucket's parameters, in the optimizer's dtype. Collective."""
        if self._gradient is None:
            return [None] * len(self.parameters)
        self.sync_user_edits()
        values = self._split(self._gather_chunks(self._own_gradient()))
        return [value if used else None for value, used in zip(values, self.used_anywhere, strict=True)]

    def _check_all_read(self, index: int) -> None:
        """Raises DesyncError if other ranks read another gradient. Sends objects, so that no other collective
        matches."""
        name = self.bucket.records[index].fqn
        everyone = self.run.backend.all_gather_object(name, self.group)
        if set(everyone) != {name}:
            raise DesyncError(
                f"Ranks read different gradients: {sorted(set(everyone))}.",
                where="`parameter.grad` with a sharded optimizer",
                why="each rank has a shard of them, and all of them gather a gradient that is read",
                fix="read the same gradients in the same order on every rank",
            )

    def _own_gradient(self) -> torch.Tensor:
        """Returns the current shard, ``[partition.chunk]``."""
        assert self._gradient is not None
        return self._gradient

    def _take_edits(self) -> None:
        """Applies what the user has written to gathered gradients, and discards these. Not only if they were changed,
        since each rank compares its own elements only and all of them must gather the next time."""
        if not self._gathered:
            return
        own = self._own_gradient()
        edited = self._chunk_of(self._join(self._gathered))
        # Elements that were not changed keep the precision of the shard.
        self._hand_out(updated(own, edited))

    def _forget_all_but(self, kept: Sequence[bool]) -> None:
        """Drops the gradients that the user has dropped by setting ``parameter.grad``."""
        if self._gradient is None or not any(map(gt, self.used_anywhere, kept)):
            return
        self._take_edits()
        self.used_anywhere = [u and k for u, k in zip(self.used_anywhere, kept, strict=True)]
        if not any(self.used_anywhere):
            self._gradient = None
            self._gathered = []
        for piece in self.pieces:
            if piece.grad is not None and not self.used_anywhere[piece.span.parameter]:
                piece.grad.zero_()  # it may be a view of the shard
                piece.grad = None


def updated(own: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Returns the values ``given`` in the dtype of ``own``, whose elements keep the digits that ``given`` does not
    have unless they differ from it."""
    return torch.where(own.to(given.dtype) == given, own, given.to(own.dtype))
