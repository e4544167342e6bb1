# SPDX-License-Identifier: Apache-2.0
"""Tests whether an optimizer is element-wise, or at least updates each parameter independently.

Only then can a parameter, or a list of parameters, be sharded over ranks. A list of known classes would not cover
classes of users, so the optimizer is tested instead: a few steps on small matrices with one optimizer, and with several
independent ones, must give the same result.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from neuron_accel.engine.optim.state import (
    all_groups,
    each_optimizer,
    is_state_of,
    names_parameters,
    state_of,
)
from neuron_accel.engine.optim.twin import STRUCTURE, StandIn, attributes_of, translate, twin

_SMALL = (24, 40)
_LARGE = (128, 128)
"""From some size on, optimizers with states of few bits quantize them in blocks, and others factor them. An optimizer
is tested with it once it has passed the test with a small matrix: one that uses full parameters could take minutes."""
_STEPS = 3
_KINDS = 4
_TOLERANCE = 1e-3
"""Tolerance relative to the largest update of an element. Optimizers that use full parameters differ by far more."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether updating the shards of a parameter, each by a separate optimizer, gives the same result as
    updating the full parameter, with the optimizer's own options.

    Args:
        optimizer: the optimizer, which is not changed: a twin of it is tested for each of its groups.
    """
    return why_not_elementwise(optimizer) is None


def why_not_elementwise(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the reason why :func:`is_elementwise` is False, or None if it is True."""
    for group, owner in _kinds(optimizer):
        try:
            agrees = all(
                _agrees(optimizer, group, owner, matrices=1, shape=shape, divide=_flat_pieces)
                for shape in (_SMALL, _LARGE)
            )
        except Exception as error:  # it cannot handle 1-dim parameters (Muon), or fails for another reason
            return f"it failed on small parameters that represent shards: {type(error).__name__}: {error}"
        if not agrees:
            return "its update uses the norm, the shape or blocks of the full parameter, which no rank would hold"
    return None


def _flat_pieces(matrix: torch.Tensor) -> Sequence[torch.Tensor]:
    cut = matrix.numel() // 3 + 7  # not at the end of a block of elements
    return matrix.reshape(-1).split([cut, matrix.numel() - cut])


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether updating parameters with one optimizer each gives the same result as with one for all. This is
    False if the optimizer uses all parameters together (a global norm, an estimate of the best learning rate).

    Args:
        optimizer: as for :func:`is_elementwise`. An optimizer that cannot be tested on matrices is assumed to be
            separable.
    """
    try:
        return all(_agrees(optimizer, group, owner, matrices=2) for group, owner in _kinds(optimizer))
    except Exception:  # it may need a closure (LBFGS)
        return True


def _kinds(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor | None]]:
    """Yields each group with one parameter for every set of attributes that parameters have, a few at most."""
    for group in optimizer.param_groups:
        kinds: dict[Any, torch.Tensor] = {}
        for parameter in sorted(group["params"], key=lambda p: optimizer.state.get(p) is None or not p.dim()):
            kinds.setdefault(attributes_of(parameter), parameter)
            if len(kinds) == _KINDS:
                break
        yield from ((group, owner) for owner in kinds.values() or [None])


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer cannot step without a closure, like LBFGS and SAM, which run forward and backward
    inside a step."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    for group, owner in _kinds(optimizer):
        if not group["params"]:
            continue
        if not _steps(optimizer, group, owner, with_closure=False):
            return _steps(optimizer, group, owner, with_closure=True)
        return False
    return False


def _steps(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], owner: torch.Tensor | None, *, with_closure: bool
) -> bool:
    """Returns whether a step on a small matrix raises no error."""
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def closure() -> torch.Tensor:
        parameter.grad = torch.ones_like(parameter)
        return parameter.detach().sum()

    try:
        trial: Any = _twin(optimizer, group, owner, [parameter])
        closure()
        trial.step(*([closure] if with_closure else []))
    except Exception:
        return False
    return True


def _agrees(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    owner: torch.Tensor | None,
    *,
    matrices: int,
    shape: tuple[int, int] = _SMALL,
    divide: Callable[[torch.Tensor], Sequence[torch.Tensor]] = lambda matrix: [matrix],
) -> bool:
    values, gradients = _examples(matrices, shape)
    together = _updated(optimizer, group, owner, values, gradients)
    apart = []
    for value, of_value in zip(values, gradients, strict=True):
        pieces = list(zip(divide(value), *(divide(g) for g in of_value), strict=True))
        updated = [_updated(optimizer, group, owner, [piece[0]], [piece[1:]])[0] for piece in pieces]
        apart.append(torch.cat(updated, dim=1))
    return all(
        one.shape == other.shape and _is_close(one, other, value)
        for one, other, value in zip(together, apart, values, strict=True)
    )


def _is_close(one: torch.Tensor, other: torch.Tensor, value: torch.Tensor) -> bool:
    """Compares results of :func:`_updated`, relative to the largest update, and the largest value after ``eval``."""
    before = torch.zeros_like(one)
    before[0] = value.reshape(-1)
    errors, sizes = (one - other).abs().amax(dim=1), (one - before).abs().amax(dim=1)
    return bool((errors <= _TOLERANCE * sizes).all())


def _examples(count: int, shape: tuple[int, int] = _SMALL) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Returns matrices, and for each the gradients of all steps. In float64, so that small updates are visible."""
    generator = torch.Generator().manual_seed(0)

    def random() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Large, and with rows and columns of different scale, so that factored or normalised updates differ. Gradients have
    # a similar direction in every step, as estimates of the best learning rate expect.
    values = [random() * torch.logspace(-2, 1, shape[1]) for _ in range(count)]
    gradients = []
    for index in range(count):
        scale, direction = torch.logspace(1 + index, -2 + index, shape[0])[:, None], random()
        gradients.append([(direction + random() / 2) * scale for _ in range(_STEPS)])
    for value, (first, *_) in zip(values, gradients, strict=True):
        # Orthogonal to the parameter, from which some optimizers (AdamP) conclude that its scale does not matter.
        first -= value * ((first * value).sum() / value.square().sum())
    return values, gradients


def _updated(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    owner: torch.Tensor | None,
    values: Sequence[torch.Tensor],
    gradients: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """Returns for each parameter its values after the steps of one optimizer, and after its ``eval`` where it has one,
    ``[1 or 2, elements]``."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    trial = _twin(optimizer, group, owner, parameters)
    for step in range(_STEPS):
        for parameter, of_parameter in zip(parameters, gradients, strict=True):
            parameter.grad = of_parameter[step].clone()
        trial.step()
    rows = [[parameter.detach().clone()] for parameter in parameters]
    switch = getattr(trial, "eval", None)
    if callable(switch):
        switch()
        for row, parameter in zip(rows, parameters, strict=True):
            row.append(parameter.detach())
    return [torch.stack([value.reshape(-1).double() for value in row]) for row in rows]


def _twin(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    owner: torch.Tensor | None,
    parameters: list[nn.Parameter],
) -> torch.optim.Optimizer:
    # An optimizer that has state from the start (Adagrad) begins with equal state here; it is constant, so that any
    # element can be used. The owner is a parameter with dims, so that state per element can be distinguished from
    # scalars. An optimizer may also depend on a parameter's attributes and name, and store values by parameter.
    stand_ins = [StandIn(p, partial(_initial, owner=owner, parameter=p)) for p in parameters if owner is not None]
    state: dict[torch.Tensor, dict[str, Any]] = {}
    known = state_of(optimizer)
    for mine in stand_ins:
        assert owner is not None
        mine.take_attributes(owner)
        if known.get(owner):
            state[mine.parameter] = {n: _initial(v, owner, mine.parameter) for n, v in known[owner].items()}
    trial = twin(optimizer, [{**group, "params": parameters}], state, of=[group])
    everyone = each_optimizer(trial)
    for each in everyone:
        own = {name: v for name, v in vars(each).items() if name not in STRUCTURE and not is_state_of(v, everyone)}
        vars(each).update({name: _apart(value) for name, value in own.items()})
    for options in all_groups(trial):
        _prepare_options(options, group, owner)
    if owner is not None:
        translate(trial, {owner: stand_ins})
    switch = getattr(trial, "train", None)  # a schedule-free optimizer only steps in train mode
    if callable(switch):
        switch()
    return trial


def _prepare_options(options: dict[str, Any], group: Mapping[str, Any], owner: torch.Tensor | None) -> None:
    """Copies the values of the options of a trial, with another learning rate where this one would not do."""
    parameters = options["params"]
    kept = ("params", "lr")
    options.update({k: v if names_parameters(v) else _on_host(v) for k, v in options.items() if k not in kept})
    if "param_names" in options and owner is not None:
        position = next(i for i, p in enumerate(group["params"]) if p is owner)
        options["param_names"] = [group["param_names"][position]] * len(parameters)
    lr = options.get("lr")
    if torch.is_tensor(lr):
        options["lr"] = torch.full(lr.shape, 1e-2, dtype=lr.dtype)  # reading it could stall a device
    elif lr == 0:  # as at the start of a warm-up; without updates the test would always succeed
        options["lr"] = 1e-2


def _initial(value: Any, owner: torch.Tensor, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != owner.shape:
        return _on_host(value)
    first = value.detach().reshape(-1)[0]
    return torch.full_like(parameter.detach(), float(first.real if first.is_complex() else first))


def _apart(value: Any) -> Any:
    """Returns a copy of an attribute that is a tensor, or a list or dict of tensors and plain values, to which a step
    may write; another value as it is."""
    leaves, form = tree_flatten(value)
    plain = (bool, int, float, complex, str, type(None), torch.Tensor)
    if any(isinstance(leaf, nn.Parameter) or not isinstance(leaf, plain) for leaf in leaves) or names_parameters(value):
        return value
    return tree_unflatten([_on_host(leaf) for leaf in leaves], form)


def _on_host(value: Any) -> Any:
    """Returns a copy of a value, a tensor on the host. What a trial left on a lazy device would be in the graph of the
    ranks that have not collected their garbage yet."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
