"""Differentiable collectives, once, for every backend.

Each is linear, and its backward pass is another one of them, which makes derivatives of any order right. Nothing is
saved for the backward pass but which backend and group it concerns. Over a group of one rank each is the identity,
without a trace in the graph.

What is right depends on what follows: a tensor that is replicated over the group has, on every rank, the full
gradient if every rank computes the same with it, and a partial gradient otherwise.

=======================  ==========================  ==================================================
function                 forward                     backward
=======================  ==========================  ==================================================
copy_to_group            identity                    all-reduce
reduce_from_group        all-reduce                  identity
gather_from_group        all-gather                  this rank's chunk, or reduce-scatter
chunk_to_group           this rank's chunk           all-gather
reduce_scatter_to_group  reduce-scatter              all-gather
all_to_all               all-to-all                  all-to-all, the dims exchanged
permute                  ring shift                  ring shift the other way
=======================  ==========================  ==================================================

The first two are the conjugate pair f and g of Megatron-LM (Shoeybi et al., 2019, section 3); gather and reduce-scatter
with each other as gradient are those of its sequence parallelism (Korthikanti et al., 2022, section 4.2.2).
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from neuron_accel.backends.base import Backend, Group

GatherGradient = Literal["chunk", "reduce_scatter"]


def copy_to_group(x: torch.Tensor, backend: Backend, group: Group) -> torch.Tensor:
    """``x`` itself, held alike by every rank, on its way into computations that differ between ranks: its gradient is
    the sum of theirs."""
    return x if group.size == 1 else _Copy.apply(x, backend, group)


def reduce_from_group(x: torch.Tensor, backend: Backend, group: Group, *, given_up: bool = False) -> torch.Tensor:
    """The sum of the ranks' ``x``, same shape, for computations that are alike on every rank.

    Args:
        given_up: whether ``x`` is not used any more, so that the sum may take its place in memory. Should autograd
            have kept it for a backward pass, that fails and does not compute with the sum.
    """
    if group.size == 1:
        return x
    return (_ReduceInPlace if given_up else _Reduce).apply(x, backend, group)


def gather_from_group(
    x: torch.Tensor, backend: Backend, group: Group, dim: int, grad: GatherGradient = "chunk"
) -> torch.Tensor:
    """The concatenation along ``dim`` of the ranks' ``x`` (of equal shapes).

    Args:
        grad: ``"chunk"`` if every rank computes the same with the result, so that each has the full gradient already;
            ``"reduce_scatter"`` if each rank computes something of its own with it.
    """
    if grad not in ("chunk", "reduce_scatter"):
        raise ValueError(f"grad is 'chunk' or 'reduce_scatter', not {grad!r}")
    return x if group.size == 1 else _Gather.apply(x, backend, group, dim, grad)


def chunk_to_group(x: torch.Tensor, backend: Backend, group: Group, dim: int) -> torch.Tensor:
    """This rank's of ``group.size`` equal chunks along ``dim`` of an ``x`` that every rank holds alike."""
    return x if group.size == 1 else _Chunk.apply(x, backend, group, dim)


def reduce_scatter_to_group(x: torch.Tensor, backend: Backend, group: Group, dim: int) -> torch.Tensor:
    """This rank's chunk along ``dim`` of the sum of the ranks' ``x``."""
    return x if group.size == 1 else _ReduceScatter.apply(x, backend, group, dim)


def all_to_all(x: torch.Tensor, backend: Backend, group: Group, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Sends chunk i along ``split_dim`` to the i-th rank and concatenates along ``concat_dim`` what comes."""
    return x if group.size == 1 else _AllToAll.apply(x, backend, group, split_dim, concat_dim)


def permute(x: torch.Tensor, backend: Backend, group: Group, shift: int = 1) -> torch.Tensor:
    """The ``x`` of the rank ``shift`` positions before this one in the ring."""
    return x if shift % group.size == 0 else _Permute.apply(x, backend, group, shift)


class _Collective(torch.autograd.Function):
    """Keeps the arguments after the tensor for the backward pass, and no tensor."""

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
        # An all-reduce may reuse its input, which here belongs to the caller (or to autograd).
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
        # In memory of its own: a view would keep all of x alive for as long as the chunk lives.
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


class _Permute(_Collective):
    @staticmethod
    def forward(x, backend, group, shift):
        return backend.permute(x, group, shift)

    @staticmethod
    def backward(ctx, gradient):
        backend, group, shift = ctx.arguments
        return permute(gradient, backend, group, -shift), None, None, None
