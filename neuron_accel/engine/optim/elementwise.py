"""Does an optimizer treat the elements of a parameter alike? Or at least every parameter by itself?

Only then may a parameter be cut, or parameters be divided between ranks. Instead of a list of names, which would say
nothing about a class of the user's own, the optimizer is tried: a few steps on small matrices, in one optimizer and in
several that know nothing of each other, must agree.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from neuron_accel.engine.optim.twin import twin

_CUT = 24 * 40 // 3 + 7
_STEPS = 3
_TOLERANCE = 1e-3
"""Relative to how far an element of its parameter moves at most. What looks at wholes is far off."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether updating pieces of a parameter, each by an optimizer of its own, gives the same as updating it whole,
    with the optimizer's own options.

    Args:
        optimizer: it is left alone; a twin of it is tried for each of its groups.
    """

    def flat_pieces(matrix: torch.Tensor) -> Sequence[torch.Tensor]:
        return matrix.reshape(-1).split([_CUT, matrix.numel() - _CUT])

    return all(_agrees(optimizer, group, matrices=1, divide=flat_pieces) for group in optimizer.param_groups)


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether parameters, each updated by an optimizer of its own, become the same as all updated by one; not so if the
    optimizer looks at all of them together (a global norm, an estimate of the best learning rate).

    Args:
        optimizer: as in :func:`is_elementwise`. One that cannot be tried on matrices alone is taken to be separable.
    """
    return all(_agrees(optimizer, group, matrices=2, failed=True) for group in optimizer.param_groups)


def _agrees(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    *,
    matrices: int,
    divide: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda matrix: [matrix],
    failed: bool = False,
) -> bool:
    values, gradients = _examples(matrices)
    try:
        together = _updated(optimizer, group, values, gradients)
        apart = []
        for value, of_value in zip(values, gradients, strict=True):
            pieces = list(zip(divide(value), *(divide(g) for g in of_value), strict=True))
            updated = [_updated(optimizer, group, [piece[0]], [piece[1:]])[0].reshape(-1) for piece in pieces]
            apart.append(torch.cat(updated))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return failed  # it cannot handle flat pieces at all (Muon insists on matrices), or needs a closure (LBFGS)
    return all(
        bool((one.reshape(-1) - other).abs().max() <= _TOLERANCE * (one - value).abs().max())
        for one, other, value in zip(together, apart, values, strict=True)
    )


def _examples(count: int) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Matrices, and the gradients of every step for each. In fp64, where also the smallest movement shows."""
    generator = torch.Generator().manual_seed(0)

    def random() -> torch.Tensor:
        return torch.randn(24, 40, generator=generator, dtype=torch.float64)

    # Large and uneven enough that factored or normalised updates show, with rows and columns of unequal scale. Of much
    # the same direction in every step, as estimates of the best learning rate expect of training.
    values = [random() * torch.logspace(-2, 1, 40) for _ in range(count)]
    gradients = []
    for index in range(count):
        scale, direction = torch.logspace(1 + index, -2 + index, 24)[:, None], random()
        gradients.append([(direction + random() / 2) * scale for _ in range(_STEPS)])
    for value, (first, *_) in zip(values, gradients, strict=True):
        # At a right angle to the parameter, in which some (AdamP) see that its scale does not matter.
        first -= value * ((first * value).sum() / value.square().sum())
    return values, gradients


def _updated(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """What one optimizer makes of parameters with these values."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    trial = _twin(optimizer, group, parameters)
    for step in range(_STEPS):
        for parameter, of_parameter in zip(parameters, gradients, strict=True):
            parameter.grad = of_parameter[step].clone()
        trial.step()
    return [parameter.detach() for parameter in parameters]


def _twin(optimizer: torch.optim.Optimizer, group: dict, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    # An optimizer with state from the start (Adagrad) begins with the same here: constant, so any element will do.
    # Of a parameter with dims, where what is kept per element can be told from what is kept once.
    owner = next((p for p in group["params"] if optimizer.state.get(p) and p.dim()), None)
    state: dict[torch.Tensor, dict[str, Any]] = {}
    if owner is not None:
        like = optimizer.state[owner]
        state = {p: {name: _initial(value, owner, p) for name, value in like.items()} for p in parameters}
    options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    lr = options.get("lr")
    if torch.is_tensor(lr):
        options["lr"] = torch.full_like(lr, 1e-2)  # reading it could stall a device
    elif lr == 0:  # a warm-up may begin so, and an optimizer that does nothing proves nothing
        options["lr"] = 1e-2
    return twin(optimizer, [{**options, "params": parameters}], state)


def _initial(value: Any, owner: torch.Tensor, parameter: nn.Parameter) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != owner.shape:
        return value.detach().clone()
    return torch.full_like(parameter.detach(), float(value.detach().reshape(-1)[0]))
