# SPDX-License-Identifier: Apache-2.0
"""Copies of an optimizer for other parameters: shards or rewritten versions of those that it was created with."""

from __future__ import annotations

import copy
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron_accel.engine.optim.state import (
    all_groups,
    each_optimizer,
    is_state_of,
    matching_group,
    names_parameters,
    state_of,
)
from neuron_accel.errors import UsageError

# Some optimizers have state from the start (Adagrad), and the constructors of users' classes are unknown. So no
# optimizer is constructed from its class: it is either copied for other parameters, with its state sharded like them,
# or, if its constructor was recorded by :func:`make_optimizer_constructor_lazy`, constructed at the end. The following
# attributes are not copied: a scheduler wraps `step` on the original object, and the others are set.
STRUCTURE = ("step", "state", "param_groups", "_neuron_accel_recipe")


@dataclass(frozen=True)
class Recipe:
    """Class and arguments of an optimizer whose construction is deferred."""

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]

    def build(self, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        return self.cls([dict(group) for group in groups], **self.arguments)  # type: ignore[call-arg]


class _Groups(torch.optim.Optimizer):
    """Checks and completes parameter groups as torch does. Never steps."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("it only holds groups")


def checked_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns parameter groups in the form of ``Optimizer.param_groups``.

    Raises:
        ValueError, TypeError: as torch does, for invalid parameters.
    """
    return _Groups(params).param_groups


def make_optimizer_constructor_lazy(cls: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Returns a replacement for ``cls`` whose instances have no state for their parameters.

    ``prepare`` constructs the optimizer for each rank's shards. Until then the instance is an optimizer like any other:
    its groups can be edited, and schedulers can use it.

    Args:
        cls: the optimizer's class. Its first argument is the parameters; all others are given by keyword.

    Raises:
        ValueError, TypeError: as torch does, when the replacement is called with invalid parameters.

    Example::

        optimizer = make_optimizer_constructor_lazy(torch.optim.AdamW)(model.parameters(), lr=1e-4)
        model, optimizer = accelerator.prepare(model, optimizer)
    """

    def promise(params: Iterable[Any], **arguments: Any) -> torch.optim.Optimizer:
        groups = checked_groups(params)
        dummies = [[nn.Parameter(torch.empty(1)) for _ in group["params"]] for group in groups]
        optimizer = cls([{**g, "params": d} for g, d in zip(groups, dummies, strict=True)], **arguments)  # type: ignore[call-arg]
        optimizer.state = defaultdict(dict)
        for group, mine in zip(groups, optimizer.param_groups, strict=True):
            mine["params"] = group["params"]
        optimizer._neuron_accel_recipe = Recipe(cls, arguments)  # type: ignore[attr-defined]
        return optimizer

    promise.__name__ = promise.__qualname__ = f"Lazy{cls.__name__}"
    return promise


def recipe_of(optimizer: torch.optim.Optimizer) -> Recipe | None:
    """Returns the recipe of an optimizer made by :func:`make_optimizer_constructor_lazy`; None for any other."""
    return getattr(optimizer, "_neuron_accel_recipe", None)


def build_deferred(optimizer: torch.optim.Optimizer) -> None:
    """Constructs the state of a deferred optimizer for the parameters that it holds now."""
    recipe = recipe_of(optimizer)
    if recipe is not None:
        optimizer.state = recipe.build(optimizer.param_groups).state
        del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]


# ---- attributes of parameters, and values that an optimizer stores by parameter --------------------------------------
@dataclass(frozen=True, eq=False)
class StandIn:
    """A tensor that an optimizer updates instead of a parameter, such as a shard of it.

    Args:
        parameter: the tensor that is updated.
        cut: returns the part of a tensor, in the shape of the original parameter, that corresponds to ``parameter``.
    """

    parameter: torch.Tensor
    cut: Callable[[torch.Tensor], torch.Tensor]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {tuple(self.parameter.shape)} of {self.parameter.dtype}>"

    def value(self, value: Any, original: torch.Tensor) -> Any:
        """Converts a value of ``original`` to this parameter: a tensor of the same shape is cut, other values are
        returned unchanged."""
        cuts = isinstance(value, torch.Tensor) and value.dim() and value.shape == original.shape
        return self.cut(value) if cuts else value

    def take_attributes(self, original: torch.Tensor) -> None:
        """Copies the attributes that were set on ``original``, such as ``weight.decays = False``."""
        for name, value in vars(original).items():
            vars(self.parameter)[name] = self.value(value, original)


def attributes_of(parameter: torch.Tensor) -> tuple[tuple[str, str], ...]:
    """Returns the attributes that were set on a parameter, in a form that can be compared with those of another."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, repr(value) if isinstance(value, plain) else f"{type(value).__name__} {id(value)}")
        for name, value in sorted(vars(parameter).items())
    )


def knows_by_parameter(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the name of an attribute or option of ``optimizer`` that contains parameters or values by parameter, or
    None."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    everyone = each_optimizer(optimizer)
    named = [item for each in everyone for item in vars(each).items() if item[0] not in STRUCTURE]
    named = [item for item in named if not is_state_of(item[1], everyone)]
    named += [item for group in all_groups(optimizer) for item in group.items() if item[0] != "params"]
    for name, value in named:
        if isinstance(value, (Mapping, Set)) and any(isinstance(key, int) and key in mine for key in value):
            return name
        if names_parameters(value):
            return name
    return None


def translate(optimizer: torch.optim.Optimizer, stand_ins: Mapping[torch.Tensor, Sequence[StandIn]]) -> None:
    """Adds stand-ins to the collections in attributes and options of an optimizer that contain parameters, or values by
    parameter or by the ``id`` of a parameter. So for those that it holds."""
    everyone = each_optimizer(optimizer)
    for each in everyone:
        for name, value in vars(each).items():
            if name not in STRUCTURE and not is_state_of(value, everyone):
                vars(each)[name] = translated(value, stand_ins)
    for group in all_groups(optimizer):
        for name, value in group.items():
            if name not in ("params", "param_names"):
                group[name] = translated(value, stand_ins)


def translated(value: Any, stand_ins: Mapping[torch.Tensor, Sequence[StandIn]]) -> Any:
    """Returns ``value``, or, if it is a collection that contains some of these parameters, a copy that also contains
    their stand-ins."""
    if not isinstance(value, (Mapping, Set, list, tuple)) or not value:
        return value

    # By id: a dict would compare a tensor with a number of the same hash, element by element.
    by_id = {id(parameter): (parameter, mine) for parameter, mine in stand_ins.items()}

    def found(entry: Any) -> tuple[torch.Tensor, Sequence[StandIn]] | None:
        return by_id.get(entry if type(entry) is int else id(entry))

    known = [entry for entry in value if isinstance(entry, nn.Parameter) or type(entry) is int]
    known = [entry for entry in known if found(entry) is not None]
    if not known:
        return value

    def keys(entry: Any) -> Iterator[tuple[Any, StandIn, torch.Tensor]]:
        original, mine = by_id[entry if type(entry) is int else id(entry)]
        for one in mine:
            yield (id(one.parameter) if type(entry) is int else one.parameter), one, original

    if isinstance(value, MutableMapping):
        result = copy.copy(value)
        for entry in known:
            for key, one, original in keys(entry):
                result[key] = one.value(value[entry], original)
        return result
    as_given: Any = type(value)
    if isinstance(value, Set):
        return as_given([*value, *(key for entry in known for key, *_ in keys(entry))])
    if type(value) in (list, tuple):
        return as_given(k for e in value for k in ([key for key, *_ in keys(e)] if found(e) is not None else [e]))
    return value


def twin(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[torch.Tensor, Mapping[str, Any]] | None = None,
    *,
    of: Sequence[dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class and options for other groups of parameters. The optimizers that it holds
    are copied too, for the same groups.

    Args:
        optimizer: the optimizer, which is not changed.
        groups: groups with all their options.
        state: initial state, as of :func:`state_of`. A deferred optimizer gets the state from its constructor instead.
        of: the groups that they replace; by default all groups of ``optimizer``.

    Raises:
        UsageError: if it holds an optimizer in a way that is not understood.
    """
    recipe = recipe_of(optimizer)
    if recipe is not None:
        return recipe.build(groups)
    copies = _Copies(optimizer, groups, optimizer.param_groups if of is None else of)
    for parameter, entries in (state or {}).items():
        state_of(copies.result)[parameter] = dict(entries)
    return copies.result


class _Copies:
    """The copies of an optimizer, and of what it shares with those that it holds.

    Args:
        optimizer, groups, of: see :func:`twin`.

    Attributes:
        result: the copy of ``optimizer``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], of: Sequence[dict[str, Any]]
    ) -> None:
        self._optimizer, self._everyone = optimizer, each_optimizer(optimizer)
        if len(of) != len(groups) and len(self._everyone) > 1:
            raise UsageError(
                f"{type(optimizer).__name__} holds another optimizer, so its groups cannot be split or joined.",
                where="twin(optimizer, groups)",
                why=f"{len(groups)} groups replace {len(of)}, and which of them are the inner optimizer's is not known",
                fix="pass one group for each that it has",
            )
        self._new = {id(old): new for old, new in zip(of, groups, strict=len(self._everyone) > 1)}
        self._copies: dict[int, tuple[Any, Any]] = {id(optimizer.param_groups): (optimizer.param_groups, groups)}
        for each in self._everyone:
            self._add(each, object.__new__(type(each)))
            self._add(each.state, defaultdict(dict))
        for held in self._everyone[1:]:
            self._add(held.param_groups, [mine for mine in map(self._group, held.param_groups) if mine is not None])
        for each in self._everyone:
            own = {name: value for name, value in vars(each).items() if name not in ("step", "_neuron_accel_recipe")}
            vars(self._of(each)).update({name: self._copied(value) for name, value in own.items()})
        self.result: torch.optim.Optimizer = self._of(optimizer)

    def _add(self, value: Any, copied: Any) -> None:
        self._copies.setdefault(id(value), (value, copied))  # with the original, whose id is then not used again

    def _of(self, value: Any) -> Any:
        known, copied = self._copies.get(id(value), (None, None))
        return copied if known is value else None

    def _group(self, group: dict[str, Any]) -> dict[str, Any] | None:
        """Returns the group of a held optimizer for the new parameters; None if they are those of other groups."""
        mine = matching_group(group, self._optimizer.param_groups, self._optimizer)
        new = self._new.get(id(mine))
        if new is None or mine is group:
            return new
        self._add(group, {**group, "params": new["params"]})
        return self._of(group)

    def _copied(self, value: Any) -> Any:
        """Returns the copy of an attribute's value, if it is or contains one of these; else the value."""
        copied = self._of(value)
        if copied is not None:
            return copied
        if isinstance(value, types.MethodType) and self._of(value.__self__) is not None:
            return types.MethodType(value.__func__, self._of(value.__self__))
        if type(value) in (list, tuple) and any(self._of(entry) is not None for entry in value):
            return type(value)(self._copied(entry) for entry in value)
        if type(value) is dict and any(self._of(entry) is not None for entry in value.values()):
            return {key: self._copied(entry) for key, entry in value.items()}
        if _refers_to(value, self._everyone):
            raise UsageError(
                f"{type(self._optimizer).__name__} holds a {type(value).__name__} that refers to an optimizer.",
                where="prepare(optimizer)",
                why="it is copied for the shards of this rank, and that object would still act on the original one",
                fix="train without sharding, or let the optimizer hold no such object",
            )
        return value


def _refers_to(value: Any, optimizers: Sequence[Any]) -> bool:
    inside = () if isinstance(value, (type, types.ModuleType)) else getattr(value, "__dict__", {}).values()
    return any(entry is each for entry in inside for each in optimizers)
