# SPDX-License-Identifier: Apache-2.0
"""Sends tokens to experts in buffers of a fixed size, so that no shape depends on a value.

Each rank has a buffer of ``capacity`` rows for each expert; the buffers of the experts of one rank are sent to it
together, by an all-to-all of equal chunks, and all experts of a rank are multiplied at once. This is how devices
compute whose graphs are compiled, and how tokens above a capacity are dropped on any device (Fedus, Zoph and Shazeer,
"Switch Transformers", 2021, section 2.2).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from neuron_accel.contract import all_to_all
from neuron_accel.errors import UnsupportedModelError
from neuron_accel_expert_parallel.dispatch import BETWEEN_GRAPHS, Dispatcher

_FORM = ("has_gate", "has_bias", "is_transposed")


class PaddedDispatcher(Dispatcher):
    """Sends ``capacity`` rows for each expert.

    Args:
        name, module, args: see :class:`Dispatcher`. The module has the form of the experts of transformers.
        capacity_factor: size of a buffer, as a multiple of the mean number of tokens of an expert on the rank that has
            most; None: a row for each token, so that none is dropped.

    Raises:
        UnsupportedModelError: if the module has another form; it is then unchanged.
    """

    def __init__(self, name: str, module: nn.Module, *args: Any, capacity_factor: float | None) -> None:
        check_form(name, module)
        super().__init__(name, module, *args)
        self._factor = capacity_factor
        module.padded_dispatcher = self  # type: ignore[assignment]
        module.__class__ = type(type(module).__name__, (type(module),), {"forward": _forward})

    def explain(self) -> str:
        size = "a row for each of its tokens" if self._factor is None else f"{self._factor:g} times their mean number"
        return (
            f"Each layer sends a buffer for each expert of another rank, {size}, and gets as much back, forward and "
            "backward."
        )

    def _most(self, tokens: int) -> int:
        """The number of tokens of the rank that has most, so that buffers have one size. Shapes of ranks that compute
        the same graph are equal."""
        if self.backend.is_lazy or not self.backend.has_values:
            return tokens
        count = torch.tensor([tokens], device=self.backend.device)
        return int(self.backend.to_host(self.backend.all_reduce(count, self.group, "max")))

    def capacity(self, tokens: int, choices: int) -> int:
        """Rows of a buffer where the rank that has most has that many tokens, each of which chooses that many
        experts."""
        if self._factor is None:
            return tokens  # an expert is chosen at most once by each
        return min(tokens, math.ceil(self._factor * tokens * choices / self.experts))

    def __call__(
        self, module: nn.Module, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sums ``[N, H]`` of the experts of each of this rank's tokens."""
        tokens, choices = experts.shape
        capacity = self.capacity(self._most(tokens), choices)
        flat = experts.reshape(-1)
        chosen = flat[:, None] == torch.arange(self.experts, device=flat.device)  # [N * k, experts]
        place = (chosen.int().cumsum(0) - 1).gather(1, flat[:, None]).squeeze(1)  # among the tokens of its expert
        kept = place < capacity
        self.count(module, chosen.sum(0), (~kept).sum())
        slot = torch.where(kept, flat * capacity + place, self.experts * capacity)  # dropped tokens share the last
        rows = hidden.new_zeros(self.experts * capacity + 1, hidden.shape[1])
        rows = rows.index_add(0, slot, hidden.repeat_interleave(choices, 0))[:-1].view(self.experts, capacity, -1)
        received = all_to_all(rows, self.backend, self.group, 0, 1)  # [local, ranks * capacity, H]
        back = all_to_all(feed_forward(module, received), self.backend, self.group, 1, 0)
        back = torch.cat([back.flatten(0, 1), back.new_zeros(1, back.shape[2])])
        weighted = back[slot].view(tokens, choices, -1) * weights[..., None]
        return weighted.sum(1).to(hidden.dtype)


@torch.compiler.disable(reason=BETWEEN_GRAPHS)
def _forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of a module of experts whose tokens are sent in buffers."""
    dispatcher: PaddedDispatcher = self.padded_dispatcher
    return dispatcher(self, *dispatcher.inputs(self, args, kwargs))


def feed_forward(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What each expert of a module of transformers' form computes for its own tokens ``[experts, M, H]``."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(module, name)
        result = torch.bmm(x, weight if module.is_transposed else weight.transpose(1, 2))
        return result + getattr(module, f"{name}_bias")[:, None] if module.has_bias else result

    if module.has_gate:
        return linear(module._apply_gate(linear(tokens, "gate_up_proj")), "down_proj")
    return linear(module.act_fn(linear(tokens, "up_proj")), "down_proj")


def check_form(name: str, module: nn.Module) -> None:
    """Raises UnsupportedModelError if the experts are not two stacked projections, as transformers declares them."""
    missing = [each for each in _FORM if not isinstance(getattr(module, each, None), bool)]
    if not missing and not getattr(module, "has_post_expert_norm", False):
        return
    raise UnsupportedModelError(
        f"The experts {name!r} ({type(module).__name__}) cannot be computed for buffers of a fixed size.",
        where="plugin expert_parallel",
        why=f"the module does not say {missing[0]!r}, as experts of transformers do" if missing else "it has norms",
        fix="leave out capacity_factor, and train on CPU or CUDA ranks; or declare the module with transformers' "
        "`use_experts_implementation`",
    )
