# SPDX-License-Identifier: Apache-2.0
"""A vocabulary sharded over ranks: token ids, logits, their cross entropy, and local operations on logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from neuron_accel.contract import LogitsTensor, gather_from_group

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group


_UPCASTS = frozenset({(torch.bfloat16, torch.float32), (torch.float16, torch.float32)})


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


class VocabularyShard(LogitsTensor):
    """Logits [..., vocabulary] of which this rank holds a shard of the last dim, ``held`` [..., vocabulary.local_size].

    Operations that need the full logits gather them first, which is collective over the group. :meth:`full_tensor`
    gathers explicitly.
    """

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
        shard.held, shard._vocabulary, shard._full = local, vocabulary, None
        return shard

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    def with_held(self, held: torch.Tensor) -> VocabularyShard:
        return self.of(held, self.vocabulary, self.dtype)

    def mapped(self, function: Callable[[torch.Tensor], torch.Tensor]) -> VocabularyShard:
        return self.of(function(self.held.to(self.dtype)), self.vocabulary)

    def cast(self, dtype: torch.dtype) -> VocabularyShard:
        # Upcasts are postponed until the values are used, so that less is gathered and the loss needs one copy less.
        if (self.held.dtype, dtype) in _UPCASTS or dtype == self.dtype:
            return self.of(self.held, self.vocabulary, dtype)
        return self.mapped(lambda local: local.to(dtype))

    def full_tensor(self) -> torch.Tensor:
        """Returns the full logits as a plain tensor, differentiable. Collective; the result is cached."""
        wants_grad = self.held.requires_grad and torch.is_grad_enabled()
        if self._full is None or self._full.requires_grad != wants_grad:
            self._full = self._vocabulary.gather(self.held).to(self.dtype)
        return self._full

    def cross_entropy(
        self, target: torch.Tensor, *, ignore_index: int, reduction: str, label_smoothing: float
    ) -> torch.Tensor:
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        loss = cross_entropy(self.held, target, self.vocabulary, label_smoothing=label_smoothing, **options)
        return loss.to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # of Tensor, which is untyped
        return f"VocabularyShard(shape={tuple(self.shape)}, dtype={self.dtype}, of {self.vocabulary.group.size})"


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
    """
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
        inside = (index >= 0) & (index < vocabulary.local_size)
        index = index.masked_fill(~inside, 0).unsqueeze(-1)
        terms = [work.gather(-1, index).squeeze(-1).masked_fill(~inside, 0)]
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
        ctx.save_for_backward(work, index, inside, counts)
        ctx.padding, ctx.dtype, ctx.smoothing, ctx.size = padding, local.dtype, smoothing, vocabulary.size
        return losses.masked_fill(~counts, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        softmax, index, inside, counts = ctx.saved_tensors
        # masked_fill instead of a product: the gradient is infinite if there are no targets, and must be 0 for ignored
        # ones.
        gradient = gradient.masked_fill(~counts, 0).unsqueeze(-1)
        result = softmax * gradient
        hit = (1 - ctx.smoothing) * gradient.squeeze(-1).masked_fill(~inside, 0).unsqueeze(-1)
        result.scatter_add_(-1, index, -hit)
        if ctx.smoothing:
            uniform = ctx.smoothing / ctx.size * gradient
            result -= uniform if ctx.padding is None else uniform.expand_as(result).masked_fill(ctx.padding, 0)
        return result.to(ctx.dtype), None, None, None, None
