# SPDX-License-Identifier: Apache-2.0
"""The state of a training run other than the tensors of models and optimizers: captured for a checkpoint, and
restored."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuron_accel.checkpoint.format.files import checksums_of
from neuron_accel.checkpoint.format.plain_state import decode, encode
from neuron_accel.checkpoint.state.fitting import (
    check_buffers,
    check_counters,
    check_options,
    check_plugin_state,
    check_position,
    check_random,
    check_scheduler,
    check_values,
    fits,
)
from neuron_accel.checkpoint.state.lock import this_process
from neuron_accel.checkpoint.state.snapshot import (
    Item,
    buffers_of,
    bytes_of,
    items_of_model,
    items_of_optimizer,
    items_of_plugin,
)
from neuron_accel.engine.optim.twin import ReplicaState, ShardedState
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.engine.plan.restart import RUN
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError, NeuronAccelError

if TYPE_CHECKING:
    from neuron_accel.backends.randomness import DeviceGenerator
    from neuron_accel.engine.plan.mesh import Mesh
    from neuron_accel.engine.runtime.run import PreparedModel, Run


_log = logging.getLogger(__name__)
_LIBRARIES = ("neuron-accel", "torch", "accelerate", "transformers", "safetensors", "torch-xla", "torch-neuronx")


@dataclass(kw_only=True)
class TrainingObjects:
    """The objects whose state is saved in a checkpoint.

    Args:
        run: the run.
        models: prepared models; None for a model that a hook of the user saves or loads.
        optimizers: the optimizers that the plugins created, below Accelerate's wrapper.
        schedulers, custom: objects with ``state_dict`` and ``load_state_dict``.
        loaders: prepared data loaders.
        scaler: the gradient scaler of fp16 training, or None.
        counters: numbers to save, such as the accumulation step and the number of the next checkpoint.
    """

    run: Run
    models: Sequence[PreparedModel | None]
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    custom: Sequence[Any] = ()
    scaler: Any = None
    counters: Mapping[str, int] = field(default_factory=dict)

    def main_model(self) -> PreparedModel | None:
        """Returns the first model that is trained, or else the first; its configuration is saved."""
        models = [model for _, model in self.numbered_models()]
        return next((model for model in models if model.optimizable), models[0] if models else None)

    def numbered_models(self) -> list[tuple[int, PreparedModel]]:
        """Returns the models to save or load, with their positions in ``models``."""
        return [(index, model) for index, model in enumerate(self.models) if model is not None]


@dataclass(kw_only=True)
class Contents:
    """What one rank saves. All fields but ``items`` are used on the main process only.

    Args:
        items: tensors of models, optimizers and plugins.
        state: all other state, encoded.
        tensors: the tensors that ``state`` refers to.
        info: ``info`` of the manifest.
        auxiliary: further files by name, such as the configuration of a model or the files of a tokenizer.
    """

    items: list[Item]
    state: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: Mapping[str, bytes] = field(default_factory=dict)


def capture(training: TrainingObjects) -> Contents:
    """Captures the state of all objects. Collective; state of other ranks is gathered on the main process.

    Raises:
        CheckpointError: on every rank, if the state of an object cannot be stored.
    """
    run = training.run
    run.backend.step_boundary()  # a lazy device computes the tensors that are saved
    items, facts = agreed(run, lambda: _local(training))
    facts["buffers"] = rank_buffers(training)
    everyone = run.backend.all_gather_object(facts, run.world)
    tensors: dict[str, torch.Tensor] = {}
    state = agreed(run, lambda: _state(training, everyone, tensors) if run.backend.rank == 0 else {})
    return Contents(items=items, state=state, tensors=tensors)


def describe(training: TrainingObjects) -> dict[str, Any]:
    """Returns ``info`` of the manifest: a description of the run that saves a checkpoint."""
    run = training.run
    plan = run.plan.to_dict()
    return {
        "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "saved_by": this_process(),
        "run": os.environ.get(RUN),
        "world_size": run.mesh.world_size,
        "mesh": mesh_to(run.mesh),
        "plan": plan,
        "fingerprint": run.plan.fingerprint(),
        "plugins": dict(run.plan.provenance),
        "libraries": _versions(),
        "models": [None if m is None else describe_model(m) for m in training.models],
        "optimizers": [type(getattr(o, "optimizer", o)).__name__ for o in training.optimizers],
        "counters": dict(training.counters),
    }


def _versions() -> dict[str, str]:
    result = {}
    for name in _LIBRARIES:
        try:
            result[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return result


def describe_model(model: PreparedModel) -> dict[str, Any]:
    """Returns what the manifest says of a model."""
    return {"class": type(model.original).__name__, "trains": model.optimizable}


def _local(training: TrainingObjects) -> tuple[list[Item], dict[str, Any]]:
    items = [item for index, model in training.numbered_models() for item in items_of_model(model, index)]
    values = []
    for index, optimizer in enumerate(training.optimizers):
        mine, rest = items_of_optimizer(optimizer, index, training.run)
        items += mine
        values.append(rest)
    plugins = PluginStates(training.run)
    items += plugins.items
    facts: dict[str, Any] = {
        "random": random_state(training.run.backend.generator),
        "values": values,
        "names": group_names(training),
        "plugins": plugins.plain,
        "plugin_forms": plugins.forms,
    }
    if training.run.mesh.replica(training.run.backend.rank):
        facts["replica"] = _of_replica(training, plugins)
    return items, facts


def _of_replica(
    training: TrainingObjects, plugins: PluginStates
) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Returns the state that each replica has of its own, and the tensors that it refers to; None on the first replica,
    and on all ranks of another but its first."""
    mesh, rank = training.run.mesh, training.run.backend.rank
    number = mesh.replica(rank)
    if rank != min(other for other in range(mesh.world_size) if mesh.replica(other) == number):
        return None
    tensors: dict[str, torch.Tensor] = {}
    where = f"replica {number}"
    state = {
        "options": [_options(optimizer, tensors, f"{where} optimizer {i}") for i, optimizer in _numbered(training)],
        "schedulers": _states(training.schedulers, f"{where} scheduler", tensors),
        "scaler": None if training.scaler is None else encode(training.scaler.state_dict(), tensors, f"{where} scaler"),
        "plugins": {
            name: encode(own, tensors, f"{where} plugin {name}") for name, own in plugins.of_replica().items() if own
        },
    }
    return state, tensors


def _numbered(training: TrainingObjects) -> list[tuple[int, Any]]:
    return list(enumerate(training.optimizers))


def _options(optimizer: Any, tensors: dict[str, torch.Tensor], where: str) -> list[Any]:
    return [
        encode({k: v for k, v in group.items() if k != "params"}, tensors, f"{where} group {i}")
        for i, group in enumerate(optimizer.param_groups)
    ]


def _state(
    training: TrainingObjects, everyone: list[dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    mesh = training.run.mesh
    by_replica: list[list[dict[str, Any]]] = [[] for _ in range(mesh.replicas)]
    for rank, one in enumerate(everyone):
        by_replica[mesh.replica(rank)].append(one)
    state = _state_of_all(training, everyone, by_replica[0], tensors)
    forms: dict[str, Any] = {}
    for one in everyone:  # a pipeline stage may have none
        forms |= one["plugin_forms"]
    if forms:
        state["plugin_forms"] = dict(sorted(forms.items()))
    if mesh.replicas > 1:
        state["replicas"] = []
    for number, ranks in enumerate(by_replica[1:], start=1):
        own, own_tensors = next(one["replica"] for one in ranks if one["replica"] is not None)
        own["values"] = [
            encode(_values(i, ranks), tensors, f"replica {number} optimizer {i} values") for i, _ in _numbered(training)
        ]
        tensors |= own_tensors
        state["replicas"].append(own)
    return state


def _values(index: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the values in an optimizer's state that are not tensors, by FQN and entry."""
    return {name: entries for one in ranks for name, entries in one["values"][index].items()}


def _state_of_all(
    training: TrainingObjects,
    everyone: list[dict[str, Any]],
    first: list[dict[str, Any]],
    tensors: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Returns the state of the first replica, and the state that each rank has of its own."""
    return {
        "counters": dict(training.counters),
        "optimizers": [_optimizer(training, index, first, tensors) for index in range(len(training.optimizers))],
        "schedulers": _states(training.schedulers, "scheduler", tensors),
        "custom": _states(training.custom, "custom object", tensors),
        "loaders": [encode(position_of(loader), tensors, f"loader {i}") for i, loader in enumerate(training.loaders)],
        "scaler": encode(training.scaler.state_dict(), tensors, "scaler") if training.scaler is not None else None,
        "random": [encode(one["random"], tensors, f"random {rank}") for rank, one in enumerate(everyone)],
        "buffers": [encode(one["buffers"], tensors, f"buffers {rank}") for rank, one in enumerate(everyone)],
        "plugins": {
            name: encode(state, tensors, f"plugin {name}") for name, state in sorted(everyone[0]["plugins"].items())
        },
    }


class PluginStates:
    """The state of plugins on this rank. Collective.

    Attributes:
        items: tensors that are sharded like the parameters.
        plain: all other values, by plugin and key.
        forms: how a value is stored, by plugin and key, for values that are sharded or that each replica has its own
            of.
    """

    def __init__(self, run: Run) -> None:
        self.items: list[Item] = []
        self.plain: dict[str, dict[str, Any]] = {}
        self.forms: dict[str, dict[str, dict[str, Any]]] = {}
        hooks: list[Any] = [*run.hooks["checkpoint_state"]]  # bound methods of plugins
        for state in hooks:
            plugin = state.__self__.spec.name
            for key, value in state(run).items():
                self._add(plugin, key, value, run)

    def _add(self, plugin: str, key: str, value: Any, run: Run) -> None:
        per_replica = isinstance(value, ReplicaState)
        if isinstance(value, ReplicaState):
            value = value.value
        sharded = isinstance(value, ShardedState)
        if per_replica or sharded:
            form = {"replica": per_replica, "model": value.model if isinstance(value, ShardedState) else None}
            self.forms.setdefault(plugin, {})[key] = form
        if isinstance(value, ShardedState):
            self.items += items_of_plugin(plugin, key, value, run, per_replica=per_replica)
        else:
            value = value.detach().cpu() if isinstance(value, torch.Tensor) else value
            self.plain.setdefault(plugin, {})[key] = value

    def of_replica(self) -> dict[str, dict[str, Any]]:
        """Returns the plain values that this replica has of its own."""
        return {
            name: {key: value for key, value in state.items() if self.forms.get(name, {}).get(key, {}).get("replica")}
            for name, state in self.plain.items()
        }


def position_of(loader: Any) -> Any:
    return loader.position() if hasattr(loader, "position") else None


def _states(objects: Sequence[Any], kind: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [
        {"class": type(o).__name__, "state": encode(o.state_dict(), tensors, f"{kind} {i} ({type(o).__name__})")}
        for i, o in enumerate(objects)
    ]


def group_names(training: TrainingObjects) -> list[list[list[str]]] | None:
    """Returns FQNs by optimizer and group, on one rank of each pipeline stage; None on the others, which have the
    same."""
    run = training.run
    stages = run.mesh.names(AxisKind.STAGE)
    if any(index for axis, index in run.coordinates.items() if axis not in stages):
        return None
    return [
        [
            [record.fqn for p in group["params"] if (record := run.find_parameter(p)) is not None]
            for group in optimizer.param_groups
        ]
        for optimizer in training.optimizers
    ]


def _optimizer(
    training: TrainingObjects, index: int, everyone: list[dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    optimizer = training.optimizers[index]
    names = [one["names"][index] for one in everyone if one["names"] is not None]
    where = f"optimizer {index}"
    options = _options(optimizer, tensors, where)
    return {
        "class": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "groups": [
            {
                "names": list(dict.fromkeys(name for stage in names for name in stage[i])),
                "options": options[i],
            }
            for i in range(len(optimizer.param_groups))
        ],
        "values": encode(_values(index, everyone), tensors, f"{where} values"),
    }


# ---- restoring -------------------------------------------------------------------------------------------------------
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
            if replica:
                state = _with_own(state, state["replicas"][replica - 1])
            self.plugin_forms = _forms(state.get("plugin_forms", {}))
            self.counters = check_counters(state["counters"])
            self.optimizers = [self._decoded_optimizer(o, tensor, i) for i, o in enumerate(state["optimizers"])]
            self._states = {
                kind: [decode(o["state"], tensor, f"{kind} {i}") for i, o in enumerate(state[kind])]
                for kind in ("schedulers", "custom")
            }
            self._loaders = [decode(o, tensor, f"loader {i}") for i, o in enumerate(state["loaders"])]
            self._scaler = decode(state["scaler"], tensor, "scaler")
            self._plugins = {name: decode(o, tensor, f"plugin {name}") for name, o in state.get("plugins", {}).items()}
            random = [decode(o, tensor, f"random {i}") for i, o in enumerate(state["random"])]
            saved = mesh_from(info["mesh"])
            if saved.world_size != len(random):  # also limits the size of the mesh to that of the file
                raise ValueError(f"a mesh of {saved.world_size} ranks, and {len(random)} states of random numbers")
            own = state["buffers"][training.run.backend.rank] if saved == training.run.mesh else {}
            self._buffers = check_buffers(decode(own, tensor, "buffers"))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"The saved training state cannot be read: {error!r}.") from error
        self._random = state_for(random, saved, training.run.mesh, training.run.backend.rank)
        check_random(self._random[0], training.run.backend.generator)
        for kind, mine, theirs in (
            ("optimizers", training.optimizers, self.optimizers),
            ("schedulers", training.schedulers, self._states["schedulers"]),
            ("loaders", training.loaders, self._loaders),
        ):
            if len(mine) > len(theirs):
                raise _wrong_count(kind, len(theirs), len(mine))
        if len(training.custom) != len(self._states["custom"]):
            raise _wrong_count(
                "objects registered for checkpointing", len(self._states["custom"]), len(training.custom)
            )
        for index, (loader, position) in enumerate(zip(training.loaders, self._loaders, strict=False)):
            check_position(loader, position, f"loader {index}")
        for index, optimizer in enumerate(training.optimizers):
            self._check_groups(optimizer, index)
        for index, (scheduler, saved_state) in enumerate(
            zip(training.schedulers, self._states["schedulers"], strict=False)
        ):
            check_scheduler(scheduler, saved_state, f"scheduler {index}")
        for index, (custom, saved_state) in enumerate(zip(training.custom, self._states["custom"], strict=True)):
            # Only the type is compared: the contents belong to the object, and may change between versions.
            if isinstance(saved_state, dict) != isinstance(custom.state_dict(), dict):
                raise CheckpointError(
                    "The saved state of an object registered for checkpointing belongs to another object.",
                    where=f"custom object {index} ({type(custom).__name__})",
                    fix="register the same objects in the same order as when the checkpoint was saved",
                )
        if training.scaler is not None and not fits(self._scaler, training.scaler.state_dict()):
            raise CheckpointError("The saved state of the gradient scaler cannot be used.", where="scaler")
        for name, plugin_state in self._plugins.items():
            check_plugin_state(plugin_state, name)

    def _decoded_optimizer(self, data: Mapping[str, Any], tensor: Any, index: int) -> dict[str, Any]:
        return {
            "groups": [
                {"names": set(g["names"]), "options": decode(g["options"], tensor, f"optimizer {index}")}
                for g in data["groups"]
            ],
            "values": decode(data["values"], tensor, f"optimizer {index}"),
        }

    def _check_groups(self, optimizer: Any, index: int) -> None:
        groups = self.optimizers[index]["groups"]
        check_values(self.optimizers[index]["values"], f"optimizer {index}")
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
        for scheduler, state in zip(training.schedulers, self._states["schedulers"], strict=False):
            scheduler.load_state_dict(state)
        for loader, position in zip(training.loaders, self._loaders, strict=False):
            if position is not None and hasattr(loader, "set_position"):
                loader.set_position(position)
        agreed(training.run, self._apply_custom)
        if training.scaler is not None and self._scaler is not None:
            training.scaler.load_state_dict(self._scaler)
        plugins = {plugin.spec.name: plugin for plugin in training.run.plan.plugins}
        for name in sorted({*self._plugins, *self.plugin_forms}):
            if name in plugins:
                with _refusing(f"Plugin {name!r} cannot load its state."):
                    plugins[name].load_checkpoint_state(self._plugin_state(name), training.run)
            else:
                _log.warning(
                    "The checkpoint has state of plugin %r, which this run does not use; it is not loaded.", name
                )
        state, newcomer = self._random
        # A lazy device executes the copies, so that the graph of the next step is like any other. Executing advances
        # its random number generator, which is therefore restored afterwards.
        training.run.backend.step_boundary()
        generator = training.run.backend.generator
        set_random_state(state, generator)
        if newcomer is not None:
            reseed(newcomer, generator)

    def _plugin_state(self, name: str) -> dict[str, Any]:
        """Returns a plugin's state in the form in which the plugin returned it."""
        state = dict(self._plugins.get(name, {}))
        for key, form in self.plugin_forms.get(name, {}).items():
            if form["model"] is not None:
                position = self.positions.get(form["model"], form["model"])
                state[key] = ShardedState(self.sharded.get((name, key), {}), position)
            if form["replica"]:
                state[key] = ReplicaState(state[key])
        return state

    def _apply_custom(self) -> None:
        for index, (custom, state) in enumerate(zip(self._training.custom, self._states["custom"], strict=True)):
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


def mesh_to(mesh: Mesh) -> list[dict[str, Any]]:
    """Returns a mesh as plain data."""
    return [{"name": axis.name, "degree": axis.degree, "kind": axis.kind.value} for axis in mesh.axes]


def mesh_from(data: Sequence[Mapping[str, Any]]) -> Mesh:
    """Inverse of :func:`mesh_to`.

    Raises:
        ValueError: if ``data`` is not a valid mesh.
    """
    axes = tuple(AxisSpec(name=a["name"], degree=a["degree"], kind=AxisKind(a["kind"])) for a in data)
    if not all(isinstance(axis.name, str) and type(axis.degree) is int and axis.degree >= 1 for axis in axes):
        raise ValueError(f"{data!r:.80} is not a valid mesh")
    return Mesh(axes)


# ---- States of random number generators ------------------------------------------------------------------------------
_ODD = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, so that seeds of neighbouring ranks differ in many bits


def random_state(device: DeviceGenerator) -> dict[str, Any]:
    """Returns the state of the default generators of Python, numpy and torch, and of the device's generator if it has
    one."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.apart:
        state["device"] = device.get_state()
    return state


def set_random_state(state: dict[str, Any], device: DeviceGenerator) -> None:
    """Inverse of :func:`random_state`. If the state has none for the device's generator, the generator is seeded with a
    number that is computed from the rest of the state."""
    version, words, extra = state["python"]
    random.setstate((version, tuple(words), extra))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.apart:
        if "device" in state:
            device.set_state(state["device"])
        else:
            device.seed(_seed())
            torch.set_rng_state(state["torch"])


def state_for(states: list[dict[str, Any]], saved: Mesh, mesh: Mesh, rank: int) -> tuple[dict[str, Any], int | None]:
    """Returns the saved state with which a rank continues.

    If the mesh is the saved one, each rank gets its own state. Otherwise ranks that read the same samples must draw the
    same numbers, so a data-parallel rank gets the state of the saved rank with that data-parallel index and index 0
    along all other axes.

    Returns:
        The state; and the data-parallel rank if the saved mesh did not have it, else None. In that case the rank calls
        :func:`reseed` with this number, so that it does not draw the numbers of another rank.
    """
    if saved == mesh:
        return states[rank], None
    index = mesh.position(rank, mesh.data_axes)
    rows = saved.groups(*saved.data_axes)[0]
    return states[rows[index % len(rows)]], index if index >= len(rows) else None


def reseed(index: int, device: DeviceGenerator) -> None:
    """Seeds all generators of a rank without a saved state with a function of its current state and its number."""
    seed = (_seed() + index * _ODD) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device.apart:
        device.seed(seed)


def _seed() -> int:
    return int(torch.randint(2**62, (), dtype=torch.int64))


# ---- Buffers that differ between ranks -------------------------------------------------------------------------------
# A buffer is stored once, with the values of the first rank, which any mesh loads. But data-parallel ranks process
# different samples, so their running statistics differ until they are synchronized. The values of the other ranks are
# stored too, so that training on the same mesh continues exactly.
def _buffers(training: TrainingObjects) -> dict[str, torch.Tensor]:
    return {
        f"{index}/{names[0]}": value.detach()
        for index, model in training.numbered_models()
        for names, value in buffers_of(model).items()
    }


def rank_buffers(training: TrainingObjects) -> dict[str, torch.Tensor]:
    """Returns this rank's buffers whose values differ from those of the first rank of its replica, on the CPU.
    Collective."""
    run = training.run
    mine = {name: value.to("cpu", copy=True) for name, value in _buffers(training).items()}
    sums = {name: checksums_of(bytes(bytes_of(value))) for name, value in mine.items()}
    first: dict[str, tuple[str, ...]] = {}
    replica = run.mesh.replica(run.backend.rank)
    for rank, theirs in enumerate(run.backend.all_gather_object(sums, run.world)):
        if run.mesh.replica(rank) == replica:
            first = theirs | first
    return {name: value for name, value in mine.items() if sums[name] != first[name]}


def set_rank_buffers(training: TrainingObjects, values: dict[str, torch.Tensor], positions: Mapping[int, int]) -> None:
    """Inverse of :func:`rank_buffers`. Must be called after the buffers of all models were loaded.

    Args:
        training: the objects to restore.
        values: what :func:`rank_buffers` returned.
        positions: position in this run of each model of the checkpoint, by its number.
    """
    buffers = _buffers(training)
    with torch.no_grad():
        for saved, value in values.items():
            number, _, rest = saved.partition("/")
            name = f"{positions.get(int(number)) if number.isdecimal() else None}/{rest}"
            if name in buffers and buffers[name].shape == value.shape:
                buffers[name].copy_(value)
