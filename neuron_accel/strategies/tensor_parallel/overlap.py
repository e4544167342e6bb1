# SPDX-License-Identifier: Apache-2.0
"""Products of a region's column-wise layers that are computed with the gather of the region's input, in one node.

A region gathers its input once for all its column-wise layers. Here the gather may be started first. Then each layer
computes the product of the positions that this rank holds, and after the gather those of all other positions, into the
same output. In the backward pass the gradient of the input is complete when that of every layer is; its reduce-scatter
is started, and the gradients of the weights are computed before it is waited for. All of this is one autograd node. It
may also keep this rank's shard of the input instead of the gathered input, and gather again in the backward pass while
the gradient of the input is computed (Korthikanti et al. 2022, section 4.2.2). The region's module receives the
gathered input as it always does, and a layer that is called with it returns its product, which exists already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import has_torch_function

from neuron_accel.contract import gather_from_group, reduce_scatter_to_group
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group

HIDDEN = "hidden_states"

Operands = tuple[torch.Tensor, torch.Tensor | None]
"""Weight [out, in] and bias [out] of a linear layer."""


class ColumnWise(nn.Module):
    """Base class of layers with sharded output features, whose product may be computed before they are called."""

    reads_gathered: bool = True
    """Whether the layer is called with the input of its region, as far as is known: False once it was not."""
    _ahead: tuple[torch.Tensor, torch.Tensor] | None = None  # the region's input, and the product of this layer with it

    def operands(self) -> Operands:
        """Returns what the input is multiplied with."""
        raise NotImplementedError

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the output [..., out] for an input [..., in]."""
        # A mode for torch functions that is active in the layer may replace F.linear.
        if self._ahead is not None and input is self._ahead[0] and not has_torch_function((input,)):
            product, self._ahead = self._ahead[1], None
            return product
        return F.linear(input, *self.operands())


# ---- which layers ----------------------------------------------------------------------------------------------------
def overlapping_layers(region: nn.Module, features: int) -> list[tuple[str, ColumnWise]]:
    """Returns name and layer of the column-wise layers that may read the input of a region: the region itself, or
    layers in it at a depth of one or two, with ``features`` input features. There are none in modules whose forward was
    replaced, such as by activation checkpointing: it may be repeated, without the entry of the region
    (:class:`GatherLate`)."""
    return [
        (name, layer)
        for name, layer in _column_wise(region, "", 2)
        if (layer.nx if hasattr(layer, "nx") else layer.in_features) == features
    ]


def _column_wise(module: nn.Module, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if "forward" in vars(module) and not isinstance(_call_of(module), GatherLate):
        return
    if isinstance(module, ColumnWise):
        yield name, module
    elif depth and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        for inner, child in module.named_children():
            yield from _column_wise(child, f"{name}.{inner}" if name else inner, depth - 1)


def forget_products(region: nn.Module, *, completed: bool) -> None:
    """Is called at the end of a region. Products that no layer returned are dropped, and if the region was
    ``completed``, without an error, are not computed again for these layers."""
    for _, layer in _column_wise(region, "", 2):
        if layer._ahead is not None:
            layer._ahead = None
            layer.reads_gathered = layer.reads_gathered and not completed


# ---- the input of a region -------------------------------------------------------------------------------------------
def replace_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call with the hidden states, the first positional argument or the one of that name,
    replaced.

    Raises:
        UsageError: if a call has no hidden states.
    """
    if args:
        return (change(args[0]), *args[1:]), kwargs
    if HIDDEN in kwargs:
        return args, {**kwargs, HIDDEN: change(kwargs[HIDDEN])}
    raise UsageError(
        f"A module was called without {HIDDEN!r}, as keyword or first argument; it got {sorted(kwargs)}.",
        why="its input must be gathered on all ranks of the tensor-parallel axis first",
    )


# ---- regions that are recomputed by themselves -----------------------------------------------------------------------
class GatherLate:
    """Is the forward of a region, for :func:`~neuron_accel.contract.wrap_forward`: where another plugin wraps it, such
    as to recompute it in the backward pass, it receives this rank's shard, so that no more is kept, and gathers."""

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if gathers_late(module):
            args, kwargs = replace_hidden(args, kwargs, module.tp_region.flow.gather)
        return forward(*args, **kwargs)


def gathers_late(region: nn.Module) -> bool:
    """Whether the forward of a region is wrapped, and gathers its input itself. torch.compile traces it without."""
    outermost = _call_of(region)
    if outermost is None or isinstance(outermost, GatherLate) or torch.compiler.is_compiling():
        return False
    inner = vars(region)["forward"]
    while inner is not None and not isinstance(_call(inner), GatherLate):
        inner = getattr(getattr(inner, "__func__", None), "own", None)
    return inner is not None


def _call_of(module: nn.Module) -> Any:
    return _call(vars(module).get("forward"))


def _call(forward: Any) -> Any:
    return getattr(getattr(forward, "__func__", None), "call", None)


# ---- their products --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Settings:
    """What a node needs beside tensors.

    Args:
        backend, group: of the collectives.
        length: number of positions of the full sequence, without padding.
        dtype: in which products are computed.
        computed: which layers' products are computed.
        learns: whether the weight of a layer needs a gradient.
        overlaps: whether products of this rank's positions are computed during the gather.
        regather: whether the shard is kept, and gathered again in the backward pass.
    """

    backend: Backend
    group: Group
    length: int
    dtype: torch.dtype
    computed: tuple[bool, ...]
    learns: bool
    overlaps: bool
    regather: bool


def gather_and_multiply(
    hidden: torch.Tensor,
    layers: Sequence[ColumnWise],
    backend: Backend,
    group: Group,
    length: int,
    *,
    overlaps: bool,
    regather: bool,
) -> tuple[torch.Tensor, list[tuple[ColumnWise, torch.Tensor]]]:
    """Gathers a region's input, and computes products of layers with it.

    Args:
        hidden: this rank's positions [batch, ceil(length / ranks), in]; the last may be padding.
        layers: the layers that may read the input. Those of which ``reads_gathered`` is False are not computed.
        backend, group: of the collectives.
        length: number of positions of the full sequence.
        overlaps: whether the products of this rank's positions are computed in the meantime.
        regather: whether the node keeps ``hidden`` instead of the full input.

    Returns:
        The full input [batch, length, in], and each computed layer with its product [batch, length, out].
    """
    dtype = _product_dtype(hidden)
    operands: list[torch.Tensor | None] = []
    for layer in layers:
        # Autograd would tell a weight of a gradient here that it gets where its product is computed.
        given = [None if each is None else each if layer.reads_gathered else each.detach() for each in layer.operands()]
        operands += [None if each is None else each.to(dtype) for each in given]
    computed = tuple(layer.reads_gathered for layer in layers)
    learns = any(layer.operands()[0].requires_grad for layer in layers)
    gather = _Settings(backend, group, length, dtype, computed, learns, overlaps, regather)
    full, _, *products = _GatherAndMultiply.apply(hidden, gather, *operands)
    return full, list(zip([layer for layer in layers if layer.reads_gathered], products, strict=True))


def _product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which F.linear would compute."""
    device = hidden.device.type
    cast = hidden.dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if cast else hidden.dtype


class _GatherAndMultiply(torch.autograd.Function):
    """All-gather of the input along dim 1, and its products; reduce-scatter in backward.

    Saves the weights, and what is saved without overlap, the full input in the dtype of the products, or this rank's
    shard. These are the same for all ``computed``, so that a pass that is repeated saves as many tensors as the first.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gather: _Settings, *operands: torch.Tensor | None) -> tuple[Any, ...]:
        length, size, index = gather.length, hidden.shape[1], gather.group.index
        weights: Sequence[Any] = operands[::2]
        layers = [each for each, done in zip(_pairs(operands), gather.computed, strict=True) if done]
        pending = gather.backend.start_all_gather(hidden, gather.group, 1)
        first, last = (min(size * each, length) if gather.overlaps else 0 for each in (index, index + 1))
        own, in_place = hidden.narrow(1, 0, last - first).to(gather.dtype), [] if gather.backend.is_lazy else layers
        products = [own.new_empty(hidden.shape[0], length, weight.shape[0]) for weight, _ in in_place]
        for product, each in zip(products, in_place, strict=True):
            _multiply(product[:, first:last], own, *each)
        full = _trim(pending.wait(), length)
        x = full.to(gather.dtype)
        for product, each in zip(products, in_place, strict=True):
            _multiply(product[:, :first], x[:, :first], *each)
            _multiply(product[:, last:], x[:, last:], *each)
        if gather.backend.is_lazy:
            products = [
                F.linear(x, *each).clone() for each in layers
            ]  # not a view, which could not be changed in place

        wants_input, _, *wants = ctx.needs_input_grad
        kept = hidden if gather.regather else x
        ctx.save_for_backward(kept if gather.learns else None, *(weights if wants_input else ()))
        ctx.set_materialize_grads(False)
        ctx.gather, ctx.shard = gather, hidden.shape
        ctx.input_dtype, ctx.device = hidden.dtype, hidden.device
        cast = None if x is full else x  # an output, so that a gradient of the gradient reaches the input through it
        if not wants_input:
            learns = [any(pair) for pair, done in zip(_pairs(wants), gather.computed, strict=True) if done]
            fixed = [product for product, learning in zip(products, learns, strict=True) if not learning]
            ctx.mark_non_differentiable(full, *([] if cast is None else [cast]), *fixed)
        return full, cast, *products

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        gather, (of_full, of_cast, *of_computed) = ctx.gather, gradients
        remaining = iter(of_computed)
        of_products = [next(remaining) if done else None for done in gather.computed]
        kept, *weights = ctx.saved_tensors
        wants_input, _, *wants = ctx.needs_input_grad
        again = _start_regather(kept, gather, gradients) if gather.regather and any(wants[::2]) else None
        of_hidden: Any = None
        if wants_input:
            total = of_full if of_cast is None else _plus(of_full, of_cast.to(ctx.input_dtype))
            reusable = False  # whether the memory of total may be reused
            for gradient, weight in zip(of_products, weights, strict=True):
                if gradient is not None:
                    term = (gradient @ weight).to(ctx.input_dtype)
                    total = total.add_(term) if reusable and total is not None else _plus(total, term)
                    reusable = not torch.is_grad_enabled()
            of_hidden = _start_reduce_scatter(total, ctx)
        x: Any = kept
        if again is not None:
            x = _trim(again if isinstance(again, torch.Tensor) else again.wait(), gather.length)
        of_operands: list[torch.Tensor | None] = []
        for gradient, (of_weight, of_bias) in zip(of_products, _pairs(wants), strict=True):
            rows = None if gradient is None else gradient.reshape(-1, gradient.shape[-1])
            of_operands.append(rows.t() @ x.flatten(0, -2) if rows is not None and of_weight else None)
            of_operands.append(rows.sum(0) if rows is not None and of_bias else None)
        if of_hidden is not None and not isinstance(of_hidden, torch.Tensor):
            of_hidden = of_hidden.wait()
        return of_hidden, None, *of_operands


def _start_regather(hidden: torch.Tensor, gather: _Settings, gradients: Sequence[torch.Tensor | None]) -> Any:
    """Starts to gather the input of a region again. If the result is to be differentiated, it is complete at return."""
    if torch.is_grad_enabled():
        return gather_from_group(hidden, gather.backend, gather.group, 1, grad="reduce_scatter").to(gather.dtype)
    given = [gradient for gradient in gradients if gradient is not None]
    hidden = gather.backend.fence([hidden, *given])[0]  # a compiler would keep the result of the forward pass instead
    return gather.backend.start_all_gather(hidden.to(gather.dtype), gather.group, 1)


def _trim(full: torch.Tensor, length: int) -> torch.Tensor:
    # Contiguous, since some regions call view on the hidden states.
    return full if full.shape[1] == length else full.narrow(1, 0, length).contiguous()


def _start_reduce_scatter(total: torch.Tensor | None, ctx: Any) -> Any:
    """Starts to sum the gradients of the full input. If the sum is to be differentiated, it is complete at return."""
    gather, (batch, size, features) = ctx.gather, ctx.shard
    if total is None:  # other ranks may have one
        total = torch.zeros(batch, gather.length, features, dtype=ctx.input_dtype, device=ctx.device)
    missing = size * gather.group.size - gather.length
    total = F.pad(total, (0, 0, 0, missing)) if missing else total
    if torch.is_grad_enabled():
        return reduce_scatter_to_group(total, gather.backend, gather.group, 1)
    return gather.backend.start_reduce_scatter(total, gather.group, 1)


def _plus(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    return other if one is None else one + other


def _pairs(values: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(values[::2], values[1::2], strict=True))


def _multiply(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Writes ``x @ weight.T + bias`` to ``out`` [batch, positions, out], a view of some positions of a tensor."""
    if not out.numel():
        return
    if x.shape[0] == 1:
        rows, columns, target = x[0], weight.t(), out[0]
        if bias is None:
            torch.mm(rows, columns, out=target)
        else:
            torch.addmm(bias, rows, columns, out=target)
        return
    columns = weight.t().expand(x.shape[0], -1, -1)
    if bias is None:
        torch.bmm(x, columns, out=out)
    else:
        torch.baddbmm(bias, x, columns, out=out)
