"""Operations on divided logits that need no other rank's share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from neuron_accel.strategies.tensor_parallel.vocabulary import VocabularyShard

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
_SAME = frozenset({torch.Tensor.detach, torch.detach, torch.Tensor.contiguous})
_VIEWS = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.reshape})
_FLATTEN = frozenset({torch.Tensor.flatten, torch.flatten})
_UPCASTS = frozenset({(torch.bfloat16, torch.float32), (torch.float16, torch.float32)})


def is_metadata(func: Callable[..., Any]) -> bool:
    """Whether ``func`` asks only for what a shard shares with the full logits."""
    return func in _METADATA


def apply(
    func: Callable[..., Any], shard: VocabularyShard, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any | None:
    """``func(shard, *args, **kwargs)`` computed on this rank's share; None if that takes the full logits."""
    if func in _CASTS and not args and not kwargs:
        return _cast(shard, _CASTS[func])
    if func is torch.Tensor.to and len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return _cast(shard, args[0])
    if func in _ELEMENTWISE and _are_plain(args, kwargs):
        return _like(shard, func(shard.local, *args, **kwargs))
    if func in _SCALING and len(args) == 1 and not kwargs and _is_scale(args[0]):
        return _like(shard, func(shard.local, args[0]))
    # The rest moves no value, so a cast that is due can wait until after it.
    if func in _SAME and not args and not kwargs:
        return _like(shard, func(shard.uncast_local), shard.dtype)
    if func is torch.Tensor.__getitem__ and _keeps_last_dim(args[0], shard.dim()):
        return _like(shard, shard.uncast_local[args[0]], shard.dtype)
    shape = _new_shape(func, tuple(shard.shape), args, kwargs)
    if shape is not None:
        local = shard.uncast_local.reshape(*shape[:-1], shard.vocabulary.local_size)
        return _like(shard, local, shard.dtype)
    return None


def _like(shard: VocabularyShard, local: Any, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(local, torch.Tensor):
        return local  # what type() without an argument returns
    return type(shard).of(local, shard.vocabulary, dtype)


def _cast(shard: VocabularyShard, dtype: torch.dtype) -> VocabularyShard:
    # Casting up is put off until the values are used: gathering then moves less, and the loss needs one copy less.
    if (shard.uncast_local.dtype, dtype) in _UPCASTS or dtype == shard.dtype:
        return type(shard).of(shard.uncast_local, shard.vocabulary, dtype)
    return type(shard).of(shard.local.to(dtype), shard.vocabulary)


def _are_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # moved to another device, or given another order in memory, it would no longer be what the backend works on
    refused = (torch.Tensor, torch.device, str, torch.memory_format)
    return not any(isinstance(value, refused) for value in (*args, *kwargs.values()))


def _is_scale(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return type(value) is torch.Tensor and value.dim() == 0 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _keeps_last_dim(index: Any, ndim: int) -> bool:
    """Whether indexing leaves the last dim whole, and last."""
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
    """Number of dims that one item of an index stands for."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
        return item.dim()
    return 1


def _new_shape(
    func: Callable[..., Any], old: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...] | None:
    """The shape that a view has, if its last dim is still the vocabulary; None otherwise."""
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
