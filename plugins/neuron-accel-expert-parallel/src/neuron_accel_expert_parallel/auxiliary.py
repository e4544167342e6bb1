# SPDX-License-Identifier: Apache-2.0
"""The load-balancing loss of routers over the tokens of all ranks.

The loss (Fedus, Zoph and Shazeer, "Switch Transformers", 2021, equations 4 to 6) is a product of two means over tokens,
so the mean of the ranks' losses is not the loss of all tokens. The models of transformers add the loss of their own
tokens; a hook after their forward replaces it by that of the tokens of all ranks that sum gradients.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group

_ASKED = "output_router_logits"


def make_auxiliary_losses_exact(model: nn.Module, backend: Backend, group: Group) -> None:
    """Lets every module of ``model`` that adds a load-balancing loss, weighted by its ``router_aux_loss_coef``, compute
    it over the tokens of all ranks of ``group``, over which gradients are averaged."""
    for module in model.modules():
        if hasattr(module, "router_aux_loss_coef"):
            module.register_forward_hook(_Replaced(module, backend, group), with_kwargs=True)


class _Replaced:
    """A forward hook: the same output, with the exact ``aux_loss``, and ``loss`` accordingly."""

    def __init__(self, module: nn.Module, backend: Backend, group: Group) -> None:
        self._arguments, self._backend, self._group = inspect.signature(module.forward), backend, group

    @torch.compiler.disable(reason="other ranks are asked for their tokens")
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = self._arguments.bind(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        asked = given.get(_ASKED)
        if not (getattr(module.config, _ASKED, False) if asked is None else asked):
            return output
        if isinstance(output, tuple):
            raise UsageError(
                f"{_ASKED} is not possible with return_dict=False.",
                where=f"{type(module).__name__}, plugin expert_parallel",
                why="the load-balancing loss is computed over the tokens of all ranks, from outputs that have names",
                fix="leave return_dict out",
            )
        exact = load_balancing_loss(
            output.router_logits,
            module.num_experts,
            module.num_experts_per_tok,
            given.get("attention_mask"),
            self._backend,
            self._group,
        )
        if output.loss is not None:
            output["loss"] = output.loss + module.router_aux_loss_coef * (exact - output.aux_loss)
        output["aux_loss"] = exact
        return output


def load_balancing_loss(
    logits: tuple[torch.Tensor, ...],
    experts: int,
    top_k: int,
    mask: torch.Tensor | None,
    backend: Backend,
    group: Group,
) -> torch.Tensor:
    """The load-balancing loss over the tokens of all ranks and all layers, 0-dim, equal on every rank.

    Args:
        logits: of each layer's router for this rank's tokens, ``[N, experts]``.
        experts: number of experts.
        top_k: number of experts of a token.
        mask: 0 for padding, ``[batch, sequence]`` with N entries; None: all tokens count.
        backend, group: the ranks; gradients are averaged over them.
    """
    counts = logits[0].new_zeros(experts, dtype=torch.float32)
    probabilities, tokens = counts.clone(), counts.new_zeros(1)
    for layer in logits:
        routing = torch.softmax(layer, dim=-1)
        chosen = torch.zeros_like(routing, dtype=torch.float32).scatter_(1, routing.topk(top_k, dim=-1).indices, 1.0)
        counted = torch.ones(len(layer), 1, device=layer.device) if mask is None else mask.reshape(-1, 1).float()
        counts = counts + (chosen * counted).sum(0)
        probabilities = probabilities + (routing.float() * counted).sum(0)
        tokens = tokens + counted.sum()
    sums = torch.cat([counts, probabilities, tokens])
    if group.size > 1:
        sums = _SumOfRanks.apply(sums, backend, group)
    counts, probabilities, tokens = sums.split([experts, experts, 1])
    return experts * ((counts / tokens) * (probabilities / tokens)).sum()


class _SumOfRanks(torch.autograd.Function):
    """The sum over ranks of what every rank then computes the same loss from. Gradients are averaged over these ranks,
    so that the gradient of this rank's term is multiplied by their number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backend: Backend, group: Group) -> torch.Tensor:
        ctx.ranks = group.size
        return backend.all_reduce(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient * ctx.ranks, None, None
