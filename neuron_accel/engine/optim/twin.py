# SPDX-License-Identifier: Apache-2.0
"""Copies of an optimizer for other parameters, and its state in terms of the original parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import nn

from neuron_accel.engine.sharding.parameters import ParameterRecord

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run

# ---- Rebuilding an optimizer for other parameters: shards or rewritten versions of those it was created with ---------
# Some optimizers have state from the start (Adagrad), and the constructors of users' classes are unknown. So no
# optimizer is constructed from its class: it is either copied for other parameters, with its state sharded like them,
# or, if its constructor was recorded by :func:`make_optimizer_constructor_lazy`, constructed at the end. The following
# attributes are not copied: a scheduler wraps `step` on the original object, and the others are set.
_OWN = ("step", "state", "param_groups", "_neuron_accel_recipe")


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


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Copies the hyper-parameters of the groups of ``source`` to those of ``target``, except options that contain
    parameters."""
    for theirs, mine in zip(source.param_groups, target.param_groups, strict=True):
        mine.update({k: v for k, v in theirs.items() if k not in ("params", "param_names") and not names_parameters(v)})


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


def names_parameters(value: Any) -> bool:
    """Returns whether ``value`` is a collection of parameters, or of values by parameter."""
    return isinstance(value, (Mapping, Set, list, tuple)) and any(isinstance(entry, nn.Parameter) for entry in value)


def knows_by_parameter(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the name of an attribute or option of ``optimizer`` that contains parameters or values by parameter, or
    None."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [item for item in vars(optimizer).items() if item[0] not in _OWN]
    named += [item for group in optimizer.param_groups for item in group.items() if item[0] != "params"]
    for name, value in named:
        if isinstance(value, (Mapping, Set)) and any(isinstance(key, int) and key in mine for key in value):
            return name
        if names_parameters(value):
            return name
    return None


def translate(optimizer: torch.optim.Optimizer, stand_ins: Mapping[torch.Tensor, Sequence[StandIn]]) -> None:
    """Adds stand-ins to the collections in attributes and options of an optimizer that contain parameters, or values by
    parameter or by the ``id`` of a parameter."""
    for name, value in vars(optimizer).items():
        if name not in _OWN:
            vars(optimizer)[name] = translated(value, stand_ins)
    for group in optimizer.param_groups:
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


def extend_group(optimizer: torch.optim.Optimizer, index: int, parameters: Sequence[torch.Tensor]) -> None:
    """Adds parameters, for which it has no state yet, to a group of an optimizer."""
    own = getattr(optimizer, "extend_group", None)
    if own is not None:
        own(index, parameters)
    else:
        optimizer.param_groups[index]["params"].extend(parameters)


def put_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, entries: dict[str, Any]) -> None:
    """Sets an optimizer's state of a parameter. Entries have the parameter's shape or are scalars."""
    own = getattr(optimizer, "put_state", None)
    if own is not None:
        own(parameter, entries)
    else:
        optimizer.state[parameter] = entries


def twin(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    state: Mapping[torch.Tensor, dict[str, Any]] | None = None,
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class and options for other groups of parameters.

    Args:
        optimizer: the optimizer, which is not changed.
        groups: groups with all their options.
        state: initial state. A deferred optimizer gets the state from its constructor instead.
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


# ---- The state of an optimizer in terms of the parameters of the original model --------------------------------------
# A plugin that shards an optimizer over ranks describes the state of each rank by FQN and layout. With that a
# checkpoint can store the state and load it on any mesh.
@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """The state of one parameter in a rank's optimizer.

    Args:
        record: the parameter.
        parameter: the tensor that the optimizer updates, and the key of its state. Its elements are a range of the
            parameter's flattened shard on this rank.
        start, stop: that range.
        group: index of the parameter's group.
        axes: axes of the mesh along which ranks hold other ranges of the same shard.
        master: whether ``parameter`` has values of its own, of higher precision than those in the model.
        whole: whether the state is that of the full parameter, equal on all ranks along the axes over which it is
            sharded.
        key, store: where the state is stored: ``store[key]``; by default ``optimizer.state[parameter]``.
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

    def __repr__(self) -> str:
        master = ", master weights" if self.master else ""
        return f"<{type(self).__name__}: elements {self.start} to {self.stop} of {self.record!r}{master}>"

    def read_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the entries of the state in ``optimizer``; empty before the first step."""
        store = optimizer.state if self.store is None else self.store
        return store.get(self.parameter if self.key is None else self.key, {})

    def new_state(self, optimizer: Any) -> dict[str, Any]:
        """Replaces the entries of the state by an empty dict, and returns it."""
        store = optimizer.state if self.store is None else self.store
        entries = store[self.parameter if self.key is None else self.key] = {}
        return entries

    def drop_state(self, optimizer: Any) -> None:
        """Removes the state, as before the first step."""
        store = optimizer.state if self.store is None else self.store
        store.pop(self.parameter if self.key is None else self.key, None)

    def take_weights(self, run: Run) -> None:
        """Copies the model's weights into ``parameter``, if it is separate from the model's parameter."""
        current = self.record.current
        if current is None or current is self.parameter:
            return
        with torch.no_grad():
            kept = self.record.weights
            if kept is None:
                # A lazy device would compile a graph for each slice.
                values = run.backend.to_host(current) if run.backend.is_lazy else current.detach()
                part = values.reshape(-1)[self.start : self.stop]
            else:
                part = kept.tensor[self.start - kept.start : self.stop - kept.start]
            if missing := self.parameter.numel() - part.numel():  # on lazy devices shards have padding at their end
                part = nn.functional.pad(part, (0, missing))
            self.parameter.copy_(part.view(self.parameter.shape))


@dataclass(frozen=True)
class ShardedState:
    """A value in a plugin's ``checkpoint_state`` that is sharded like the parameters, such as an outer momentum or an
    average of the weights. It can be loaded on any mesh: ``load_checkpoint_state`` receives an object of this class
    with this rank's shards, on the CPU.

    Args:
        tensors: this rank's shards by FQN, each of the shape of the parameter on this rank and of any dtype.
        model: position in ``run.models`` of the model whose parameters these are.
    """

    tensors: Mapping[str, torch.Tensor]
    model: int = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self.tensors)} tensors of model {self.model}>"


@dataclass(frozen=True)
class ReplicaState:
    """A value in a plugin's ``checkpoint_state`` that differs between replicas, see ``AxisKind.REPLICA``, and is equal
    on all ranks of a replica. ``load_checkpoint_state`` receives an object of this class with the value of its replica.

    Args:
        value: plain values and tensors, or a :class:`ShardedState`.
    """

    value: Any

    def __repr__(self) -> str:
        value = self.value
        shown = repr(value) if isinstance(value, (bool, int, float, str, ShardedState)) else type(value).__name__
        return f"{type(self).__name__}({shown})"


@runtime_checkable
class ShardedOptimizer(Protocol):
    """Protocol of optimizers that update shards of parameters."""

    state: dict[torch.Tensor, dict]
    param_groups: list[dict]

    def state_pieces(self) -> list[StatePiece]:
        """Returns this rank's state, one entry for each parameter."""
        ...


def take_weights(optimizer: Any, run: Run) -> None:
    """Copies the model's weights to the tensors that an optimizer updates, after a plugin has changed them in place.
    Needed for ZeRO-1, which updates shards of its own, and for master weights.

    Args:
        optimizer: the optimizer as hooks receive it, below Accelerate's wrapper.
        run: the run.
    """
    for piece in optimizer.state_pieces() if isinstance(optimizer, ShardedOptimizer) else ():
        piece.take_weights(run)
