"""Backward passes in two halves: gradients of activations now, those of weights when there is time.

While :class:`WeightsLater` is active, linear projections record what their weight's gradient is made of instead of
making it. Everything else, norms, embeddings, experts, is differentiated at once.

Source: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class Later:
    """The weight gradients that one micro-batch owes on one stage."""

    def __init__(self) -> None:
        self._owed: dict[nn.Parameter, list[Callable[[], torch.Tensor]]] = {}

    def add(self, weight: nn.Parameter, make: Callable[[], torch.Tensor]) -> None:
        self._owed.setdefault(weight, []).append(make)

    def pay(self) -> None:
        """Makes the gradients and adds them to ``weight.grad``, each once, as autograd would."""
        owed, self._owed = self._owed, {}
        weights, gradients = [], []
        for weight, makers in owed.items():
            total = makers[0]()
            for make in makers[1:]:
                total += make()
            weights.append(weight)
            gradients.append(total)
        if weights:
            torch.autograd.backward(weights, gradients)


class WeightsLater(TorchFunctionMode):
    """Linear projections inside owe ``later`` the gradient of their weight.

    It has to be active while the backward pass runs, too: activation checkpointing computes forward again there.
    """

    def __init__(self, later: Later) -> None:
        super().__init__()
        self._later = later

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            found = _linear(*args, **(kwargs or {}))
        elif func is torch.addmm and len(args) == 3 and not kwargs:  # transformers' Conv1D: weights are [in, out]
            found = (args[1], args[2], args[0], True)
        else:
            found = None
        if found is not None and _can_wait(found[0], found[1]):
            return _Projection.apply(*found, self._later)
        return func(*args, **(kwargs or {}))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[Any, ...]:
    return input, weight, bias, False


def _can_wait(x: torch.Tensor, weight: torch.Tensor) -> bool:
    learns = isinstance(weight, nn.Parameter) and weight.requires_grad and type(x) is torch.Tensor
    return learns and x.requires_grad and torch.is_grad_enabled()


class _Projection(torch.autograd.Function):
    """``x @ weight.T + bias``, or ``x @ weight + bias`` for weights [in, out]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, turned: bool, later: Later
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.turned, ctx.later = weight, turned, later
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.addmm(bias, x, weight) if turned else F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        turned, dtype = ctx.turned, gradient.dtype
        flat = gradient.reshape(-1, gradient.shape[-1])

        def make() -> torch.Tensor:
            rows = x.reshape(-1, x.shape[-1]).to(dtype)  # under autocast the product was made in another dtype
            product = rows.t() @ flat if turned else flat.t() @ rows
            return product.to(weight.dtype)

        ctx.later.add(ctx.weight, make)
        back = weight.to(dtype)
        of_x = (gradient @ (back.t() if turned else back)).to(x.dtype)
        of_bias = flat.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return of_x, None, of_bias, None, None
