# SPDX-License-Identifier: Apache-2.0
"""``parameter.grad`` under ZeRO-1: a tensor that is gathered when it is read.

From the end of the backward pass until gradients are zeroed it is the reduced gradient, as with plain data parallelism.
It uses no memory and no communication until its values are read. Reading is collective: the ranks over which the
optimizer is sharded must read the same gradients in the same order. Changes that the user makes, in place or by
assigning a tensor or None, are applied before the optimizer steps. Changes in place are found by comparing values,
since writes through a view, ``.data`` or numpy do not increase a version counter.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from neuron_accel.engine.optim.norms import GradientPart
from neuron_accel.errors import DesyncError, UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group
    from neuron_accel.engine.optim.buckets import Bucket
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord
    from neuron_accel.engine.shards.partition import Span


class GradientSource(Protocol):
    """Holds a rank's shard of some gradients."""

    def full_gradient(self, index: int) -> torch.Tensor:
        """Returns the reduced gradient of one parameter, the same tensor until the shard changes. Collective."""

    def zero_gradient(self, index: int) -> None:
        """Sets the shard of one parameter's gradient to zero."""


class ShardedGrad(torch.Tensor):
    """The reduced gradient of ``parameter``, of which this rank has a shard.

    A backward pass that accumulates into it (in a loop that did not zero gradients) adds a gradient of this rank alone,
    which is kept separately until it is reduced and added to the shard.

    Args:
        parameter: the parameter, which has the same shape, dtype and device.
        source: gathers the gradient; a weak reference to it is kept, since parameters may live longer.
        index: index of the parameter in ``source``.
    """

    _source: weakref.ref[GradientSource]
    _index: int
    _waiting: torch.Tensor | None
    _shown: tuple[torch.Tensor, torch.Tensor] | None  # the sum that was read while a gradient waits, and a copy of it

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, source: GradientSource, index: int) -> ShardedGrad:
        self = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self._source, self._index, self._waiting, self._shown = weakref.ref(source), index, None, None
        return self

    def belongs_to(self, source: GradientSource) -> bool:
        return self._source() is source

    def take_waiting(self) -> torch.Tensor | None:
        """Returns and removes the gradient that backward passes on this rank have added since the reduction, or
        None."""
        self._take_edits()
        waiting, self._waiting = self._waiting, None
        return waiting

    def add_waiting(self, gradient: torch.Tensor) -> None:
        """Adds a gradient of this rank alone."""
        self._take_edits()
        self._waiting = gradient if self._waiting is None else self._waiting + gradient

    def _value(self) -> torch.Tensor:
        source = self._source()
        if source is None:
            raise UsageError(
                "This gradient is no longer available.",
                where="`parameter.grad` of a parameter whose optimizer is sharded",
                why="it is gathered from all ranks when it is read, and its optimizer no longer exists",
                fix="read it before the accelerator releases the optimizer, or keep a clone of it",
            )
        if self._waiting is None:
            return source.full_gradient(self._index)
        if self._shown is None:
            shown = source.full_gradient(self._index) + self._waiting
            self._shown = shown, shown.clone()
        return self._shown[0]

    def _take_edits(self) -> None:
        """Applies what the user has written to the sum of the reduced gradient and that of this rank to the latter."""
        shown, self._shown = self._shown, None
        if shown is not None and self._waiting is not None:
            new, old = shown
            self._waiting = torch.where(new == old, self._waiting, self._waiting + (new - old))

    # ---- a tensor like any other -------------------------------------------------------------------------------------
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types what Tensor has, a disabled one
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, cls):
            if function is torch.ops.aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
                first.add_waiting(args[1])  # autograd accumulates here; user code cannot run
                return first
            if function is torch.ops.aten.zero_.default:
                first._zero()
                return first
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize, False):  # views on a lazy device
            values, named = tree_map(lambda v: v._value() if isinstance(v, cls) else v, (args, kwargs or {}))
            result = function(*values, **named)
        return first if isinstance(first, cls) and result is values[0] else result

    def _zero(self) -> None:
        self._waiting = self._shown = None
        source = self._source()
        if source is not None:
            source.zero_gradient(self._index)

    # These read or write values without dispatch.
    @property
    def data(self) -> torch.Tensor:
        return self._value().detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.shape != self.shape:
            raise UsageError(
                f"A gradient of shape {tuple(self.shape)} cannot have the data of one of shape {tuple(value.shape)}.",
                where="`parameter.grad.data = ...` with a sharded optimizer",
                why="each rank keeps a shard of it, of a size that does not change",
                fix="assign a tensor of its shape, or assign `parameter.grad`",
            )
        self._value().copy_(value)

    def tolist(self) -> Any:
        """Gathers the gradient."""
        return self._value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Gathers the gradient."""
        return self._value().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._value().__array__(dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # of object, for torch untyped
        return repr(self._value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._value().clone()


@dataclass
class ParameterShard:
    """This rank's shard of one parameter, in the optimizer.

    Args:
        parameter: the model's parameter.
        place: its elements.
        master: the tensor that the optimizer updates, a view of the rank's chunk in the optimizer's dtype: ``[stop -
            start]``, or of the parameter's shape if that has no dims or shards are full parameters.
    """

    parameter: nn.Parameter
    place: Span
    master: nn.Parameter

    def __repr__(self) -> str:
        return f"<ParameterShard: elements {self.place.start} to {self.place.stop} of {self.parameter.numel()}>"

    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient of these elements."""
        return self.master.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.master.grad = value


class ReducedGradients(ABC):
    """This rank's shard of a bucket's reduced gradients, and the tensors ``parameter.grad`` that gather them.

    Args:
        bucket: the parameters.
        run: the run.
        group: the ranks over which optimizer state is sharded.
        optimizer_dtype: dtype of the shard.

    Attributes:
        pieces: the parameter shards of this rank.
        used_anywhere: for each parameter, whether any rank had a gradient since gradients were last dropped.
    """

    pieces: list[ParameterShard]

    def __init__(self, *, bucket: Bucket, run: Run, group: Group, optimizer_dtype: torch.dtype) -> None:
        self.bucket, self.run, self.group, self.optimizer_dtype = bucket, run, group, optimizer_dtype
        self.used_anywhere = [False] * len(bucket.parameters)
        self._gradient: torch.Tensor | None = None
        self._visible: tuple[ShardedGrad, ...] = ()
        self._gathered: list[torch.Tensor] = []  # the full gradient of each parameter, which the user may change

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.bucket.parameters

    @abstractmethod
    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Returns values of the parameters in the order of the buffer, ``[partition.numel]``; None for zeros."""

    @abstractmethod
    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns the values of the parameters in a buffer, in their shapes."""

    @abstractmethod
    def _part(self, chunk: torch.Tensor, piece: ParameterShard) -> torch.Tensor:
        """Returns the slice of a chunk that belongs to ``piece``, which may be changed in place."""

    # ---- the shard ---------------------------------------------------------------------------------------------------
    def gradient_parts(self, wanted: Collection[nn.Parameter]) -> list[GradientPart]:
        """Returns this rank's shards of the reduced gradients of the ``wanted`` parameters, which may be changed in
        place."""
        self.before_change()
        mine = {piece.place.parameter: piece for piece in self.pieces}
        parts = []
        for index, (parameter, record) in enumerate(zip(self.parameters, self.bucket.records, strict=True)):
            if parameter in wanted and self.used_anywhere[index]:
                piece = mine.get(index)
                parts.append(GradientPart(piece.grad if piece else None, self._axes_of(record), record.replicas))
        return parts

    def _axes_of(self, record: ParameterRecord) -> tuple[str, ...]:
        return (*record.axes, *self.bucket.reduction_axes)

    def _hand_out(self, gradient: torch.Tensor) -> None:
        """Sets the shard to ``gradient``, ``[partition.chunk]``, and the gradient of each parameter shard to its
        slice."""
        self._gradient = gradient
        self._gathered = []
        for piece in self.pieces:
            piece.grad = self._part(gradient, piece) if self.used_anywhere[piece.place.parameter] else None

    def drop_gradients(self) -> None:
        """Drops gradients, also ``parameter.grad``."""
        self._gradient = None
        self._gathered = []
        self.used_anywhere = [False] * len(self.parameters)
        for piece in self.pieces:
            piece.grad = None
        for parameter in self.parameters:
            if isinstance(parameter.grad, ShardedGrad):
                parameter.grad = None

    def zero_gradients(self) -> None:
        """Sets reduced gradients to zero, and drops gradients of this rank alone."""
        kept = [self._is_visible(parameter.grad) for parameter in self.parameters]
        self._forget_all_but(kept)
        if self._gradient is None:
            self.drop_gradients()
        else:
            self._gathered = []
            self._hand_out(self._gradient.zero_())
        for parameter in self.parameters:
            if self._gradient is not None and self._is_visible(parameter.grad):
                parameter.grad.take_waiting()  # type: ignore[union-attr]
            else:
                parameter.grad = None

    # ---- parameter.grad ----------------------------------------------------------------------------------------------
    def _show(self, indices: Sequence[int]) -> None:
        """Sets ``parameter.grad`` of these parameters."""
        if not self._visible:
            self._visible = tuple(ShardedGrad(p, self, i) for i, p in enumerate(self.parameters))
        for index in indices:
            self.parameters[index].grad = self._visible[index]

    def sync_user_edits(self) -> None:
        """Applies changes of the user: gradients that were changed in place, dropped or replaced. Replacements are
        treated as reduced, as with plain data parallelism."""
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
        """Must be called before the shard is changed in place, on every rank. Discards gathered gradients."""
        self._take_edits()
        self._gathered = []

    @property
    def has_unreduced(self) -> bool:
        """Whether a parameter has a gradient of this rank alone."""
        return any(p.grad is not None and not self._is_visible(p.grad) for p in self.parameters)

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
            self._gathered = self._split(self.run.backend.all_gather(own, self.group))
        return self._gathered[index]

    def zero_gradient(self, index: int) -> None:
        """Sets the shard of one parameter's gradient to zero."""
        self.before_change()
        for piece in self.pieces:
            if piece.place.parameter == index and piece.grad is not None:
                piece.grad.zero_()

    def gather_gradients(self) -> list[torch.Tensor | None]:
        """Returns the unsharded reduced gradients of the bucket's parameters, in the optimizer's dtype. Collective."""
        if self._gradient is None:
            return [None] * len(self.parameters)
        self.sync_user_edits()
        values = self._split(self.run.backend.all_gather(self._own_gradient(), self.group))
        return [value if used else None for value, used in zip(values, self.used_anywhere, strict=True)]

    def _is_visible(self, gradient: torch.Tensor | None) -> bool:
        return isinstance(gradient, ShardedGrad) and gradient.belongs_to(self)

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
        edited = self.run.backend.chunk(self._join(self._gathered), self.group)
        # Elements that were not changed keep the precision of the shard.
        self._hand_out(torch.where(edited == own.to(edited.dtype), own, edited.to(own.dtype)))

    def _forget_all_but(self, kept: Sequence[bool]) -> None:
        """Drops the gradients that the user has dropped by setting ``parameter.grad``."""
        if self._gradient is None or all(k or not u for k, u in zip(kept, self.used_anywhere, strict=True)):
            return
        self._take_edits()
        self.used_anywhere = [u and k for u, k in zip(self.used_anywhere, kept, strict=True)]
        if not any(self.used_anywhere):
            self._gradient = None
            self._gathered = []
        for piece in self.pieces:
            if piece.grad is not None and not self.used_anywhere[piece.place.parameter]:
                piece.grad.zero_()  # it may be a view of the shard
                piece.grad = None
