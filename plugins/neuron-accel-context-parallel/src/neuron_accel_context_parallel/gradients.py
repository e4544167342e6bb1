# SPDX-License-Identifier: Apache-2.0
"""Autograd functions between values that are equal on all ranks and values of each rank's positions.

Gradients of parameters are averaged over the ranks of a sequence. So the gradient of a value that all ranks compute
from all shards has to be multiplied by the number of ranks at each rank's shard; that of replicated computation does
not change.
"""

from __future__ import annotations

from typing import Any

import torch

from neuron_accel.contract import Backend, Group


def mean_of_group(loss: torch.Tensor, backend: Backend, group: Group) -> torch.Tensor:
    """The mean of ``loss`` over ranks; its gradient is passed to each rank's loss without a division."""
    return _Mean.apply(loss, backend, group)  # type: ignore[no-any-return]


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Returns ``tensor``; multiplies its gradient by ``factor``."""
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
