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
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from neuron_accel.errors import UsageError


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
