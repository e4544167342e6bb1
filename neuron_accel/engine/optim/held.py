# SPDX-License-Identifier: Apache-2.0
"""Optimizers that hold another one, such as SAM and Lookahead: the optimizers inside, and the state of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from neuron_accel.errors import UsageError

_State: TypeAlias = MutableMapping[torch.Tensor, MutableMapping[str, Any]]


def held_optimizers(optimizer: Any) -> dict[str, Any]:
    """Returns the optimizers in the attributes of ``optimizer``, and in lists and dicts there, and the ones in these.

    Returns:
        the optimizers by the path of attributes to them, ``"base.optimizer"``; without ``optimizer`` itself.
    """
    found: dict[str, Any] = {}
    known = {id(optimizer)}

    def search(holder: Any, path: str) -> None:
        for name, value in _entries(vars(holder), path):
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
