"""The same optimizer for other parameters, and its state in terms of the original parameters."""

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
# Some optimizers have state from the start (Adagrad), and constructors of users' classes are unknown. So an optimizer
# is never constructed by name: it is either copied around other parameters, with its state sharded like them, or, if
# its constructor was recorded by :func:`make_optimizer_constructor_lazy`, constructed at the end.
# Not copied: a scheduler wraps `step` on the original object, and the others are set anew.
_OWN = ("step", "state", "param_groups", "_neuron_accel_recipe")


@dataclass(frozen=True)
class Recipe:
    """How to construct a deferred optimizer."""

    cls: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]

    def build(self, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        return self.cls([dict(group) for group in groups], **self.arguments)  # type: ignore[call-arg]


class _Groups(torch.optim.Optimizer):
    """Parameter groups, checked and completed as torch does. Holds nothing else, and never steps."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        raise NotImplementedError("it only holds groups")


def checked_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups, as an optimizer has them.

    Raises:
        ValueError, TypeError: what torch raises for parameters that no optimizer can hold.
    """
    return _Groups(params).param_groups


def make_optimizer_constructor_lazy(cls: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """A replacement for ``cls`` whose instances hold no state for their parameters.

    ``prepare`` constructs the optimizer for each rank's shards. Until then the instance is an optimizer like any other:
    its groups can be edited, and schedulers can use it.

    Raises:
        ValueError, TypeError: what torch raises for ``params`` that no optimizer can hold.

    Args:
        cls: the optimizer's class. Its first argument is the parameters; all others are given by keyword.

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
    """How to build an optimizer made by :func:`make_optimizer_constructor_lazy`; None for any other."""
    return getattr(optimizer, "_neuron_accel_recipe", None)


def build_deferred(optimizer: torch.optim.Optimizer) -> None:
    """Gives a deferred optimizer the state it would have had from the start, for the parameters that it holds now."""
    recipe = recipe_of(optimizer)
    if recipe is not None:
        optimizer.state = recipe.build(optimizer.param_groups).state
        del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]


def copy_options(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Gives the groups of ``target`` the hyper-parameters of those of ``source``, except options that name
    parameters."""
    for theirs, mine in zip(source.param_groups, target.param_groups, strict=True):
        mine.update({k: v for k, v in theirs.items() if k not in ("params", "param_names") and not names_parameters(v)})


# ---- what an optimizer may know about a parameter besides its values -------------------------------------------------
@dataclass(frozen=True, eq=False)
class StandIn:
    """What an optimizer updates instead of a parameter, or of a shard of it.

    Args:
        parameter: the tensor that is updated.
        cut: takes the slice that belongs to it from a tensor in the shape of the original parameter.
    """

    parameter: torch.Tensor
    cut: Callable[[torch.Tensor], torch.Tensor]

    def value(self, value: Any, original: torch.Tensor) -> Any:
        """A value that belongs to ``original``, converted to this parameter."""
        cuts = isinstance(value, torch.Tensor) and value.dim() and value.shape == original.shape
        return self.cut(value) if cuts else value

    def take_attributes(self, original: torch.Tensor) -> None:
        """Copies the attributes that were set on ``original``, such as ``weight.decays = False``."""
        for name, value in vars(original).items():
            vars(self.parameter)[name] = self.value(value, original)


def attributes_of(parameter: torch.Tensor) -> tuple[tuple[str, str], ...]:
    """The attributes that were set on a parameter, to tell whether another has the same."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (name, repr(value) if isinstance(value, plain) else f"{type(value).__name__} {id(value)}")
        for name, value in sorted(vars(parameter).items())
    )


def names_parameters(value: Any) -> bool:
    """Whether an option is a collection of parameters, or of values by parameter."""
    return isinstance(value, (Mapping, Set, list, tuple)) and any(isinstance(entry, nn.Parameter) for entry in value)


def knows_by_parameter(optimizer: torch.optim.Optimizer) -> str | None:
    """The name of an attribute or option that stores values by parameter, or lists parameters."""
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
    """Adds stand-ins to what an optimizer stores by parameter: in its attributes and options, under the parameter
    itself or its ``id``."""
    for name, value in vars(optimizer).items():
        if name not in _OWN:
            vars(optimizer)[name] = translated(value, stand_ins)
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name not in ("params", "param_names"):
                group[name] = translated(value, stand_ins)


def translated(value: Any, stand_ins: Mapping[torch.Tensor, Sequence[StandIn]]) -> Any:
    """``value``, or if it is a collection that names some of these parameters, a copy that also names their
    stand-ins."""
    if not isinstance(value, (Mapping, Set, list, tuple)) or not value:
        return value

    # By id throughout: a dict would compare a tensor with a number of the same hash, element by element.
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
    """Adds further parameters to a group of an optimizer, which has no state for them yet."""
    own = getattr(optimizer, "extend_group", None)
    if own is not None:
        own(index, parameters)
    else:
        optimizer.param_groups[index]["params"].extend(parameters)


def put_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, entries: dict[str, Any]) -> None:
    """Gives an optimizer the state of a parameter, with entries of the parameter's shape or of none."""
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
    """An optimizer of the same class and options around other groups of parameters.

    Args:
        optimizer: unchanged.
        groups: groups with all their options.
        state: state to begin with. A deferred optimizer begins with the state from its constructor.
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
# A plugin that shards an optimizer over ranks describes what each rank holds by FQN and layout. That is all a
# checkpoint needs to store the state and to load it on any mesh.
@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """The state that a rank's optimizer holds for one parameter.

    Args:
        record: the parameter.
        parameter: what the optimizer updates, and the key of its state; its elements are a range of the parameter's
            shard on this rank, flattened.
        start, stop: that range.
        group: index of the parameter's group.
        axes: axes of the mesh along which ranks hold other ranges of the same shard.
        master: whether ``parameter`` has values of its own, of higher precision than those in the model.
        whole: whether the state is that of the full parameter, equal on all ranks along the axes of its cuts.
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

    def take_weights(self, run: Run) -> None:
        """Copies the model's weights into what the optimizer updates, if that is separate."""
        current = self.record.current
        if current is None or current is self.parameter:
            return
        with torch.no_grad():
            # A lazy device would compile a graph for each slice.
            values = run.backend.to_host(current) if run.backend.is_lazy else current.detach()
            part = values.reshape(-1)[self.start : self.stop]
            if missing := self.parameter.numel() - part.numel():  # on lazy devices they end with padding
                part = nn.functional.pad(part, (0, missing))
            self.parameter.copy_(part.view(self.parameter.shape))


@dataclass(frozen=True)
class ShardedState:
    """A value in a plugin's ``checkpoint_state`` that is sharded like the parameters: an outer momentum, or an average
    of the weights. A checkpoint stores it in slices, and any mesh loads it: ``load_checkpoint_state`` receives an
    object of this class with this rank's shards, on the CPU.

    Args:
        tensors: by FQN; each has the shape that the parameter has on this rank, and any dtype. A rank provides those of
            parameters that it holds.
        model: whose parameters: the position in ``run.models``.
    """

    tensors: Mapping[str, torch.Tensor]
    model: int = 0


@dataclass(frozen=True)
class ReplicaState:
    """A value in a plugin's ``checkpoint_state`` of which every replica has its own, see ``AxisKind.REPLICA``; within a
    replica it is equal on every rank. ``load_checkpoint_state`` receives an object of this class with the replica's.

    Args:
        value: plain values and tensors, or a :class:`ShardedState`.
    """

    value: Any


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer that holds shards of parameters."""

    state: dict[torch.Tensor, dict]
    param_groups: list[dict]

    def state_pieces(self) -> list[StatePiece]:
        """This rank's state, one entry for each parameter."""
        ...


def take_weights(optimizer: Any, run: Run) -> None:
    """Makes an optimizer continue from the model's weights, after a plugin has changed them in place: ZeRO-1 updates
    its own shards, and mixed precision master weights.

    Args:
        optimizer: as hooks receive it, below Accelerate's wrapper.
        run: the run.
    """
    for piece in optimizer.state_pieces() if isinstance(optimizer, ShardedOptimizer) else ():
        piece.take_weights(run)
