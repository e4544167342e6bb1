# SPDX-License-Identifier: Apache-2.0
"""Restores the state of a training run other than the tensors of models and optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from neuron_accel.checkpoint.format.plain_state import decode
from neuron_accel.checkpoint.state.fitting import (
    check_by_name,
    check_counters,
    check_options,
    check_position,
    check_random,
    check_scheduler,
    fits,
)
from neuron_accel.checkpoint.state.training import (
    TrainingObjects,
    mesh_from,
    reseed,
    set_random_state,
    set_rank_buffers,
    state_for,
)
from neuron_accel.engine.optim.state import ReplicaState, ShardedState
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError, NeuronAccelError

_log = logging.getLogger(__name__)
_VALUES = "values of its state"


class Restored:
    """The state of a checkpoint, decoded and checked against the objects. Nothing is changed before :meth:`apply`.

    Args:
        training: the objects to restore.
        state: state as :func:`capture` returned it.
        tensor: returns the tensor for a key.
        info: ``info`` of the manifest.
        numbers: the number of each model in the checkpoint, by its position in this run.
        replica: number of the replica whose state to restore, if the checkpoint has a copy for each.

    Attributes:
        positions: position in this run of each model of the checkpoint that is loaded, by its number.
        plugin_forms: how a plugin's value is stored, by plugin and key, for values that are not plain.
        sharded: this rank's shards, by FQN, of plugin state that is sharded like the parameters; added when they are
            read.

    Raises:
        CheckpointError: if the state does not fit the objects.
    """

    def __init__(
        self,
        training: TrainingObjects,
        state: Mapping[str, Any],
        tensor: Callable[[str], torch.Tensor],
        info: Mapping[str, Any],
        numbers: Mapping[int, int],
        replica: int = 0,
    ) -> None:
        self._training = training
        self.positions = {number: position for position, number in numbers.items()}
        self.sharded: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        try:
            self._decode(state if not replica else _with_own(state, state["replicas"][replica - 1]), tensor, info)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"The saved training state cannot be read: {error!r}.") from error
        self._check()

    def _decode(self, state: Mapping[str, Any], tensor: Callable[[str], torch.Tensor], info: Mapping[str, Any]) -> None:
        run = self._training.run

        self.plugin_forms = _forms(state.get("plugin_forms", {}))
        self.counters = check_counters(state["counters"])
        self.optimizers = [
            {
                "groups": [
                    {"names": set(g["names"]), "options": decode(g["options"], tensor, f"optimizer {i}")}
                    for g in saved["groups"]
                ],
                "values": decode(saved["values"], tensor, f"optimizer {i}"),
            }
            for i, saved in enumerate(state["optimizers"])
        ]
        self._schedulers, self._custom = (
            [decode(each["state"], tensor, f"{kind} {i}") for i, each in enumerate(state[kind])]
            for kind in ("schedulers", "custom")
        )
        self._loaders = [decode(each, tensor, f"loaders {i}") for i, each in enumerate(state["loaders"])]
        self._scaler = decode(state["scaler"], tensor, "scaler")
        self._plugins = {name: decode(o, tensor, f"plugin {name}") for name, o in state.get("plugins", {}).items()}
        states, saved_mesh = state["random"], mesh_from(info["mesh"])
        if saved_mesh.world_size != len(states):  # also limits the size of the mesh to that of the file
            raise ValueError(f"a mesh of {saved_mesh.world_size} ranks, and {len(states)} states of random numbers")
        own = state["buffers"][run.backend.rank] if saved_mesh == run.mesh else {}
        self._buffers = check_by_name(
            decode(own, tensor, "buffers"), "buffers", fit=lambda value: isinstance(value, torch.Tensor)
        )
        saved_rank, newcomer = state_for(saved_mesh, run.mesh, run.backend.rank)
        self._random = decode(states[saved_rank], tensor, f"random {saved_rank}"), newcomer

    def _check(self) -> None:
        """Checks that the state fits the objects."""
        training = self._training
        check_random(self._random[0], training.run.backend.generator)
        for kind, mine, theirs in (
            ("optimizers", training.optimizers, self.optimizers),
            ("schedulers", training.schedulers, self._schedulers),
            ("loaders", training.loaders, self._loaders),
        ):
            if len(mine) > len(theirs):
                raise _wrong_count(kind, len(theirs), len(mine))
        if len(training.custom) != len(self._custom):
            raise _wrong_count("objects registered for checkpointing", len(self._custom), len(training.custom))
        for index, (loader, position) in enumerate(zip(training.loaders, self._loaders, strict=False)):
            check_position(loader, position, f"loader {index}")
        for index, optimizer in enumerate(training.optimizers):
            self._check_groups(optimizer, index)
        for index, (scheduler, saved) in enumerate(zip(training.schedulers, self._schedulers, strict=False)):
            check_scheduler(scheduler, saved, f"scheduler {index}")
        for index, (custom, saved) in enumerate(zip(training.custom, self._custom, strict=True)):
            # Only the type is compared: the contents belong to the object, and may change between versions.
            if isinstance(saved, dict) != isinstance(custom.state_dict(), dict):
                raise CheckpointError(
                    "The saved state of an object registered for checkpointing belongs to another object.",
                    where=f"custom object {index} ({type(custom).__name__})",
                    fix="register the same objects in the same order as when the checkpoint was saved",
                )
        if training.scaler is not None and not fits(self._scaler, training.scaler.state_dict()):
            raise CheckpointError("The saved state of the gradient scaler cannot be used.", where="scaler")
        for name, plugin_state in self._plugins.items():
            check_by_name(plugin_state, "state", f"plugin {name!r}")

    def _check_groups(self, optimizer: Any, index: int) -> None:
        groups = self.optimizers[index]["groups"]
        for entries in check_by_name(self.optimizers[index]["values"], _VALUES, f"optimizer {index}").values():
            check_by_name(entries, _VALUES, f"optimizer {index}")
        where = f"optimizer {index} ({type(getattr(optimizer, 'optimizer', optimizer)).__name__})"
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"The checkpoint's optimizer has {len(groups)} groups, this one has {len(optimizer.param_groups)}.",
                where=where,
                fix="build the optimizer with the same groups as when the checkpoint was saved",
            )
        for i, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            check_options(saved["options"], group, getattr(optimizer, "defaults", {}), f"{where}, group {i}")
            for parameter in group["params"]:
                record = self._training.run.find_parameter(parameter)
                if record is None or saved["names"].isdisjoint(record.names):
                    name = "a parameter of no prepared model" if record is None else repr(record.fqn)
                    raise CheckpointError(
                        f"{name} is not in this group of the checkpoint's optimizer.",
                        where=f"{where}, group {i}",
                        why="it would get the learning rate and other options of other parameters",
                        fix="build the optimizer with the same groups as when the checkpoint was saved",
                    )

    def apply(self) -> None:
        """Restores all state other than the tensors of models and optimizers. Collective."""
        training = self._training
        set_rank_buffers(training, self._buffers, self.positions)
        for optimizer, saved in zip(training.optimizers, self.optimizers, strict=False):
            for group, theirs in zip(optimizer.param_groups, saved["groups"], strict=True):
                set_options(group, theirs["options"])
        for scheduler, state in zip(training.schedulers, self._schedulers, strict=False):
            scheduler.load_state_dict(state)
        for loader, position in zip(training.loaders, self._loaders, strict=False):
            if position is not None and hasattr(loader, "set_position"):
                loader.set_position(position)
        agreed(training.run, self._apply_custom)
        if training.scaler is not None and self._scaler is not None:
            training.scaler.load_state_dict(self._scaler)
        hooks: list[Any] = [*training.run.hooks["load"]]  # bound methods of plugins
        for load in hooks:
            name = load.__self__.spec.name
            with _refusing(f"Plugin {name!r} cannot load its state."):
                load(self._plugin_state(name), training.run)
        here = {plugin.spec.name for plugin in training.run.plan.plugins}
        for name in sorted({*self._plugins, *self.plugin_forms} - here):
            _log.warning("The checkpoint has state of plugin %r, which this run does not use; it is not loaded.", name)
        state, newcomer = self._random
        # A lazy device executes the copies, so that the graph of the next step is like any other. Executing advances
        # its random number generator, which is therefore restored afterwards.
        training.run.backend.step_boundary()
        generator = training.run.backend.generator
        set_random_state(state, generator)
        if newcomer is not None:
            reseed(newcomer, state, generator)

    def _plugin_state(self, name: str) -> dict[str, Any]:
        """Returns a plugin's state in the form in which the plugin returned it, empty if it is not saved."""
        state = dict(self._plugins.get(name, {}))
        for key, form in self.plugin_forms.get(name, {}).items():
            if form["model"] is not None:
                position = self.positions.get(form["model"], form["model"])
                state[key] = ShardedState(self.sharded.get((name, key), {}), position)
            if form["replica"]:
                state[key] = ReplicaState(state[key])
        return state

    def _apply_custom(self) -> None:
        for index, (custom, state) in enumerate(zip(self._training.custom, self._custom, strict=True)):
            with _refusing(
                f"Object {index} registered for checkpointing ({type(custom).__name__}) cannot load its state."
            ):
                custom.load_state_dict(state)


def _with_own(state: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state with the parts that a replica other than the first has of its own."""
    optimizers = [
        {
            **optimizer,
            "groups": [{**group, "options": options} for group, options in zip(optimizer["groups"], mine, strict=True)],
            "values": values,
        }
        for optimizer, mine, values in zip(state["optimizers"], own["options"], own["values"], strict=True)
    ]
    plugins = {name: {**plain, **own["plugins"].get(name, {})} for name, plain in state.get("plugins", {}).items()}
    return {
        **state,
        "optimizers": optimizers,
        "schedulers": own["schedulers"],
        "scaler": own["scaler"],
        "plugins": plugins,
    }


def _forms(forms: Any) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns how the values of plugins are stored, after checking the types.

    Raises:
        ValueError: if a value has the wrong type.
    """
    for keys in forms.values():
        for form in keys.values():
            model = form["model"]
            if type(form["replica"]) is not bool or not (model is None or (type(model) is int and model >= 0)):
                raise ValueError(f"a plugin's state is kept as {form!r:.40}")
    return dict(forms)


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Context that converts exceptions of other code into a CheckpointError with the message ``what``."""
    try:
        yield
    except NeuronAccelError:
        raise
    except Exception as error:
        raise CheckpointError(
            what,
            where=f"load_state_dict: {type(error).__name__}: {error}",
            why="models, optimizers and schedulers have been loaded already",
            fix="load another checkpoint before training continues, or correct the object",
        ) from error


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Sets the options of an optimizer's group; tensors are written in place."""
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, torch.Tensor):
            with torch.no_grad():
                present.fill_(float(value)) if present.dim() == 0 else present.copy_(value)
        else:
            group[name] = value


def _wrong_count(kind: str, saved: int, present: int) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint has {saved} {kind}, this training has {present}.",
        why="objects are identified by the order in which they were prepared or registered",
        fix="prepare and register the same objects as when the checkpoint was saved",
    )
