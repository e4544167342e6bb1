"""A vocabulary sharded over ranks: token ids, logits, their cross entropy, and local operations on logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from neuron_accel.contract import UsageError, gather_from_group
from neuron_accel.strategies.tensor_parallel import vocabulary as local_operations

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group


# ---- Sharded vocabulary and logits -----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The ids 0 to ``size`` - 1 in consecutive shards of equal length, of which the last may be padded.

    Args:
        size: number of ids.
        backend: performs the collectives.
        group: the ranks that hold the shards.
    """

    size: int
    backend: Backend
    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Vocabulary:
        return self  # a copied model communicates in the same group

    @property
    def local_size(self) -> int:
        """Number of ids in each shard, padding included."""
        return -(-self.size // self.group.size)

    @property
    def padded(self) -> bool:
        return self.local_size * self.group.size != self.size

    def start(self, device: torch.device) -> torch.Tensor:
        """Returns the first id of this rank's shard: int64, 0-dim, an input of a graph rather than a constant."""
        starts = torch.arange(0, self.local_size * self.group.size, self.local_size, device=device)
        return self.backend.chunk(starts, self.group, 0).squeeze(0)

    def padding(self, device: torch.device) -> torch.Tensor | None:
        """Returns which columns of this rank's shard are padding: bool of shape [local_size]; None if no rank has
        padding."""
        if not self.padded:
            return None
        return torch.arange(self.local_size, device=device) + self.start(device) >= self.size

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gathers shards [..., local_size] to the full [..., size] on every rank. Every rank must compute the same with
        it."""
        full = gather_from_group(local, self.backend, self.group, local.dim() - 1, grad="chunk")
        return full.narrow(-1, 0, self.size).contiguous() if self.padded else full

    def shard(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's shard [..., local_size] of ``full`` [..., size]; padding is zero. Not differentiable."""
        missing = self.local_size * self.group.size - self.size
        return self.backend.chunk(F.pad(full, (0, missing)) if missing else full, self.group, full.dim() - 1)

    def check(self, ids: torch.Tensor, what: str) -> None:
        """Checks that ids are in the vocabulary, on devices where reading values costs nothing.

        Raises:
            IndexError: if one is not, like an unsharded embedding or cross entropy.
        """
        if self.backend.reads_are_free and ids.numel():
            low, high = (int(value) for value in torch.aminmax(ids))
            if low < 0 or high >= self.size:
                raise IndexError(f"{what} {low if low < 0 else high} is out of bounds: there are {self.size}")


class VocabularyShard(torch.Tensor):
    """Logits [..., vocabulary] of which this rank holds a shard of the last dim.

    It has the shape of the full logits. Casts, scaling by a number, tanh, and views and slices that do not change the
    last dim are computed on the shard, and :func:`torch.nn.functional.cross_entropy` without gathering. Every other
    operation gathers the full logits first, which is collective over the group, and returns a plain tensor.
    :meth:`full_tensor` gathers explicitly.
    """

    _local: torch.Tensor
    _vocabulary: Vocabulary
    _full: torch.Tensor | None

    @staticmethod
    def of(local: torch.Tensor, vocabulary: Vocabulary, dtype: torch.dtype | None = None) -> VocabularyShard:
        """Creates logits from this rank's shard.

        Args:
            local: [..., vocabulary.local_size].
            dtype: the dtype of the logits, if not ``local``'s; they are cast when they are used.
        """
        shard = _Wrap.apply(local, vocabulary, dtype or local.dtype)
        shard._local, shard._vocabulary, shard._full = local, vocabulary, None
        return shard

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def uncast_local(self) -> torch.Tensor:
        """This rank's shard, before the pending cast; a plain tensor."""
        return self._local

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard [..., vocabulary.local_size], differentiable; a plain tensor."""
        return self.uncast_local.to(self.dtype)

    def full_tensor(self) -> torch.Tensor:
        """Returns the full logits as a plain tensor, differentiable. Collective; the result is cached."""
        wants_grad = self._local.requires_grad and torch.is_grad_enabled()
        if self._full is None or self._full.requires_grad != wants_grad:
            self._full = self._vocabulary.gather(self._local).to(self.dtype)
        return self._full

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # of Tensor, which is untyped
        # Does not gather, so that printing on one rank does not hang.
        return f"VocabularyShard(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.vocabulary.group.size})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if local_operations.is_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is F.cross_entropy:
            result = _parallel_cross_entropy(*args, **kwargs)
            if result is not None:
                return result
        if args and isinstance(args[0], VocabularyShard):
            local = local_operations.apply(func, args[0], args[1:], kwargs)
            if local is not None:
                return local
        name = getattr(func, "__name__", "")
        if name in ("__setitem__", "retain_grad", "register_hook") or (name.endswith("_") and name[-2:] != "__"):
            raise UsageError(
                f"{name} is not possible on logits that are sharded over ranks.",
                why="it would act on a gathered copy and be lost",
                fix="work on logits.full_tensor(), or use an operation that returns its result",
            )
        return func(*_gathered(args), **_gathered(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types what Tensor has, a disabled one
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Called by code that bypasses __torch_function__: custom autograd functions, collectives. Autograd, if any,
        # has recorded the operation on the shard itself, whose gradient then passes through _Wrap.
        return func(*_gathered(args, detach=True), **_gathered(kwargs or {}, detach=True))


class _Wrap(torch.autograd.Function):
    """Autograd node between the local tensor and a VocabularyShard, for operations that are recorded on the latter."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, vocabulary: Vocabulary, dtype: torch.dtype) -> torch.Tensor:
        ctx.vocabulary, ctx.dtype = vocabulary, local.dtype
        shape = (*local.shape[:-1], vocabulary.size)
        return torch.Tensor._make_wrapper_subclass(VocabularyShard, shape, dtype=dtype, device=local.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.vocabulary.shard(gradient).to(ctx.dtype), None, None


def _gathered(value: Any, detach: bool = False) -> Any:
    if isinstance(value, VocabularyShard):
        full = value.full_tensor()
        return full.detach() if detach else full
    if isinstance(value, (tuple, list)):
        return type(value)(_gathered(item, detach) for item in value)
    if isinstance(value, dict):
        return {key: _gathered(item, detach) for key, item in value.items()}
    return value


def _parallel_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Computes ``F.cross_entropy`` on sharded logits. Returns None if the full logits are needed: for class weights,
    class probabilities as targets, or classes that are not the last dim."""
    if not isinstance(input, VocabularyShard) or isinstance(target, VocabularyShard) or input.dim() > 2:
        return None
    if target.is_floating_point() or not (weight is size_average is reduce is None):
        return None
    return cross_entropy(
        input.uncast_local,
        target,
        input.vocabulary,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    ).to(input.dtype)


# ---- Cross entropy of sharded logits ---------------------------------------------------------------------------------
# Each token's loss needs three numbers of all ranks: the largest logit, the sum of exponentials and the target's
# logit. Source: Shoeybi et al. 2019, section 3.
def cross_entropy(
    local: torch.Tensor,
    target: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Computes :func:`torch.nn.functional.cross_entropy` of the full logits; the result is equal on every rank.

    Args:
        local: this rank's shard of the logits, [tokens, vocabulary.local_size] or [vocabulary.local_size].
        target: the ids to predict, int64 of shape [tokens] or [].
        ignore_index: targets of this value are ignored.
        reduction: ``"mean"`` over the targets that count (NaN if there are none), ``"sum"`` or ``"none"``.
        label_smoothing: the weight of a uniform distribution over the vocabulary in the target, 0 to 1.

    Returns:
        A tensor of dtype float32, computed in float32; float64 for float64 logits.

    Raises:
        IndexError: if a target is not in the vocabulary, on devices where reading values costs nothing.
        ValueError: for shapes that do not match, or an unknown reduction.
    """
    if local.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {(*local.shape[:-1], vocabulary.size)} and targets of {tuple(target.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    target = target.to(local.device)
    counts = target != ignore_index
    vocabulary.check(target[counts] if vocabulary.backend.reads_are_free else target, "Target")
    losses = _CrossEntropy.apply(local, target, counts, vocabulary, label_smoothing)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token. Saves the softmax, which is the only saved tensor of the size of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        local: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
        vocabulary: Vocabulary,
        smoothing: float,
    ) -> torch.Tensor:
        backend, group = vocabulary.backend, vocabulary.group
        padding = vocabulary.padding(local.device)
        dtype = torch.promote_types(local.dtype, torch.float32)
        work = local.to(dtype, copy=True)  # the only copy; everything below is computed in place
        if padding is not None:
            work.masked_fill_(padding, -torch.inf)
        work -= backend.all_reduce(work.amax(-1), group, "max").unsqueeze(-1)

        index = target - vocabulary.start(local.device)
        mine = (index >= 0) & (index < vocabulary.local_size)
        index = index.masked_fill(~mine, 0).unsqueeze(-1)
        terms = [work.gather(-1, index).squeeze(-1).masked_fill(~mine, 0)]
        if smoothing:
            terms.append((work if padding is None else work.masked_fill(padding, 0)).sum(-1))
        work.exp_()
        terms.append(work.sum(-1))
        of_target, *of_all, total = backend.all_reduce(torch.stack(terms), group).unbind(0)

        log_total = total.log()
        losses = log_total - of_target
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (log_total - of_all[0] / vocabulary.size)
        work /= total.unsqueeze(-1)
        ctx.save_for_backward(work, index, mine, counts)
        ctx.padding, ctx.dtype, ctx.smoothing, ctx.size = padding, local.dtype, smoothing, vocabulary.size
        return losses.masked_fill(~counts, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, index, mine, counts = ctx.saved_tensors
        # masked_fill instead of a product: the gradient is infinite if there are no targets, and must be 0 for ignored
        # ones.
        gradient = gradient.masked_fill(~counts, 0).unsqueeze(-1)
        result = softmax * gradient
        hit = (1 - ctx.smoothing) * gradient.squeeze(-1).masked_fill(~mine, 0).unsqueeze(-1)
        result.scatter_add_(-1, index, -hit)
        if ctx.smoothing:
            uniform = ctx.smoothing / ctx.size * gradient
            result -= uniform if ctx.padding is None else uniform.expand_as(result).masked_fill(ctx.padding, 0)
        return result.to(ctx.dtype), None, None, None, None


# ---- Local operations on sharded logits ------------------------------------------------------------------------------
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
    """Returns whether ``func`` only reads metadata that is equal for a shard and the full logits."""
    return func in _METADATA


def apply(
    func: Callable[..., Any], shard: VocabularyShard, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any | None:
    """Returns ``func(shard, *args, **kwargs)``, computed on this rank's shard; None if it needs the full logits."""
    if func in _CASTS and not args and not kwargs:
        return _cast(shard, _CASTS[func])
    if func is torch.Tensor.to and len(args) == 1 and not kwargs and isinstance(args[0], torch.dtype):
        return _cast(shard, args[0])
    if func in _ELEMENTWISE and _are_plain(args, kwargs):
        return _like(shard, func(shard.local, *args, **kwargs))
    if func in _SCALING and len(args) == 1 and not kwargs and _is_scale(args[0]):
        return _like(shard, func(shard.local, args[0]))
    # The following operations do not compute values, so a pending cast stays pending.
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
        return local  # the result of type() without an argument
    return type(shard).of(local, shard.vocabulary, dtype)


def _cast(shard: VocabularyShard, dtype: torch.dtype) -> VocabularyShard:
    # Upcasts are postponed until the values are used, so that less is gathered and the loss needs one copy less.
    if (shard.uncast_local.dtype, dtype) in _UPCASTS or dtype == shard.dtype:
        return type(shard).of(shard.uncast_local, shard.vocabulary, dtype)
    return type(shard).of(shard.local.to(dtype), shard.vocabulary)


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
