# SPDX-License-Identifier: Apache-2.0
"""Logits that a rank does not hold as such: a tensor class for strategies that never form the full logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


class LogitsTensor(torch.Tensor):
    """Logits [..., vocabulary] of which a rank holds something else: a shard, or the hidden states they are computed
    from.

    It has the shape and dtype of the full logits. Casts, scaling by a number, tanh, and views and slices that keep the
    last dim return the same class, and :func:`torch.nn.functional.cross_entropy` with ids as targets is that of the
    class. Every other operation acts on :meth:`full_tensor` and returns a plain tensor.

    Subclasses implement :meth:`with_held`, :meth:`mapped`, :meth:`full_tensor` and :meth:`cross_entropy`. They create
    instances by ``torch.Tensor._make_wrapper_subclass`` and set ``held``. A head that can return them has a method
    ``logits_for_loss(hidden)``, which is called where only a cross entropy of its logits is needed.
    """

    held: torch.Tensor
    """What the rank holds: [..., n], all dims but the last as in the logits; a plain tensor."""

    def with_held(self, held: torch.Tensor) -> Self:
        """Returns logits of the same dtype that hold ``held`` [..., n], a view or a selection of this ``held``."""
        raise NotImplementedError

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Returns the logits with an element-wise function applied to them, which may change their dtype."""
        raise NotImplementedError

    def full_tensor(self) -> torch.Tensor:
        """Returns the full logits as a plain tensor, differentiable. May be collective."""
        raise NotImplementedError

    def cross_entropy(
        self, target: torch.Tensor, *, ignore_index: int, reduction: str, label_smoothing: float
    ) -> torch.Tensor:
        """Computes :func:`torch.nn.functional.cross_entropy` without the full logits, which have one or two dims.

        Args:
            target: the ids to predict, int64 of shape [tokens] or [].
        """
        raise NotImplementedError

    def detached(self) -> Self:
        """Returns the logits without their history."""
        return self.with_held(self.held.detach())

    def cast(self, dtype: torch.dtype) -> Self:
        """Returns the logits in another dtype."""
        return self if dtype == self.dtype else self.mapped(lambda logits: logits.to(dtype))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # of Tensor, which is untyped
        # Does not compute the logits, so that printing on one rank does not hang.
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.cross_entropy:
            result = _cross_entropy(*args, **kwargs)
            if result is not None:
                return result
        if args and isinstance(args[0], LogitsTensor):
            result = _apply(func, args[0], args[1:], kwargs)
            if result is not None:
                return result
        name = getattr(func, "__name__", "")
        if name in ("__setitem__", "retain_grad", "register_hook") or (name.endswith("_") and name[-2:] != "__"):
            raise UsageError(
                f"{name} is not possible on logits that this rank does not hold in full.",
                why="it would act on a temporary tensor and be lost",
                fix="work on logits.full_tensor(), or use an operation that returns its result",
            )
        return func(*_full(args), **_full(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types what Tensor has, a disabled one
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called by code that bypasses __torch_function__: custom autograd functions, collectives. Autograd, if any,
        # has recorded the operation on this tensor itself.
        return func(*_full(args, detach=True), **_full(kwargs or {}, detach=True))


def _full(value: Any, detach: bool = False) -> Any:
    if isinstance(value, LogitsTensor):
        full = value.full_tensor()
        return full.detach() if detach else full
    if isinstance(value, (tuple, list)):
        return type(value)(_full(item, detach) for item in value)
    if isinstance(value, dict):
        return {key: _full(item, detach) for key, item in value.items()}
    return value


def _cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Computes ``F.cross_entropy``. Returns None if the full logits are needed: for class weights, class probabilities
    as targets, or classes that are not the last dim."""
    if not isinstance(input, LogitsTensor) or isinstance(target, LogitsTensor) or input.dim() > 2:
        return None
    if target.is_floating_point() or not (weight is size_average is reduce is None):
        return None
    if input.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {tuple(input.shape)} and targets of {tuple(target.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return input.cross_entropy(target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


# ---- operations that need no full logits -----------------------------------------------------------------------------
_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "names", "itemsize", "nbytes",
    "is_cuda", "is_cpu", "is_meta", "is_xla", "is_sparse", "is_quantized", "is_mkldnn", "is_mps", "is_nested",
    "output_nr", "_version", "_backward_hooks",
)  # fmt: skip
_QUERIES = (
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed",
    "is_contiguous", "stride", "storage_offset", "get_device", "is_inference", "__len__", "__hash__", "__repr__",
)  # fmt: skip
_METADATA = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)),
        *(getattr(torch.Tensor, name) for name in _QUERIES),
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    }
)
"""What only reads metadata, which is that of the full logits."""

_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}
_ELEMENTWISE = frozenset({
    torch.Tensor.to, torch.Tensor.type, torch.Tensor.clone, torch.clone, torch.Tensor.tanh, torch.tanh,
    torch.Tensor.neg, torch.neg, torch.Tensor.__neg__,
})  # fmt: skip
_SCALING = frozenset({
    torch.Tensor.mul, torch.mul, torch.Tensor.multiply, torch.multiply, torch.Tensor.__mul__, torch.Tensor.__rmul__,
    torch.Tensor.div, torch.div, torch.Tensor.divide, torch.divide, torch.Tensor.true_divide, torch.true_divide,
    torch.Tensor.__truediv__,
})  # fmt: skip
_DETACH = frozenset({torch.Tensor.detach, torch.detach})
_VIEWS = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.reshape})
_FLATTEN = frozenset({torch.Tensor.flatten, torch.flatten})


def _apply(func: Callable[..., Any], logits: LogitsTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """Returns ``func(logits, *args, **kwargs)``; None if it needs the full logits."""
    if func in _CASTS and not args and not kwargs:
        return logits.cast(_CASTS[func])
    if func is torch.Tensor.to and len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return logits.cast(args[0])
    if func is torch.Tensor.type and not args and not kwargs:
        return func(logits.held.to(logits.dtype))  # the name of a type
    if func in _ELEMENTWISE and _are_plain(args, kwargs):
        return logits.mapped(lambda values: func(values, *args, **kwargs))
    if func in _SCALING and len(args) == 1 and not kwargs and _is_scale(args[0]):
        return logits.mapped(lambda values: func(values, args[0]))
    if func in _DETACH:
        return logits.detached()
    if func is torch.Tensor.contiguous and not args and not kwargs:
        return logits.with_held(logits.held.contiguous())
    if func is torch.Tensor.__getitem__ and _keeps_last_dim(args[0], logits.dim()):
        return logits.with_held(logits.held[args[0]])
    shape = _new_shape(func, tuple(logits.shape), args, kwargs)
    return None if shape is None else logits.with_held(logits.held.reshape(*shape[:-1], logits.held.shape[-1]))


def _are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # The backend requires the device and a contiguous memory format.
    refused = (torch.Tensor, torch.device, str, torch.memory_format)
    return not any(isinstance(value, refused) for value in (*args, *kwargs.values()))


def _is_scale(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keeps_last_dim(index: Any, ndim: int) -> bool:
    """Returns whether indexing keeps the last dim complete and in last place."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(_is_simple(item) for item in items):
        return False
    consumed = sum(_consumes(item) for item in items)
    dots = next((position for position, item in enumerate(items) if item is Ellipsis), None)
    if dots is None and consumed < ndim:
        return True
    tail = items if dots is None else items[dots + 1 :]
    if not tail:
        return consumed < ndim
    return isinstance(tail[-1], slice) and tail[-1] == slice(None)


def _is_simple(item: Any) -> bool:
    if isinstance(item, torch.Tensor):
        return type(item) is torch.Tensor
    return item is None or item is Ellipsis or (isinstance(item, (int, slice)) and not isinstance(item, bool))


def _consumes(item: Any) -> int:
    """Returns the number of dims that one item of an index consumes."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _new_shape(
    func: Callable[..., Any], old: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...] | None:
    """Returns the shape of a view if its last dim is still the vocabulary; None otherwise."""
    if func in _FLATTEN:
        start = (args[0] if args else kwargs.get("start_dim", 0)) % len(old)
        end = (args[1] if len(args) > 1 else kwargs.get("end_dim", -1)) % len(old)
        if end == len(old) - 1:
            return None
        return (*old[:start], math.prod(old[start : end + 1]), *old[end + 1 :])
    if func not in _VIEWS or kwargs or not args:
        return None
    shape = tuple(args[0]) if isinstance(args[0], (tuple, list)) else args
    if not all(isinstance(size, int) for size in shape):
        return None
    total, known = math.prod(old), -math.prod(shape)
    if known > 0 and total % known == 0:  # exactly one size is -1: the product is negative
        shape = tuple(total // known if size == -1 else size for size in shape)
    fits = bool(shape) and min(shape) >= 0 and math.prod(shape) == total
    return shape if fits and shape[-1] == old[-1] else None
