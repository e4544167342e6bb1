"""A vocabulary divided over ranks: which ids a rank has, and logits of which each rank holds a share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from neuron_accel.backends.autograd import gather_from_group
from neuron_accel.engine.errors import UsageError
from neuron_accel.strategies.tensor_parallel import local_operations
from neuron_accel.strategies.tensor_parallel.cross_entropy import cross_entropy

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend, Group


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The ids 0 to ``size`` - 1, in consecutive parts of equal length; the last parts are padded.

    Args:
        size: number of ids.
        backend: performs the collectives.
        group: the ranks that hold the parts.
    """

    size: int
    backend: Backend
    group: Group

    def __deepcopy__(self, memo: dict[int, Any]) -> Vocabulary:
        return self  # a copied model runs on the same ranks

    @property
    def local_size(self) -> int:
        """Number of ids in each part, padding included."""
        return -(-self.size // self.group.size)

    @property
    def padded(self) -> bool:
        return self.local_size * self.group.size != self.size

    def start(self, device: torch.device) -> torch.Tensor:
        """The first id of this rank's part: int64, 0-dim, data rather than a constant of the program."""
        starts = torch.arange(0, self.local_size * self.group.size, self.local_size, device=device)
        return self.backend.chunk(starts, self.group, 0).squeeze(0)

    def padding(self, device: torch.device) -> torch.Tensor | None:
        """Which columns of this rank's part are padding: bool of shape [local_size]; None if no rank has any."""
        if not self.padded:
            return None
        return torch.arange(self.local_size, device=device) + self.start(device) >= self.size

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """[..., local_size] to the full [..., size] on every rank. What follows must compute the same on every rank."""
        full = gather_from_group(local, self.backend, self.group, local.dim() - 1, grad="chunk")
        return full.narrow(-1, 0, self.size).contiguous() if self.padded else full

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part [..., local_size] of ``full`` [..., size]; padding is zero. Not differentiable."""
        missing = self.local_size * self.group.size - self.size
        return self.backend.chunk(F.pad(full, (0, missing)) if missing else full, self.group, full.dim() - 1)

    def check(self, ids: torch.Tensor, what: str) -> None:
        """Refuses ids that are not in the vocabulary, where looking at them is free.

        Raises:
            IndexError: as a whole embedding or cross entropy would.
        """
        if "host-reads" in self.backend.capabilities and ids.numel():
            low, high = (int(value) for value in torch.aminmax(ids))
            if low < 0 or high >= self.size:
                raise IndexError(f"{what} {low if low < 0 else high} is out of bounds: there are {self.size}")


class VocabularyShard(torch.Tensor):
    """Logits [..., vocabulary] of which this rank holds a share of the last dim.

    It looks like the full logits. Casts, scaling by a number, tanh, and views and slices that leave the last dim alone
    stay on the share; :func:`torch.nn.functional.cross_entropy` is computed without gathering; every other operation
    gathers the full logits first, a collective that all ranks of the group must take part in, and goes on with a plain
    tensor. :meth:`full_tensor` does so explicitly.
    """

    _local: torch.Tensor
    _vocabulary: Vocabulary
    _full: torch.Tensor | None

    @staticmethod
    def of(local: torch.Tensor, vocabulary: Vocabulary, dtype: torch.dtype | None = None) -> VocabularyShard:
        """Logits from this rank's share of them.

        Args:
            local: [..., vocabulary.local_size].
            dtype: what the logits are to look like, if not ``local``'s; the cast is made when they are used.
        """
        shard = _Wrap.apply(local, vocabulary, dtype or local.dtype)
        shard._local, shard._vocabulary, shard._full = local, vocabulary, None
        return shard

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def uncast_local(self) -> torch.Tensor:
        """This rank's share, before the cast that is still due; a plain tensor."""
        return self._local

    @property
    def local(self) -> torch.Tensor:
        """This rank's share [..., vocabulary.local_size], differentiable; a plain tensor."""
        return self.uncast_local.to(self.dtype)

    def full_tensor(self) -> torch.Tensor:
        """The full logits as a plain tensor, differentiable. Collective; gathered once."""
        wants_grad = self._local.requires_grad and torch.is_grad_enabled()
        if self._full is None or self._full.requires_grad != wants_grad:
            self._full = self._vocabulary.gather(self._local).to(self.dtype)
        return self._full

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        # gathers nothing: a debugger or a log line of one rank must not hang
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
                f"{name} is not possible on logits that are divided over ranks.",
                why="it would act on a gathered copy and be lost",
                fix="work on logits.full_tensor(), or use an operation that returns its result",
            )
        return func(*_gathered(args), **_gathered(kwargs))

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached by what does not ask __torch_function__: custom autograd functions, collectives. Autograd, if any, has
        # recorded the operation on the shard itself, whose gradient then finds its way through _Wrap.
        return func(*_gathered(args, detach=True), **_gathered(kwargs or {}, detach=True))


class _Wrap(torch.autograd.Function):
    """The node between this rank's share and a shard, for operations that autograd records on the shard itself."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, vocabulary: Vocabulary, dtype: torch.dtype) -> torch.Tensor:
        ctx.vocabulary, ctx.dtype = vocabulary, local.dtype
        shape = (*local.shape[:-1], vocabulary.size)
        return torch.Tensor._make_wrapper_subclass(VocabularyShard, shape, dtype=dtype, device=local.device)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.vocabulary.part(gradient).to(ctx.dtype), None, None


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
    """``F.cross_entropy`` on a share of the logits; None where it has to be computed on the full ones: class weights,
    class probabilities as targets, classes that are not the last dim."""
    plain = (
        isinstance(input, VocabularyShard)
        and not isinstance(target, VocabularyShard)
        and input.dim() <= 2
        and weight is None
        and size_average is None
        and reduce is None
        and not target.is_floating_point()
    )
    if not plain:
        return None
    return cross_entropy(
        input.uncast_local,
        target,
        input.vocabulary,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    ).to(input.dtype)
