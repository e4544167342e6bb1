"""The same optimizer for other parameters, and its state in terms of the original parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from neuron_accel.engine.sharding.parameters import ParameterRecord

# ---- Making an optimizer anew for other parameters: pieces of the ones it was built with, or their rewritten shards
# Some optimizers keep state from the moment they are built (Adagrad), some users' classes have constructors nobody
# knows. So an optimizer is never called into being by name: it is either copied around other parameters, its state
# divided along with them, or, where its constructor was recorded by :func:`make_optimizer_constructor_lazy`, built
# for real at last.
# Left out of a copy: a scheduler wraps `step` on the object it was given, and the others are set anew.
_OWN = ("step", "state", "param_groups", "_neuron_accel_recipe")


@dataclass(frozen=True)
class Recipe:
    """How to build an optimizer that was only promised."""

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]

    def build(self, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        return self.cls([dict(group) for group in groups], **self.arguments)  # type: ignore[call-arg]


def make_optimizer_constructor_lazy(cls: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """A stand-in for ``cls`` whose products hold no state for the parameters they are given.

    ``prepare`` builds the real thing for what is left of the parameters on each rank. Until then the product is an
    optimizer like any other: its groups can be edited, and schedulers can be built on it.

    Args:
        cls: the optimizer's class. Its first argument are the parameters; all others are given by keyword.

    Example::

        optimizer = make_optimizer_constructor_lazy(torch.optim.AdamW)(model.parameters(), lr=1e-4)
        model, optimizer = accelerator.prepare(model, optimizer)
    """

    def promise(params: Iterable[Any], **arguments: Any) -> torch.optim.Optimizer:
        given = list(params)
        groups = [dict(g) for g in given] if given and isinstance(given[0], dict) else [{"params": given}]
        for group in groups:
            parameters = group["params"]
            group["params"] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
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
    """How to build an optimizer made by :func:`make_optimizer_constructor_lazy`; None for one that is real."""
    return getattr(optimizer, "_neuron_accel_recipe", None)


def keep_promise(optimizer: torch.optim.Optimizer) -> None:
    """Gives a promised optimizer the state it would have had from the start, for the parameters that it holds now."""
    recipe = recipe_of(optimizer)
    if recipe is not None:
        optimizer.state = recipe.build(optimizer.param_groups).state
        del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Gives the groups of ``target`` the hyper-parameters of those of ``source``."""
    for theirs, mine in zip(source.param_groups, target.param_groups, strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})


def twin(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[torch.Tensor, dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options around other groups of parameters.

    Args:
        optimizer: it is left alone.
        groups: groups with all their options.
        state: state to begin with. A promised optimizer begins with what its constructor makes.
    """
    recipe = recipe_of(optimizer)
    if recipe is not None:
        return recipe.build(groups)
    result = object.__new__(type(optimizer))
    result.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key not in _OWN})
    result.state = defaultdict(dict)
    result.state.update(state or {})
    result.param_groups = groups
    return result


# ---- How the state of an optimizer belongs to the parameters of the original model -----------------------------------
# Whoever divides an optimizer over ranks says what each rank holds, in terms of the one identity that parameters
# have: their FQN and layout. That is all a checkpoint needs in order to store the state of any division and to load
# it into another.
@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """What a rank's optimizer holds of one parameter.

    Args:
        record: the parameter.
        parameter: what the optimizer updates, and the key of its state; its elements are a run of those of the
            parameter's shard on this rank, flattened.
        start, stop: that run.
        group: index of the parameter's group.
        axes: axes of the mesh along which ranks hold other runs of the same shard.
        master: whether ``parameter`` has values of its own, more exact than those in the model.
        whole: whether the state is that of the whole parameter, equal on all ranks along the axes that cut it.
        key, store: where the state lies: ``store[key]``; by default ``optimizer.state[parameter]``.
    """

    record: ParameterRecord
    parameter: nn.Parameter
    start: int
    stop: int
    group: int
    axes: tuple[str, ...] = ()
    master: bool = False
    whole: bool = False
    key: torch.Tensor | None = None
    store: MutableMapping[torch.Tensor, dict[str, Any]] | None = None

    def read_state(self, optimizer: Any) -> dict[str, Any]:
        """The entries that ``optimizer``, which holds this piece, has for it; empty before the first step."""
        store = optimizer.state if self.store is None else self.store
        return store.get(self.parameter if self.key is None else self.key, {})

    def new_state(self, optimizer: Any) -> dict[str, Any]:
        """An empty dict in place of the entries so far."""
        store = optimizer.state if self.store is None else self.store
        entries = store[self.parameter if self.key is None else self.key] = {}
        return entries

    def drop_state(self, optimizer: Any) -> None:
        """As before the first step."""
        store = optimizer.state if self.store is None else self.store
        store.pop(self.parameter if self.key is None else self.key, None)


@runtime_checkable
class DividedOptimizer(Protocol):
    """An optimizer that holds pieces of parameters."""

    state: dict[torch.Tensor, dict]
    param_groups: list[dict]

    def state_pieces(self) -> list[StatePiece]:
        """This rank's pieces."""
        ...
