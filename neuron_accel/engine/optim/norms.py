# SPDX-License-Identifier: Apache-2.0
"""Global norms and clipping of sharded gradients, with every element of the original parameters counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from neuron_accel.engine.runtime.join import Ranks

if TYPE_CHECKING:
    from neuron_accel.engine.sharding.parameters import ParameterRecord


class Run(Ranks, Protocol):
    """What is used of a run."""

    device: torch.device
    models: list[Any]

    def find_parameter(self, parameter: torch.Tensor) -> ParameterRecord | None: ...


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


def gradient_parts(
    parameters: Iterable[torch.Tensor], run: Run, values: Mapping[torch.Tensor, torch.Tensor] | None = None
) -> list[GradientPart]:
    """Returns what this rank has of the gradients of ``parameters``, in :func:`global_norm`'s terms.

    Args:
        parameters: parameters of prepared models, sharded or not; the same on every rank that holds them.
        run: the run.
        values: what this rank has of each, if that is not ``parameter.grad``.
    """
    parts = []
    for parameter in parameters:
        value = parameter.grad if values is None else values.get(parameter)
        if value is not None:
            record = run.find_parameter(parameter)
            axes, replicas = (record.axes, record.replicas) if record else ((), 1)
            parts.append(GradientPart(value, axes, replicas))
    return [*parts, *parts_of_others(run)]


def parts_of_others(run: Run, axes: Iterable[str] = ()) -> list[GradientPart]:
    """Returns an empty part for every gradient that only some ranks along an axis have, so that all ranks take part in
    the same reductions. ``axes`` are added to the axes of each part."""
    records = (record for model in run.models for record in model.parameters if record.holders)
    return [GradientPart(None, (*record.axes, *axes), record.replicas) for record in records]


def global_norm(parts: Iterable[GradientPart], run: Run, norm_type: float = 2.0) -> torch.Tensor:
    """Returns the ``norm_type``-norm over all parts of all ranks; 0-dim, equal on every rank, float32, or float64 if a
    prepared model has such parameters.

    Collective: every rank must pass the same gradients, with an empty part for those of which it holds no elements, so
    that all ranks take part in the same reductions.
    """
    by_axes: dict[tuple[str, ...], dict[int, list[torch.Tensor]]] = {}
    for part in parts:
        tensors = by_axes.setdefault(tuple(sorted(set(part.axes))), {}).setdefault(part.replicas, [])
        if part.tensor is not None:
            tensors.append(part.tensor)
    infinite = norm_type == float("inf")
    # Known on ranks that hold no elements, too.
    wide = "float64" in {record.layout.dtype for model in run.models for record in model.parameters}
    totals, dtype = [], torch.float64 if wide else torch.float32
    for axes in sorted(by_axes):
        total = _local(by_axes[axes], run, norm_type, dtype)
        group = run.group(*axes)
        if group.size > 1:
            total = run.backend.all_reduce(total, group, "max" if infinite else "sum")
        totals.append(total)
    if not totals:
        return torch.zeros((), dtype=dtype, device=run.device)
    stacked = torch.stack(totals)
    return stacked.max() if infinite else stacked.sum() ** (1.0 / norm_type)


def _local(by_replicas: dict[int, list[torch.Tensor]], run: Run, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns the sum of p-th powers of this rank's elements, divided by the number of replicas; for the infinity norm,
    their maximum."""
    if norm_type == float("inf"):
        norms = [torch.linalg.vector_norm(t, norm_type) for tensors in by_replicas.values() for t in tensors]
        zero = torch.zeros((), dtype=dtype, device=run.device)
        return torch.stack([n.to(dtype) for n in norms]).max() if norms else zero
    total = torch.zeros((), dtype=dtype, device=run.device)
    for replicas, tensors in by_replicas.items():
        if tensors and norm_type == 2 and run.backend.is_lazy:  # fewer operations to compile
            total = total + torch.stack([(t * t).sum() for t in (_real(t, dtype) for t in tensors)]).sum() / replicas
        elif tensors:
            same = [t.abs() if t.is_complex() else t for t in tensors]
            if any(torch.promote_types(t.dtype, dtype) != dtype for t in same):
                same = [t.to(dtype) for t in same]  # narrower, which torch does not do in a norm
            each = torch.stack(torch._foreach_norm(same, norm_type, dtype=dtype))  # without copies in dtype
            total = total + (each**norm_type).sum() / replicas
    return total


def _real(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns real numbers of the same norm."""
    return (tensor.abs() if tensor.is_complex() else tensor).to(dtype)


class Gradients:
    """The reduced gradients of a run, of which the owner of gradient reduction returns one. One that keeps them
    elsewhere than in ``parameter.grad`` derives from this class.

    Args:
        run: the run.
        complete: completes the reduction for a step. Collective.
        flush: the same, outside of a step; None: ``complete``.
    """

    def __init__(
        self, run: Run, complete: Callable[[], None] = lambda: None, flush: Callable[[], None] | None = None
    ) -> None:
        self._run, self._complete, self._flush = run, complete, flush or complete

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def parts(self, parameters: Iterable[torch.nn.Parameter]) -> list[GradientPart]:
        """Returns what this rank has of the reduced gradients of local parameters, to be changed in place.
        Collective."""
        self._complete()
        return gradient_parts(parameters, self._run)

    def full(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Returns the reduced gradient of a local parameter, in its local shape, or None if it has none. Collective:
        all ranks of the parameter's group call it in the same order."""
        self._flush()
        return parameter.grad

    def scale(self, parameters: Iterable[torch.nn.Parameter], factor: torch.Tensor) -> None:
        """Multiplies the gradients of local parameters by ``factor``, 0-dim."""
        scale_parts(self.parts(parameters), factor)

    def norm(self, parameters: Iterable[torch.nn.Parameter], norm_type: float = 2.0) -> torch.Tensor:
        """Returns the norm over every element of the original parameters, each counted once; see
        :func:`global_norm`."""
        return global_norm(self.parts(parameters), self._run, norm_type)

    def clip_norm(
        self, parameters: Iterable[torch.nn.Parameter], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scales gradients so that their norm is at most ``max_norm``; returns the norm before."""
        return clip_by_norm(self.parts(parameters), max_norm, norm_type, self._run)

    def clip_value(self, parameters: Iterable[torch.nn.Parameter], clip_value: float) -> None:
        """Clamps every element to ``[-clip_value, clip_value]``."""
        clip_by_value(self.parts(parameters), clip_value)


def clip_by_norm(parts: Iterable[GradientPart], max_norm: float, norm_type: float, run: Run) -> torch.Tensor:
    """Scales reduced gradients in place, so that their global norm is at most ``max_norm``. Collective.

    Args:
        parts: what this rank has of the gradients, see :func:`gradient_parts`.
        max_norm: the maximum norm.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.
        run: the run.

    Returns:
        The norm before clipping, with every element of the original parameters counted once, see
        :func:`global_norm`.
    """
    parts = list(parts)
    norm = global_norm(parts, run, norm_type)
    scale_parts(parts, torch.clamp(max_norm / (norm + 1e-6), max=1.0))  # as torch.nn.utils.clip_grad_norm_
    return norm


def clip_by_value(parts: Iterable[GradientPart], clip_value: float) -> None:
    """Clamps the elements that this rank has of reduced gradients to ``[-clip_value, clip_value]``, in place."""
    for part in parts:
        if part.tensor is not None:
            part.tensor.clamp_(-clip_value, clip_value)


def scale_parts(parts: Iterable[GradientPart], factor: torch.Tensor) -> None:
    """Multiplies the elements that this rank has of gradients by a 0-dim tensor, in place."""
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if tensors:
        torch._foreach_mul_(tensors, factor.to(tensors[0].device))
