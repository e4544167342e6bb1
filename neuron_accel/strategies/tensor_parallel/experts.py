"""Experts whose last bias is added on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_BIAS = "down_proj_bias"


def share_bias(module: nn.Module, degree: int) -> list[str]:
    """Lets each of ``degree`` ranks add its part of the bias behind the experts' last product, so that it counts once
    in the sum over the ranks.

    Returns:
        the names of the parameters whose gradients are shares of a sum from now on.
    """
    if _BIAS not in module._parameters:
        return []

    def part(experts: nn.Module) -> torch.Tensor:
        return experts._parameters[_BIAS] / degree

    # The experts' forward, of which transformers has several, reads the bias as an attribute.
    members: dict[str, Any] = {_BIAS: property(part)}
    module.__class__ = type(type(module).__name__, (type(module),), members)
    return [_BIAS]
