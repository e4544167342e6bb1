"""Does an optimizer treat the elements of a parameter alike?

Only then may a parameter be cut. Instead of a list of names, which would say nothing about a class of the user's own,
the optimizer is tried: a few steps on a small matrix, whole and in two flat pieces, must agree.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from neuron_accel.engine.optimizers import twin


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updating pieces of a parameter gives the same as updating it whole, with the optimizer's own options.

    Args:
        optimizer: it is left alone; a twin of it is tried for each of its groups.
    """
    return all(_group_is_elementwise(optimizer, group) for group in optimizer.param_groups)


def _group_is_elementwise(optimizer: torch.optim.Optimizer, group: dict) -> bool:
    generator = torch.Generator().manual_seed(0)
    # Large and uneven enough that factored or normalised updates show, with rows and columns of unequal scale.
    values = torch.randn(24, 40, generator=generator) * torch.logspace(-2, 1, 40)
    gradients = [torch.randn(24, 40, generator=generator) * torch.logspace(1, -2, 24)[:, None] for _ in range(3)]
    cut = 24 * 40 // 3 + 7
    whole = [nn.Parameter(values.clone())]
    pieces = [nn.Parameter(part.clone()) for part in values.reshape(-1).split([cut, values.numel() - cut])]
    try:
        for parameters in (whole, pieces):
            trial = _twin(optimizer, group, parameters)
            for gradient in gradients:
                parts = [gradient.clone()]
                if len(parameters) > 1:
                    parts = [part.clone() for part in gradient.reshape(-1).split([p.numel() for p in parameters])]
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.grad = part
                trial.step()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False  # it cannot handle flat pieces at all (Muon insists on matrices), or needs a closure (LBFGS)
    # To rounding: vectorised and scalar code paths may differ in the last bit. What is not element-wise is far off.
    return torch.allclose(whole[0].detach().reshape(-1), torch.cat([p.detach() for p in pieces]), rtol=1e-4, atol=1e-6)


def _twin(optimizer: torch.optim.Optimizer, group: dict, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # An optimizer with state from the start (Adagrad) begins with the same here: constant, so any element will do.
    # Of a parameter with dims, where what is kept per element can be told from what is kept once.
    owner = next((p for p in group["params"] if optimizer.state.get(p) and p.dim()), None)
    state: dict[torch.Tensor, dict[str, Any]] = {}
    if owner is not None:
        like = optimizer.state[owner]
        state = {p: {name: _initial(value, owner, p) for name, value in like.items()} for p in parameters}
    options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if "lr" in options:  # a warm-up may have set it to zero, and an optimizer that does nothing proves nothing
        options["lr"] = torch.full_like(options["lr"], 1e-2) if torch.is_tensor(options["lr"]) else 1e-2
    return twin(optimizer, [{**options, "params": parameters}], state)


def _initial(value: Any, owner: torch.Tensor, parameter: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != owner.shape:
        return value.detach().clone()
    return torch.full_like(parameter.detach(), float(value.detach().reshape(-1)[0]))
