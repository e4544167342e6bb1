# SPDX-License-Identifier: Apache-2.0
"""Backward passes in two halves: gradients of activations first, gradients of weights later.

While :class:`DeferredWgrad` is active, linear projections record the inputs of their weight's gradient instead of
computing it. All other gradients (of norms, embeddings, experts) are computed in the first half.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Later:
    """The deferred weight gradients of one micro-batch on one stage."""

    def __init__(self) -> None:
        self._deferred: dict[nn.Parameter, list[Callable[[], torch.Tensor]]] = {}

    def add(self, weight: nn.Parameter, make: Callable[[], torch.Tensor]) -> None:
        self._deferred.setdefault(weight, []).append(make)

    def run(self) -> None:
        """Computes the gradients and adds them to ``weight.grad``, each once, as autograd would."""
        deferred, self._deferred = self._deferred, {}
        weights, gradients = [], []
        for weight, makers in deferred.items():
            total = makers[0]()
            for make in makers[1:]:
                total += make()
            weights.append(weight)
            gradients.append(total)
        if weights:
            torch.autograd.backward(weights, gradients)


class DeferredWgrad(TorchFunctionMode):
    """Defers the weight gradients of linear projections inside to :attr:`later`, if it is set.

    It is active only inside layers that :meth:`attach` prepared, also when activation checkpointing computes them again
    during the backward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.later: Later | None = None
        """Collects the deferred gradients of the current micro-batch."""

    def attach(self, model: nn.Module) -> None:
        """Installs hooks on every layer of ``model`` that has a matrix of its own."""
        for module in model.modules():
            matrices = [p for p in module.parameters(recurse=False) if p.dim() == 2]
            if matrices and not isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(self._before)
                module.register_forward_hook(self._after, always_call=True)

    @contextmanager
    def deferring(self, later: Later | None) -> Iterator[None]:
        """Context in which weight gradients, of forward or backward passes, are deferred to ``later``."""
        previous, self.later = self.later, later
        try:
            yield
        finally:
            self.later = previous

    def _before(self, module: nn.Module, args: Any) -> None:
        self.__enter__()

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            found = _linear(*args, **(kwargs or {}))
        elif func is torch.addmm and len(args) == 3 and not kwargs:  # transformers' Conv1D: weights are [in, out]
            found = (args[1], args[2], args[0], True)
        else:
            found = None
        if found is not None and self.later is not None and _can_wait(found[0], found[1]):
            x, weight, bias, turned = found
            return _Projection.apply(x, bias, _DeferredWgrad(weight, turned, self.later))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _DeferredWgrad:
    """A weight, whether it is stored as [in, out], and the object that collects its gradient."""

    weight: nn.Parameter
    turned: bool
    later: Later


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias, False


def _can_wait(x: torch.Tensor, weight: torch.Tensor) -> bool:
    learns = isinstance(weight, nn.Parameter) and weight.requires_grad and type(x) is torch.Tensor
    return learns and x.requires_grad and torch.is_grad_enabled()


class _Projection(torch.autograd.Function):
    """``x @ weight.T + bias``, or ``x @ weight + bias`` for weights [in, out]. The weight is not an input for autograd,
    which would otherwise call the hooks of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, deferred: _DeferredWgrad) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.deferred = deferred
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not deferred.turned:
            return F.linear(x, deferred.weight, bias)
        assert bias is not None
        return torch.addmm(bias, x, deferred.weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight, turned, dtype = ctx.deferred.weight, ctx.deferred.turned, gradient.dtype
        flat = gradient.reshape(-1, gradient.shape[-1])

        def make() -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1]).to(dtype)  # under autocast the product was computed in another dtype
            product = rows.t() @ flat if turned else flat.t() @ rows
            return product.to(weight.dtype)

        ctx.deferred.later.add(weight, make)
        back = weight.to(dtype)
        of_x = (gradient @ (back.t() if turned else back)).to(x.dtype)
        of_bias = flat.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, None
