"""What ``parameter.grad`` is once ZeRO-1 has divided the gradient: a tensor that is gathered when somebody reads it.

To a loop it is the reduced gradient, as it would be under plain data parallelism, from the end of the backward pass
until gradients are zeroed. It takes no memory and costs no message until its values are asked for. Asking is
collective: the ranks that divide the optimizer read the same gradients in the same order. What a loop changes in it,
in place, is what the optimizer sees; so is the tensor, or None, that a loop puts in its place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from neuron_accel.contract import UsageError


class GradientSource(Protocol):
    """Who holds a rank's share of some gradients."""

    def whole_gradient(self, index: int) -> torch.Tensor:
        """The reduced gradient of one parameter; the same memory until the share changes. Collective."""

    def zero_gradient(self, index: int) -> None:
        """Sets the share of one parameter's gradient to zero."""


class ShardedGrad(torch.Tensor):
    """The reduced gradient of ``parameter``, of which this rank has a share.

    A backward pass that meets it (a loop that did not zero gradients) adds to it what this rank alone has; that waits
    here until it is reduced and added to the share.

    Args:
        parameter: whose shape, dtype and device it has.
        source: who gathers it; referred to weakly, since parameters may live longer.
        index: the parameter's index there.
    """

    _source: weakref.ref[GradientSource]
    _index: int
    _waiting: torch.Tensor | None

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, source: GradientSource, index: int) -> ShardedGrad:
        self = torch.Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=parameter.dtype, device=parameter.device)
        self._source, self._index, self._waiting = weakref.ref(source), index, None
        return self

    def belongs_to(self, source: GradientSource) -> bool:
        return self._source() is source

    def take_waiting(self) -> torch.Tensor | None:
        """What backward passes have added on this rank since the gradient was reduced, if they have; no longer here
        then."""
        waiting, self._waiting = self._waiting, None
        return waiting

    def _add_waiting(self, gradient: torch.Tensor) -> None:
        self._waiting = gradient if self._waiting is None else self._waiting + gradient

    def _value(self) -> torch.Tensor:
        source = self._source()
        if source is None:
            raise UsageError(
                "This gradient is gone.",
                where="`parameter.grad` of a parameter under ZeRO-1",
                why="it is gathered from all ranks when it is read, and its optimizer exists no more",
                fix="read it before the accelerator lets go of the optimizer, or keep a clone of it",
            )
        whole = source.whole_gradient(self._index)
        return whole if self._waiting is None else whole + self._waiting

    # ---- a tensor like any other -----------------------------------------------------------------------------------
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, cls):
            if function is torch.ops.aten.add_.Tensor and torch._C._current_graph_task_id() != -1:
                first._add_waiting(args[1])  # autograd accumulates; a loop cannot call anything meanwhile
                return first
            if function is torch.ops.aten.zero_.default:
                first._zero()
                return first
            if function._schema.is_mutable and first._waiting is not None:
                raise UsageError(
                    "A gradient cannot be changed in place between micro-batches.",
                    where="`parameter.grad` of a parameter under ZeRO-1",
                    why="a part of it is this rank's alone and waits to be summed over ranks",
                    fix="change it after the last micro-batch, or zero gradients after every step",
                )
        values, named = tree_map(lambda v: v._value() if isinstance(v, cls) else v, (args, kwargs or {}))
        result = function(*values, **named)
        if function._schema.is_mutable:  # below autograd, where nobody counts versions
            read = zip(tree_leaves((args, kwargs or {})), tree_leaves((values, named)), strict=True)
            torch.autograd.graph.increment_version([value for given, value in read if isinstance(given, cls)])
        return first if isinstance(first, cls) and result is values[0] else result

    def _zero(self) -> None:
        self._waiting = None
        source = self._source()
        if source is not None:
            source.zero_gradient(self._index)

    # Python's own access to values goes past dispatch.
    def tolist(self) -> Any:
        return self._value().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._value().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._value().__array__(dtype)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return repr(self._value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._value().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._value().clone()
