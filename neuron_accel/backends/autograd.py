# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives for every backend.

Each is linear, and its backward is another function of this module, so that they can be differentiated any number of
times. No tensors are saved for backward. In a group of one rank each returns its input and adds no node to the autograd
graph.

Which one is correct depends on how the result is used: the gradient of a tensor that is replicated over the group is,
on every rank, the full gradient if all ranks perform the same computation with it, and a partial gradient otherwise.

=======================  ==========================  ==================================================
function                 forward                     backward
=======================  ==========================  ==================================================
copy_to_group            identity                    all-reduce
reduce_from_group        all-reduce                  identity
gather_from_group        all-gather                  this rank's chunk, or reduce-scatter
chunk_to_group           this rank's chunk           all-gather
reduce_scatter_to_group  reduce-scatter              all-gather
all_to_all               all-to-all                  all-to-all, the dims exchanged
all_to_all_uneven        all-to-all of rows          all-to-all of rows, the counts exchanged
=======================  ==========================  ==================================================

The first two are the conjugate operators f and g of Megatron-LM (Shoeybi et al., 2019, section 3). All-gather and
reduce-scatter as each other's backward are the operators of its sequence parallelism (Korthikanti et al., 2022, section
4.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from neuron_accel.backends.base import Backend
from neuron_accel.backends.group import Group

GatherGradient = Literal["chunk", "reduce_scatter"]


def copy_to_group(x: torch.Tensor, backend: Backend, group: Group) -> torch.Tensor:
    """Returns ``x``, which is equal on all ranks, for use in computations that differ between ranks. The gradient is
    the sum of the ranks' gradients."""
    return x if group.size == 1 else _Copy.apply(x, backend, group)


def reduce_from_group(x: torch.Tensor, backend: Backend, group: Group, *, given_up: bool = False) -> torch.Tensor:
    """Returns the sum of the ranks' ``x``, of the same shape, for use in computations that are the same on all ranks.

    Args:
        given_up: whether ``x`` is not used afterwards, so that its memory may be reused for the sum. If autograd saved
            ``x`` for a backward pass, that pass raises torch's error for tensors modified in place.
    """
    if group.size == 1:
        return x
    return (_ReduceInPlace if given_up else _Reduce).apply(x, backend, group)


def gather_from_group(
    x: torch.Tensor, backend: Backend, group: Group, dim: int, grad: GatherGradient = "chunk"
) -> torch.Tensor:
    """Returns the concatenation along ``dim`` of the ranks' ``x``, which must have equal shapes.

    Args:
        grad: ``"chunk"`` if all ranks perform the same computation with the result, so that each has the full gradient;
            ``"reduce_scatter"`` if computations differ between ranks, so that each has a partial gradient.
    """
    if grad not in ("chunk", "reduce_scatter"):
        raise ValueError(f"grad must be 'chunk' or 'reduce_scatter', got {grad!r}")
    return x if group.size == 1 else _Gather.apply(x, backend, group, dim, grad)


def chunk_to_group(x: torch.Tensor, backend: Backend, group: Group, dim: int) -> torch.Tensor:
    """Returns this rank's chunk of ``group.size`` equal chunks along ``dim`` of ``x``, which is equal on all ranks."""
    return x if group.size == 1 else _Chunk.apply(x, backend, group, dim)


def reduce_scatter_to_group(x: torch.Tensor, backend: Backend, group: Group, dim: int) -> torch.Tensor:
    """Returns this rank's chunk along ``dim`` of the sum of the ranks' ``x``."""
    return x if group.size == 1 else _ReduceScatter.apply(x, backend, group, dim)


def all_to_all(x: torch.Tensor, backend: Backend, group: Group, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Sends chunk i along ``split_dim`` to the i-th rank and returns the received chunks, concatenated along
    ``concat_dim``."""
    return x if group.size == 1 else _AllToAll.apply(x, backend, group, split_dim, concat_dim)


def all_to_all_uneven(
    x: torch.Tensor, backend: Backend, group: Group, sent: Sequence[int], received: Sequence[int]
) -> torch.Tensor:
    """Sends ``sent[i]`` rows of ``x`` ``[sum(sent), ...]`` to the i-th rank, the first rows to the first rank and so
    on, and returns the ``received[i]`` rows of each ``[sum(received), ...]``, in the order of ranks. Available if
    ``backend.has_uneven_all_to_all``."""
    return x if group.size == 1 else _AllToAllUneven.apply(x, backend, group, tuple(sent), tuple(received))


class _Collective(torch.autograd.Function):
    """Keeps the arguments other than the tensor for the backward pass."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.arguments = inputs[1:]


class _Copy(_Collective):
    @staticmethod
    def forward(x, backend, group):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_from_group(gradient, *ctx.arguments), None, None


class _Reduce(_Collective):
    @staticmethod
    def forward(x, backend, group):
        # An all-reduce may reuse the memory of its input, which the caller or autograd still uses here.
        return backend.all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx, gradient):
        return copy_to_group(gradient, *ctx.arguments), None, None


class _ReduceInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, backend, group):
        ctx.arguments = backend, group
        result = backend.all_reduce(x, group)
        if x.device.type != "cpu" or result.data_ptr() != x.data_ptr():
            return result
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return copy_to_group(gradient, *ctx.arguments), None, None


class _Gather(_Collective):
    @staticmethod
    def forward(x, backend, group, dim, grad):
        return backend.all_gather(x, group, dim)

    @staticmethod
    def backward(ctx, gradient):
        backend, group, dim, grad = ctx.arguments
        inverse = chunk_to_group if grad == "chunk" else reduce_scatter_to_group
        return inverse(gradient, backend, group, dim), None, None, None, None


class _Chunk(_Collective):
    @staticmethod
    def forward(x, backend, group, dim):
        # A copy: a view would keep all of x alive as long as the chunk.
        return backend.chunk(x, group, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, gradient):
        backend, group, dim = ctx.arguments
        return gather_from_group(gradient, backend, group, dim, grad="chunk"), None, None, None


class _ReduceScatter(_Collective):
    @staticmethod
    def forward(x, backend, group, dim):
        return backend.reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx, gradient):
        backend, group, dim = ctx.arguments
        return gather_from_group(gradient, backend, group, dim, grad="reduce_scatter"), None, None, None


class _AllToAll(_Collective):
    @staticmethod
    def forward(x, backend, group, split_dim, concat_dim):
        return backend.all_to_all(x, group, split_dim, concat_dim)

    @staticmethod
    def backward(ctx, gradient):
        backend, group, split_dim, concat_dim = ctx.arguments
        return all_to_all(gradient, backend, group, concat_dim, split_dim), None, None, None, None


class _AllToAllUneven(_Collective):
    @staticmethod
    def forward(x, backend, group, sent, received):
        return backend.all_to_all_uneven(x, group, sent, received)

    @staticmethod
    def backward(ctx, gradient):
        backend, group, sent, received = ctx.arguments
        return all_to_all_uneven(gradient, backend, group, received, sent), None, None, None, None
