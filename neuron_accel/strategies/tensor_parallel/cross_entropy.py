"""Cross entropy of logits that are divided along the vocabulary, without gathering them.

Each token's loss needs three numbers of all ranks: the largest logit, the sum of exponentials and the target's logit.
Source: Shoeybi et al. 2019, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary


def cross_entropy(
    local: torch.Tensor,
    target: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """What :func:`torch.nn.functional.cross_entropy` gives for the full logits; the same on every rank.

    Args:
        local: this rank's share of the logits, [tokens, vocabulary.local_size] or [vocabulary.local_size].
        target: the ids to predict, int64 of shape [tokens] or [].
        ignore_index: targets of this value count nothing.
        reduction: ``"mean"`` over the targets that count (NaN if there are none), ``"sum"`` or ``"none"``.
        label_smoothing: the weight of a uniform distribution over the vocabulary in the target, 0 to 1.

    Returns:
        float32, computed in float32; float64 for float64 logits.

    Raises:
        IndexError: if a target is not in the vocabulary, where the backend reads values for free.
        ValueError: for shapes that do not match, or an unknown reduction.
    """
    if local.shape[:-1] != target.shape:
        raise ValueError(f"logits of shape {(*local.shape[:-1], vocabulary.size)} and targets of {tuple(target.shape)}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    target = target.to(local.device)
    counts = target != ignore_index
    vocabulary.check(target[counts] if "host-reads" in vocabulary.backend.capabilities else target, "Target")
    losses = _CrossEntropy.apply(local, target, counts, vocabulary, label_smoothing)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total / counts.sum() if reduction == "mean" else total


class _CrossEntropy(torch.autograd.Function):
    """The loss of each token. Saves the softmax, the one tensor of the logits' size."""

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
        work = local.to(dtype, copy=True)  # everything below happens in this one copy
        if padding is not None:
            work.masked_fill_(padding, -torch.inf)
        work -= backend.all_reduce(work.amax(-1), group, "max").unsqueeze(-1)

        index = target - vocabulary.start(local.device)
        mine = (index >= 0) & (index < vocabulary.local_size)
        index = index.masked_fill(~mine, 0).unsqueeze(-1)
        parts = [work.gather(-1, index).squeeze(-1).masked_fill(~mine, 0)]
        if smoothing:
            parts.append((work if padding is None else work.masked_fill(padding, 0)).sum(-1))
        work.exp_()
        parts.append(work.sum(-1))
        of_target, *of_all, total = backend.all_reduce(torch.stack(parts), group).unbind(0)

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
        # not a product: the mean over no target has an infinite gradient, which does not concern ignored tokens
        gradient = gradient.masked_fill(~counts, 0).unsqueeze(-1)
        result = softmax * gradient
        hit = (1 - ctx.smoothing) * gradient.squeeze(-1).masked_fill(~mine, 0).unsqueeze(-1)
        result.scatter_add_(-1, index, -hit)
        if ctx.smoothing:
            uniform = ctx.smoothing / ctx.size * gradient
            result -= uniform if ctx.padding is None else uniform.expand_as(result).masked_fill(ctx.padding, 0)
        return result.to(ctx.dtype), None, None, None, None
