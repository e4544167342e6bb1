# SPDX-License-Identifier: Apache-2.0
"""Global norms and clipping of sharded gradients, with every element of the original parameters counted once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run


@dataclass(frozen=True)
class GradientPart:
    """A shard of a gradient on this rank.

    Args:
        tensor: the elements, in any shape; None if only other ranks hold elements of the gradient.
        axes: axes along which ranks hold other elements of the same gradient.
        replicas: number of ranks along these axes that hold the same elements.
    """

    tensor: torch.Tensor | None
    axes: tuple[str, ...]
    replicas: int = 1

    def __repr__(self) -> str:
        held = "elsewhere" if self.tensor is None else f"{tuple(self.tensor.shape)} of {self.tensor.dtype}"
        return f"<{type(self).__name__}: {held}, axes {self.axes}, replicas {self.replicas}>"


def unsharded_gradients(parameters: Iterable[torch.Tensor], run: Run) -> list[GradientPart]:
    """Returns the gradients ``parameter.grad`` of ``parameters`` as :class:`GradientPart` objects."""
    parts = []
    for parameter in parameters:
        if parameter.grad is not None:
            record = run.find_parameter(parameter)
            axes, replicas = (record.axes, record.replicas) if record else ((), 1)
            parts.append(GradientPart(parameter.grad, axes, replicas))
    return [*parts, *elsewhere(run)]


def elsewhere(run: Run, axes: Iterable[str] = ()) -> list[GradientPart]:
    """Returns an empty part for every gradient that only some ranks along an axis have, so that all ranks take part in
    the same reductions. ``axes`` are added to the axes of each part."""
    records = (record for model in run.models for record in model.parameters if record.holders)
    return [GradientPart(None, (*record.axes, *axes), record.replicas) for record in records]


def global_norm(parts: Iterable[GradientPart], run: Run, norm_type: float = 2.0) -> torch.Tensor:
    """Returns the ``norm_type``-norm over all parts of all ranks; 0-dim, float32, equal on every rank.

    Collective: every rank must pass the same gradients, with an empty part for those of which it holds no elements, so
    that all ranks take part in the same reductions.
    """
    by_axes: dict[tuple[str, ...], dict[int, list[torch.Tensor]]] = {}
    for part in parts:
        tensors = by_axes.setdefault(tuple(sorted(set(part.axes))), {}).setdefault(part.replicas, [])
        if part.tensor is not None:
            tensors.append(part.tensor)
    infinite = norm_type == float("inf")
    totals = []
    for axes in sorted(by_axes):
        total = _local(by_axes[axes], run, norm_type)
        group = run.group(*axes)
        if group.size > 1:
            total = run.backend.all_reduce(total, group, "max" if infinite else "sum")
        totals.append(total)
    if not totals:
        return torch.zeros((), device=run.device)
    stacked = torch.stack(totals)
    return stacked.max() if infinite else stacked.sum() ** (1.0 / norm_type)


def _local(by_replicas: dict[int, list[torch.Tensor]], run: Run, norm_type: float) -> torch.Tensor:
    """Returns the sum of p-th powers of this rank's elements, divided by the number of replicas; for the infinity norm,
    their maximum."""
    if norm_type == float("inf"):
        norms = [torch.linalg.vector_norm(t, norm_type) for tensors in by_replicas.values() for t in tensors]
        return torch.stack([n.float() for n in norms]).max() if norms else torch.zeros((), device=run.device)
    total = torch.zeros((), dtype=torch.float32, device=run.device)
    for replicas, tensors in by_replicas.items():
        if tensors and norm_type == 2 and run.backend.is_lazy:  # fewer operations to compile
            total = total + torch.stack([(t * t).sum() for t in map(_real, tensors)]).sum() / replicas
        elif tensors:
            each = torch.stack(torch._foreach_norm([_real(t) for t in tensors], norm_type))
            total = total + (each**norm_type).sum() / replicas
    return total


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns real numbers of the same norm, in float32."""
    return (tensor.abs() if tensor.is_complex() else tensor).float()


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns the factor that reduces the norm of gradients to at most ``max_norm``; 0-dim. Uses the same small
    constant as :func:`torch.nn.utils.clip_grad_norm_`."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def clip_by_norm(parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, run: Run) -> torch.Tensor:
    """Scales reduced gradients ``parameter.grad`` in place, so that their global norm is at most ``max_norm``. For
    owners of gradient clipping that keep gradients at their parameters. Collective.

    Args:
        parameters: parameters of prepared models, sharded or not; the same on every rank that holds them.
        max_norm: the maximum norm.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
        run: the run.

    Returns:
        The norm before clipping, with every element of the original parameters counted once; 0-dim, float32, equal on
        every rank.
    """
    norm = global_norm(unsharded_gradients(parameters, run), run, norm_type)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, clip_coefficient(norm, max_norm).to(gradients[0].device))
    return norm


def clip_by_value(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamps reduced gradients ``parameter.grad`` to ``[-clip_value, clip_value]``, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.clamp_(-clip_value, clip_value)
