# SPDX-License-Identifier: Apache-2.0
"""What an optimizer has: groups of parameters with options, state, and maybe other optimizers that it holds, as SAM and
Lookahead do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import nn

from neuron_accel.errors import ParameterError, UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord

_State: TypeAlias = MutableMapping[torch.Tensor, MutableMapping[str, Any]]


def held_optimizers(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers in the attributes of ``optimizer``, and in lists and dicts there, and the ones in these.

    Returns:
        the optimizers by the path of attributes to them, ``"base.optimizer"``; without ``optimizer`` itself.
    """
    found: dict[str, Any] = {}
    known = {id(optimizer)}

    def search(owner: Any, path: str) -> None:
        for name, value in _entries(vars(owner), path):
            if _is_optimizer(value) and id(value) not in known:
                known.add(id(value))
                found[name] = value
                search(value, f"{name}.")

    search(optimizer, "")
    return found


def _entries(attributes: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        yield f"{path}{name}", value
        if type(value) in (list, tuple):
            yield from ((f"{path}{name}.{index}", entry) for index, entry in enumerate(value))
        elif isinstance(value, dict) and name != "state":
            yield from ((f"{path}{name}.{key}", entry) for key, entry in value.items() if isinstance(key, str))


def _is_optimizer(value: Any) -> bool:
    if isinstance(value, torch.optim.Optimizer):
        return True
    if isinstance(value, (torch.Tensor, nn.Module, type)) or not hasattr(value, "step"):
        return False
    return isinstance(getattr(value, "param_groups", None), list) and isinstance(getattr(value, "state", None), Mapping)


def each_optimizer(optimizer: Any) -> list[Any]:
    """Returns ``optimizer`` and those that it holds."""
    return [optimizer, *held_optimizers(optimizer).values()]


def all_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the groups of ``optimizer`` and of those that it holds, each once; first its own."""
    return list({id(group): group for each in each_optimizer(optimizer) for group in each.param_groups}.values())


def matching_group(group: Mapping[str, Any], groups: Sequence[dict[str, Any]], owner: Any) -> dict[str, Any]:
    """Returns which of ``groups``, those of ``owner``, is a held optimizer's ``group`` or has its parameters.

    Raises:
        UsageError: if there is none.
    """
    for mine in groups:
        if mine is group or list(map(id, mine["params"])) == list(map(id, group["params"])):
            return mine
    raise UsageError(
        f"{type(owner).__name__} holds an optimizer whose parameter groups are others than its own.",
        where="prepare(optimizer)",
        why="it is copied for the shards of this rank, and it is unknown which shards that optimizer would update",
        fix="let both have the same groups, as in `self.param_groups = self.base_optimizer.param_groups`",
    )


class SharedGroup(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc,metaclass]  # some ask for a dict
    """A parameter group of a twin: its options are those of the user's group, its parameters its own.

    The memory of the base class stays empty. A dict whose iterator is overridden is unpacked by its methods.

    Args:
        owner: the user's optimizer, which may get other groups (``load_state_dict``).
        index: position of the user's group.
        own: the parameters, their names, and options that contain parameters.
    """

    def __init__(self, owner: Any, index: int, own: dict[str, Any]) -> None:
        self.owner, self.index, self.own = owner, index, own

    def _place(self, name: str) -> dict[str, Any]:
        return self.own if name in self.own else self.owner.param_groups[self.index]

    def __getitem__(self, name: str) -> Any:
        own = self.own
        return own[name] if name in own else self.owner.param_groups[self.index][name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._place(name)[name] = value

    def __delitem__(self, name: str) -> None:
        del self._place(name)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self.owner.param_groups[self.index], *self.own]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(self.copy())

    def __or__(self, other: Any) -> dict[str, Any]:
        return self.copy() | other

    def __ror__(self, other: Any) -> dict[str, Any]:
        return other | self.copy()

    def __ior__(self, other: Any) -> SharedGroup:  # the base class would keep them to itself
        for name, value in dict(other).items():
            self[name] = value
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return SharedGroup, (self.owner, self.index, self.own)

    def copy(self) -> dict[str, Any]:
        """Returns a dict with all options and parameters."""
        return {name: self[name] for name in self}


def share_options(owner: Any, twin: Any) -> None:
    """Gives ``owner`` the options that the groups of its ``twin`` have, and lets the twin's groups share them from now
    on, but for those that contain parameters. So for the optimizers that both hold."""
    held = held_optimizers(twin)
    pairs = [(owner, twin), *((theirs, held[path]) for path, theirs in held_optimizers(owner).items())]
    for theirs, mine in pairs:
        if len(theirs.param_groups) != len(mine.param_groups):
            raise _other_groups(owner)
        for index, group in enumerate(mine.param_groups):
            if not isinstance(group, SharedGroup):
                own = {k: v for k, v in group.items() if k in ("params", "param_names") or names_parameters(v)}
                theirs.param_groups[index].update({k: v for k, v in group.items() if k not in own})
                mine.param_groups[index] = SharedGroup(theirs, index, own)


def check_groups(owner: Any, twin: Any) -> None:
    """Raises UsageError if ``owner`` has not as many groups as its ``twin``, which shares their options."""
    if len(owner.param_groups) != len(twin.param_groups):
        raise _other_groups(owner)


def _other_groups(owner: Any) -> UsageError:
    return UsageError(
        f"{type(owner).__name__} has {len(owner.param_groups)} parameter groups, another number than when it was "
        "prepared.",
        where="optimizer.param_groups",
        why="each group has shards or state, which belong to the groups of before",
        fix="add groups by `add_param_group`, and set lr to 0 to leave one out",
    )


def names_parameters(value: Any) -> bool:
    """Returns whether ``value`` is a collection of parameters, or of values by parameter."""
    return isinstance(value, (Mapping, Set, list, tuple)) and any(isinstance(entry, nn.Parameter) for entry in value)


def rebind(optimizer: torch.optim.Optimizer, maps: Iterable[ParameterMap], coordinates: Mapping[str, int]) -> None:
    """Makes ``optimizer`` hold the current parameters instead of those it was created with.

    Groups, their order and their hyper-parameters are kept. Parameters of which this rank holds no shard are removed
    from their group. Existing state is sharded like the parameter. So for the optimizers that it holds.

    Args:
        optimizer: changed in place.
        maps: the parameters of all prepared models.
        coordinates: this rank's position in the mesh.

    Raises:
        ParameterError: if the optimizer holds a parameter of no prepared model, or state that cannot be sharded.
    """
    maps, known = list(maps), state_of(optimizer)
    for index, group in enumerate(all_groups(optimizer)):
        parameters: list[nn.Parameter] = []
        names: list[str] = []
        for position, parameter in enumerate(group["params"]):
            record = next((r for r in (m.find(parameter) for m in maps) if r is not None), None)
            if record is None:
                raise ParameterError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that no "
                    "prepared model has.",
                    where=f"param_groups[{index}]['params'][{position}]",
                    why="it would never be synchronised, sharded or saved",
                    fix="build the optimizer from the parameters of the model that is prepared with it or earlier",
                )
            state = known.pop(parameter, None) if parameter is not record.current else None
            if record.current is None:
                continue
            if state:
                known[record.current] = {
                    name: _cut_state(value, record, name, coordinates) for name, value in state.items()
                }
            parameters.append(record.current)
            if "param_names" in group:
                names.append(group["param_names"][position])
        group["params"] = parameters
        if "param_names" in group:
            group["param_names"] = names


def _cut_state(value: Any, record: ParameterRecord, name: str, coordinates: Mapping[str, int]) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not record.layout.cuts:
        return value
    if tuple(value.shape) == record.layout.shape:
        return record.layout.shard(value, coordinates)
    raise ParameterError(
        f"The optimizer's state {name!r} for {record.fqn!r} has shape {tuple(value.shape)} and cannot be sharded.",
        why=f"the parameter has shape {record.layout.shape} and is sharded over ranks",
        fix="prepare the optimizer before its first step",
    )


def state_of(optimizer: Any) -> _State:
    """Returns the state of ``optimizer``, joined with that of the optimizers that it holds, unless they share it. Their
    entries have the path to the optimizer before their name: ``"base_optimizer.exp_avg"``."""
    stores = {"": optimizer.state}
    for path, held in held_optimizers(optimizer).items():
        if not any(held.state is store for store in stores.values()):
            stores[f"{path}."] = held.state
    return optimizer.state if len(stores) == 1 else JointState(stores)


class JointState(MutableMapping[torch.Tensor, MutableMapping[str, Any]]):
    """The state of several optimizers of the same parameters. Values that are written are theirs.

    Args:
        stores: the state of each optimizer, by what is put before its entries' names; ``""`` is one of them.
    """

    def __init__(self, stores: Mapping[str, _State]) -> None:
        self._stores = dict(sorted(stores.items(), key=lambda pair: -len(pair[0])))

    def split(self, name: str) -> tuple[str, str]:
        """Returns the store of an entry, and its name there."""
        prefix = next(prefix for prefix in self._stores if name.startswith(prefix))
        return prefix, name[len(prefix) :]

    def entries_in(self, prefix: str, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        """Returns the entries of a parameter in a store, which are created if there are none."""
        store = self._stores[prefix]
        if parameter not in store:
            store[parameter] = {}
        return store[parameter]

    def __getitem__(self, parameter: torch.Tensor) -> JointEntries:
        present = {prefix: store[parameter] for prefix, store in self._stores.items() if parameter in store}
        if not present:
            raise KeyError(parameter)
        return JointEntries(self, parameter, present)

    def __setitem__(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> None:
        given = dict(entries)
        self.pop(parameter, None)
        self._stores[""][parameter] = {}
        self[parameter].update(given)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        for store in self._stores.values():
            store.pop(parameter, None)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in store for store in self._stores.values())

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(dict.fromkeys(parameter for store in self._stores.values() for parameter in store))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} parameters, {len(self._stores)} optimizers>"


class JointEntries(MutableMapping[str, Any]):
    """The entries of one parameter in a :class:`JointState`. They remain after its removal.

    Args:
        state: the state.
        parameter: the parameter.
        present: its entries in each store that has some.
    """

    def __init__(
        self, state: JointState, parameter: torch.Tensor, present: dict[str, MutableMapping[str, Any]]
    ) -> None:
        self._state, self._parameter, self._present = state, parameter, present

    def _place(self, name: str) -> tuple[MutableMapping[str, Any], str]:
        prefix, short = self._state.split(name)
        return self._present.get(prefix, {}), short

    def __getitem__(self, name: str) -> Any:
        entries, short = self._place(name)
        return entries[short]

    def __setitem__(self, name: str, value: Any) -> None:
        prefix, short = self._state.split(name)
        if prefix not in self._present:
            self._present[prefix] = self._state.entries_in(prefix, self._parameter)
        self._present[prefix][short] = value

    def __delitem__(self, name: str) -> None:
        entries, short = self._place(name)
        del entries[short]

    def __iter__(self) -> Iterator[str]:
        return (f"{prefix}{name}" for prefix, entries in self._present.items() for name in entries)

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._present.values())

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(self)}>"


def is_state_of(value: Any, optimizers: Iterable[Any]) -> bool:
    """Returns whether ``value`` is the state of one of ``optimizers``, to which another one may refer."""
    return any(value is each.state for each in optimizers)


# ---- State in terms of the parameters of the original model ----------------------------------------------------------
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
    store: MutableMapping[torch.Tensor, Any] | None = None

    def __repr__(self) -> str:
        master = ", master weights" if self.master else ""
        return f"<{type(self).__name__}: elements {self.start} to {self.stop} of {self.record!r}{master}>"

    def read_state(self, optimizer: Any) -> MutableMapping[str, Any]:
        """Returns the entries of the state in ``optimizer``; empty before the first step."""
        store = state_of(optimizer) if self.store is None else self.store
        return store.get(self.parameter if self.key is None else self.key, {})

    def new_state(self, optimizer: Any) -> MutableMapping[str, Any]:
        """Replaces the entries of the state by none, and returns them, to which entries can be added."""
        store = state_of(optimizer) if self.store is None else self.store
        key = self.parameter if self.key is None else self.key
        store[key] = {}
        return store[key]

    def fit(self, value: Any) -> Any:
        """Returns the part of an entry that this rank keeps: a tensor in the shape of the parameter on this rank is
        sharded, a shard and other values are returned unchanged. State of a full parameter may have shapes of its own,
        as factors of a matrix do.

        Raises:
            UsageError: if a tensor has neither shape, or is a shard where state is that of the full parameter.
        """
        layout, like = self.record.layout, self.parameter
        expected = torch.Size(layout.shape) if self.whole else like.shape
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape == expected:
            return value
        is_local = tuple(value.shape) == layout.local_shape
        if (self.whole or value.numel() == 1) and not is_local:
            return value
        if is_local and not self.whole:
            part = value.detach().reshape(-1)[self.start : self.stop].to(like.device, copy=True)
            return nn.functional.pad(part, (0, like.numel() - part.numel())).view(like.shape)
        if not layout.axes and (like.dim() > 1 or not self.axes):  # not sharded, by whatever shape of its own
            return value
        raise UsageError(
            f"State of shape {tuple(value.shape)} does not belong to {self.record.fqn!r}.",
            where="optimizer.state",
            why=f"this rank keeps {'all' if self.whole else 'a shard'} of it, of shape {tuple(expected)}",
            fix="assign a tensor of that shape"
            + ("; " if self.whole else f", or of the parameter's, {layout.local_shape}; ")
            + "`accelerator.get_optimizer_state_dict(optimizer)` returns the full state",
        )

    def drop_state(self, optimizer: Any) -> None:
        """Removes the state, as before the first step."""
        store = state_of(optimizer) if self.store is None else self.store
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
    """A value in a plugin's ``save`` that is sharded like the parameters, such as an outer momentum or an
    average of the weights. It can be loaded on any mesh: ``load`` receives an object of this class
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
    """A value in a plugin's ``save`` that differs between replicas, see ``AxisKind.REPLICA``, and is equal
    on all ranks of a replica. ``load`` receives an object of this class with the value of its replica.

    Args:
        value: plain values and tensors, or a :class:`ShardedState`.
    """

    value: Any

    def __repr__(self) -> str:
        value = self.value
        shown = repr(value) if isinstance(value, (bool, int, float, str, ShardedState)) else type(value).__name__
        return f"{type(self).__name__}({shown})"


@runtime_checkable
class HasStatePieces(Protocol):
    """Protocol of optimizers that update other tensors than the model's parameters, such as shards of them."""

    state: dict[torch.Tensor, dict]
    param_groups: list[dict]

    def state_pieces(self) -> list[StatePiece]:
        """Returns this rank's state, one entry for each parameter."""
        ...


class StateByParameter(MutableMapping[torch.Tensor, MutableMapping[str, Any]]):
    """The state of an optimizer that updates other tensors than the model's parameters, by these parameters.

    A tensor in it is what this rank keeps: the shard of the parameter, 1-dim, and empty if others keep all elements. It
    can be read, edited in place, assigned, in full too, and removed.

    Args:
        optimizer: has the groups of the parameters.
        piece_of: returns where the state of a parameter is, or None for one that the optimizer does not hold.
    """

    def __init__(self, optimizer: Any, piece_of: Callable[[torch.Tensor], StatePiece | None]) -> None:
        self._optimizer, self._piece_of = optimizer, piece_of

    def piece(self, parameter: Any) -> StatePiece:
        """Returns where the state of a parameter is.

        Raises:
            ParameterError: if it is none of the optimizer's.
        """
        found = self._piece_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if found is None:
            shown = f"a tensor of shape {tuple(parameter.shape)}" if isinstance(parameter, torch.Tensor) else parameter
            raise ParameterError(
                f"The optimizer has no state for {shown!s}: it is none of its parameters.",
                where="optimizer.state",
                why="state is found by the parameters of the model that `prepare` returned",
                fix="take them from `model.parameters()` or `optimizer.param_groups`",
            )
        return found

    def __getitem__(self, parameter: torch.Tensor) -> MutableMapping[str, Any]:
        self.piece(parameter)
        return _Entries(self, parameter)

    def __setitem__(self, parameter: torch.Tensor, entries: Mapping[str, Any]) -> None:
        piece = self.piece(parameter)
        fitting = {name: piece.fit(value) for name, value in dict(entries).items()}
        piece.new_state(None).update(fitting)

    def __delitem__(self, parameter: torch.Tensor) -> None:
        if parameter not in self:
            raise KeyError(parameter)
        self.piece(parameter).drop_state(None)

    def __contains__(self, parameter: object) -> bool:
        piece = self._piece_of(parameter) if isinstance(parameter, torch.Tensor) else None
        return piece is not None and len(piece.read_state(None)) > 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if p in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} parameters>"

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[torch.Tensor, dict[str, Any]]:
        return {parameter: copy.deepcopy(dict(entries), memo) for parameter, entries in self.items()}

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Returns the state of a parameter, or ``default`` if it has none."""
        return self[parameter] if parameter in self else default  # noqa: SIM401

    def setdefault(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """Returns the state of a parameter, which is ``default`` if it has none."""
        if parameter not in self:
            self[parameter] = default or {}
        return self[parameter]

    def pop(self, parameter: torch.Tensor, *default: Any) -> Any:
        """Removes the state of a parameter, and returns it."""
        if parameter not in self and default:
            return default[0]
        entries = dict(self[parameter])
        del self[parameter]
        return entries

    def clear(self) -> None:
        """Removes the state of all parameters."""
        for parameter in list(self):
            del self[parameter]

    def replace(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        """Makes ``state`` the state of all parameters."""
        given = {parameter: dict(entries) for parameter, entries in state.items()}
        for parameter in given:
            self.piece(parameter)
        self.clear()
        self.update(given)


class _Entries(MutableMapping[str, Any]):
    """The state of one parameter in a :class:`StateByParameter`, wherever that is now."""

    def __init__(self, state: StateByParameter, parameter: torch.Tensor) -> None:
        self._state, self._parameter = state, parameter

    def _read(self) -> MutableMapping[str, Any]:
        return self._state.piece(self._parameter).read_state(None)

    def __getitem__(self, name: str) -> Any:
        return self._read()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        piece = self._state.piece(self._parameter)
        entries, value = piece.read_state(None), piece.fit(value)
        (entries if len(entries) else piece.new_state(None))[name] = value

    def __delitem__(self, name: str) -> None:
        del self._read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._read()))

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        """Returns a dict of the entries."""
        return dict(self)


def take_weights(optimizer: Any, run: Run) -> None:
    """Copies the model's weights to the tensors that an optimizer updates, after a plugin has changed them in place.
    Needed for ZeRO-1, which updates shards of its own, and for master weights.

    Args:
        optimizer: the optimizer as hooks receive it, below Accelerate's wrapper.
        run: the run.
    """
    for piece in optimizer.state_pieces() if isinstance(optimizer, HasStatePieces) else ():
        piece.take_weights(run)
