"""This rank's share of a bucket: gradients are scattered to it, it is updated, and weights are gathered from it.

There are two kinds. :class:`~neuron_accel.strategies.zero1.eager_shard.EagerShard` keeps parameters as views of one
flat buffer, so that nothing is copied; :class:`~neuron_accel.strategies.zero1.lazy_shard.LazyShard` is for devices
that run one compiled graph on all ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.contract import Bucket, DesyncError, GradientPart, UsageError, check_dense
from neuron_accel.strategies.zero1.partition import Partition, Span
from neuron_accel.strategies.zero1.sharded_grad import ShardedGrad

if TYPE_CHECKING:
    from neuron_accel.contract import Group, ParameterRecord, Pending, Run


@dataclass
class ParameterShard:
    """What this rank optimizes of one parameter.

    Args:
        parameter: the model's parameter.
        place: which of its elements.
        master: what the optimizer updates, a view into the rank's chunk, in the optimizer's dtype; ``[stop - start]``,
            or the parameter's shape where it has no dims, or pieces are whole parameters.
    """

    parameter: nn.Parameter
    place: Span
    master: nn.Parameter

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient of these elements."""
        return self.master.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.master.grad = value


class BucketShard(ABC):
    """This rank's share of one bucket.

    Args:
        bucket: the parameters.
        partition: how they lie in the buffer.
        run: the run.
        group: the ranks that share the optimizer's state.
        optimizer_dtype: dtype of the masters.
        reduce_dtype: dtype in which gradients travel and are summed.

    Attributes:
        pieces: what this rank optimizes.
        used: for each parameter, whether this rank had a gradient in the last backward pass.
        used_anywhere: for each parameter, whether some rank had one since gradients were last dropped.
    """

    pieces: list[ParameterShard]

    def __init__(
        self,
        *,
        bucket: Bucket,
        partition: Partition,
        run: Run,
        group: Group,
        optimizer_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.bucket, self.partition, self.run, self.group = bucket, partition, run, group
        self.optimizer_dtype, self.reduce_dtype = optimizer_dtype, reduce_dtype
        self.used = [False] * len(bucket.parameters)
        self.used_anywhere = [False] * len(bucket.parameters)
        self._gradient: torch.Tensor | None = None
        self._visible: tuple[ShardedGrad, ...] = ()
        self._whole = _Whole()
        self._pending: Pending | None = None
        self._reduced: torch.Tensor | None = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.bucket.parameters

    @property
    @abstractmethod
    def has_masters(self) -> bool:
        """Whether the masters are memory of their own, beside the parameters."""

    def updated(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """What the optimizer updates, each with a parameter of the model in whose group it belongs."""
        return [(piece.parameter, piece.master) for piece in self.pieces]

    def before_update(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:  # noqa: B027  nothing to do
        """The optimizer is going to step. ``state`` is its own."""

    def after_update(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:  # noqa: B027  nothing to do
        """The optimizer has stepped."""

    def open(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> MutableMapping[Any, dict[str, Any]]:
        """The optimizer's state by the masters of pieces, which can be read and written until :meth:`close`."""
        return state

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> None:  # noqa: B027  nothing to do
        """Takes over what was written since :meth:`open`."""

    def gradient_parts(self, wanted: Collection[nn.Parameter]) -> list[GradientPart]:
        """This rank's pieces of the reduced gradients of the ``wanted`` parameters; they may be changed in place."""
        self.before_change()
        mine = {piece.place.parameter: piece for piece in self.pieces}
        parts = []
        for index, (parameter, record) in enumerate(zip(self.parameters, self.bucket.records, strict=True)):
            if parameter in wanted and self.used_anywhere[index]:
                piece = mine.get(index)
                parts.append(GradientPart(piece.grad if piece else None, self._axes_of(record), record.replicas))
        return parts

    def _axes_of(self, record: ParameterRecord) -> tuple[str, ...]:
        return (*record.axes, *self.run.mesh.gradient_axes)

    @abstractmethod
    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The parameters' values as they lie in the buffer, ``[partition.numel]``; None counts as zeros."""

    def _join_to_send(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The same in the dtype in which gradients travel."""
        return self._join(gradients)

    @abstractmethod
    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' values in a buffer, in their shapes."""

    @abstractmethod
    def _part(self, chunk: torch.Tensor, piece: ParameterShard) -> torch.Tensor:
        """A piece's own part of a chunk, which may be changed in place."""

    @abstractmethod
    def send_weights(self) -> Callable[[], None]:
        """Starts to gather the updated weights; what it returns finishes that."""

    def sync_user_weights(self) -> None:  # noqa: B027  nothing to do where parameters are no views
        """Takes over weights that a loop has put in the place of a parameter's own: ``parameter.data = ...``."""

    @abstractmethod
    def reload(self) -> None:
        """Takes the model's weights as the new masters, after somebody else has changed them."""

    # ---- gradients -------------------------------------------------------------------------------------------------
    def send_gradients(self) -> None:
        """Starts the reduce-scatter of the bucket's gradients and lets go of them."""
        gradients, kept = [], []
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None:
                check_dense(gradient, self.bucket.records[index])
            kept.append(self._is_visible(gradient))
            gradients.append(gradient.take_waiting() if isinstance(gradient, ShardedGrad) else gradient)
            parameter.grad = None
        self.before_change()
        self._forget_all_but(kept)
        self.used = [gradient is not None for gradient in gradients]
        self._pending = self.run.backend.start_reduce_scatter(self._join_to_send(gradients), self.group)

    def complete(self) -> None:
        """Waits for the reduce-scatter that is under way, if any."""
        if self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None

    def receive_gradients(self, used: Sequence[bool], scale: float, partial: Group) -> None:
        """Waits for the reduced gradients and hands each piece its own, added to what it has already.

        Args:
            used: for each parameter of the bucket, whether any rank had a gradient.
            scale: what the sum is multiplied by.
            partial: the group over which they still are partial sums.
        """
        gradient = self._scaled_sum(scale, partial)
        if self._gradient is not None:
            gradient = self._own_gradient() + gradient
            used = [a or b for a, b in zip(used, self.used_anywhere, strict=True)]
        self.used_anywhere = list(used)
        self._hand_out(gradient)
        self._show([index for index, is_used in enumerate(used) if is_used])

    def _scaled_sum(self, scale: float, partial: Group) -> torch.Tensor:
        """What was sent, reduced over all ranks, ``[partition.chunk]``, in the optimizer's dtype."""
        self.complete()
        assert self._reduced is not None
        gradient, self._reduced = self._reduced, None
        if partial.size > 1:
            gradient = self.run.backend.all_reduce(gradient, partial)
        return self._scaled(gradient.to(self.optimizer_dtype), scale)

    def _show(self, indices: Sequence[int]) -> None:
        """Lets these gradients be read at their parameters."""
        if not self._visible:
            self._visible = tuple(ShardedGrad(p, self, i) for i, p in enumerate(self.parameters))
        for index in indices:
            self.parameters[index].grad = self._visible[index]

    def _hand_out(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient
        self._whole.forget()
        for piece in self.pieces:
            piece.grad = self._part(gradient, piece) if self.used_anywhere[piece.place.parameter] else None

    @staticmethod
    def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
        return gradient.mul_(scale) if scale != 1.0 else gradient

    def drop_gradients(self) -> None:
        """Also those that can be read at the parameters."""
        self._gradient = None
        self._whole.forget()
        self.used_anywhere = [False] * len(self.parameters)
        for piece in self.pieces:
            piece.grad = None
        for parameter in self.parameters:
            if isinstance(parameter.grad, ShardedGrad):
                parameter.grad = None

    # ---- gradients as a loop sees them -------------------------------------------------------------------------------
    def sync_user_edits(self) -> None:
        """Takes over what a loop has done to the gradients that it sees: changed them, dropped or replaced some. What
        it puts in their place counts as reduced, as it does beside plain data parallelism."""
        self._take_edits()
        self._forget_all_but([p.grad is not None for p in self.parameters])
        given = [None if p.grad is None or self._is_visible(p.grad) else p.grad.detach() for p in self.parameters]
        indices = [index for index, gradient in enumerate(given) if gradient is not None]
        if not indices:
            return
        chunk = self.run.backend.chunk(self._join(given), self.group).to(self.optimizer_dtype)
        if self._gradient is None:
            own = torch.zeros_like(chunk)
        else:
            own = self._own_gradient()
        self.used_anywhere = [used or index in indices for index, used in enumerate(self.used_anywhere)]
        self._hand_out(own)
        for piece in self.pieces:
            if piece.grad is not None and piece.place.parameter in indices:
                piece.grad.copy_(self._part(chunk, piece))
        self._show(indices)

    def before_change(self) -> None:
        """The share is going to be changed in place, on every rank: what was gathered is out of date then."""
        self._take_edits()
        self._whole.forget()

    @property
    def has_unreduced(self) -> bool:
        """Whether some parameter has a gradient of this rank alone."""
        return any(p.grad is not None and not self._is_visible(p.grad) for p in self.parameters)

    def whole_gradient(self, index: int) -> torch.Tensor:
        """The reduced gradient of one parameter, in its shape and dtype; changing it changes the share. Collective.

        Raises:
            UsageError: if gradients have been dropped.
            DesyncError: if other ranks read another gradient.
        """
        if self._gradient is None or not self.used_anywhere[index]:
            raise UsageError(
                f"The gradient of {self.bucket.records[index].fqn!r} has been dropped.",
                where="`parameter.grad` under ZeRO-1, kept beyond `zero_grad`",
                why="it is gathered from all ranks when it is read",
                fix="read it before `zero_grad`, or keep a clone of it",
            )
        if not self._whole.parts:
            self._check_all_read(index)
            own = self._own_gradient().to(self.bucket.dtype)
            self._whole.hold(self._split(self.run.backend.all_gather(own, self.group)), own)
        return self._whole.parts[index]

    def zero_gradient(self, index: int) -> None:
        """Sets the share of one parameter's gradient to zero."""
        self.before_change()
        for piece in self.pieces:
            if piece.place.parameter == index and piece.grad is not None:
                piece.grad.zero_()

    def gather_gradients(self) -> list[torch.Tensor | None]:
        """The reduced gradients of the bucket's parameters, whole, in the optimizer's dtype; collective."""
        if self._gradient is None:
            return [None] * len(self.parameters)
        self.sync_user_edits()
        values = self._split(self.run.backend.all_gather(self._own_gradient(), self.group))
        return [value if used else None for value, used in zip(values, self.used_anywhere, strict=True)]

    def _is_visible(self, gradient: torch.Tensor | None) -> bool:
        return isinstance(gradient, ShardedGrad) and gradient.belongs_to(self)

    def _check_all_read(self, index: int) -> None:
        """Of another length than gradients, so that a rank that does something else cannot take it for one."""
        name = self.bucket.records[index].fqn
        everyone = self.run.backend.all_gather_object(name, self.group)
        if set(everyone) != {name}:
            raise DesyncError(
                f"Ranks read different gradients: {sorted(set(everyone))}.",
                where="`parameter.grad` under ZeRO-1",
                why="each rank has a share of them, and all of them gather a gradient that is read",
                fix="read the same gradients in the same order on every rank",
            )

    def _own_gradient(self) -> torch.Tensor:
        """The share as it is now, ``[partition.chunk]``."""
        assert self._gradient is not None
        return self._gradient

    def _take_edits(self) -> None:
        if not self._whole.is_edited():
            return
        own = self._own_gradient()
        edited, before = self.run.backend.chunk(self._join(self._whole.parts), self.group), self._whole.before
        assert before is not None
        # Where nothing was changed the share keeps the digits that the parameters' dtype does not have.
        merged = torch.where(edited == before, own, edited.to(own.dtype))
        self._hand_out(merged)

    def _forget_all_but(self, kept: Sequence[bool]) -> None:
        """Drops the gradients that the loop has dropped by setting ``parameter.grad``."""
        if self._gradient is None or all(k or not u for k, u in zip(kept, self.used_anywhere, strict=True)):
            return
        self._take_edits()
        self.used_anywhere = [u and k for u, k in zip(self.used_anywhere, kept, strict=True)]
        if not any(self.used_anywhere):
            self._gradient = None
            self._whole.forget()
        for piece in self.pieces:
            if piece.grad is not None and not self.used_anywhere[piece.place.parameter]:
                piece.grad.zero_()  # the memory may be a part of the share's
                piece.grad = None


class _Whole:
    """Gathered gradients of a bucket, while somebody may look at them or change them.

    Attributes:
        parts: of each parameter; empty if nothing was gathered.
        before: this rank's share as it was gathered.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.before: torch.Tensor | None = None
        self._versions: list[int] = []

    def hold(self, parts: list[torch.Tensor], before: torch.Tensor) -> None:
        self.parts, self.before = parts, before
        self._versions = [part._version for part in parts]

    def is_edited(self) -> bool:
        return any(p._version != v for p, v in zip(self.parts, self._versions, strict=True))
