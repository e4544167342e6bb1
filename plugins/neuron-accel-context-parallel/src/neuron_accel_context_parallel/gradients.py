"""Gradients where what ranks compute alike meets what each computes of its own positions.

Gradients of parameters are averaged over the ranks of a sequence. So the gradient of what follows has to arrive
multiplied by their number at each rank's own shard, and what is equal on every rank needs no change.
"""

from __future__ import annotations

from typing import Any

import torch

from neuron_accel.contract import Backend, Group


def mean_of_group(loss: torch.Tensor, backend: Backend, group: Group) -> torch.Tensor:
    """The mean of the ranks' ``loss``; each rank's own has the gradient of the mean, undivided."""
    return _Mean.apply(loss, backend, group)  # type: ignore[no-any-return]


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor`` itself; its gradient is ``factor`` times what arrives."""
    return _Scale.apply(tensor, factor) if tensor.requires_grad else tensor  # type: ignore[no-any-return]


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, backend: Backend, group: Group) -> torch.Tensor:
        return backend.all_reduce(loss.clone(), group) / group.size

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient * ctx.factor, None
