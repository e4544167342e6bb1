# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint contains: the tensors that :mod:`.snapshot` lists, and all other state of a training run."""

from __future__ import annotations

import importlib.metadata
import operator
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from neuron_accel.checkpoint.format.files import checksums_of
from neuron_accel.checkpoint.format.plain_state import encode
from neuron_accel.checkpoint.state.lock import this_process
from neuron_accel.checkpoint.state.snapshot import (
    Item,
    buffers_of,
    bytes_of,
    items_of_model,
    items_of_optimizer,
    items_of_plugin,
)
from neuron_accel.engine.optim.state import ReplicaState, ShardedState
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.engine.plan.restart import RUN
from neuron_accel.engine.runtime.run import agreed

if TYPE_CHECKING:
    from neuron_accel.backends.randomness import DeviceGenerator
    from neuron_accel.engine.runtime.run import PreparedModel, Run


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
    hooks: list[Any] = [*run.hooks["save"]]  # bound methods of plugins
    states = agreed(run, lambda: {save.__self__.spec.name: save(run) or {} for save in hooks})
    run.backend.step_boundary()  # a lazy device computes the tensors that are saved
    items, facts = agreed(run, lambda: _local(training, states))
    facts["buffers"] = rank_buffers(training)
    everyone = run.backend.gather_object(facts, run.world)
    tensors: dict[str, torch.Tensor] = {}
    state = agreed(run, lambda: {} if everyone is None else _state(training, everyone, tensors))
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


def _local(training: TrainingObjects, states: dict[str, dict[str, Any]]) -> tuple[list[Item], dict[str, Any]]:
    items = [item for index, model in training.numbered_models() for item in items_of_model(model, index)]
    values = []
    for index, optimizer in enumerate(training.optimizers):
        mine, rest = items_of_optimizer(optimizer, index, training.run)
        items += mine
        values.append(rest)
    plugins = PluginStates(states, training.run)
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
        "options": [_options(o, tensors, f"{where} optimizer {i}") for i, o in enumerate(training.optimizers)],
        "schedulers": _states(training.schedulers, f"{where} scheduler", tensors),
        "scaler": None if training.scaler is None else encode(training.scaler.state_dict(), tensors, f"{where} scaler"),
        "plugins": {
            name: encode(own, tensors, f"{where} plugin {name}") for name, own in plugins.of_replica().items() if own
        },
    }
    return state, tensors


def _state(
    training: TrainingObjects, everyone: list[dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Returns the state of the first replica, the state that each rank has of its own, and what the other replicas
    have of their own."""
    mesh = training.run.mesh
    by_replica: list[list[dict[str, Any]]] = [[] for _ in range(mesh.replicas)]
    for rank, one in enumerate(everyone):
        by_replica[mesh.replica(rank)].append(one)
    first = by_replica[0]
    state: dict[str, Any] = {
        "counters": dict(training.counters),
        "optimizers": [_optimizer(training, index, first, tensors) for index in range(len(training.optimizers))],
        "schedulers": _states(training.schedulers, "scheduler", tensors),
        "custom": _states(training.custom, "custom object", tensors),
        "loaders": [
            encode(loader.position() if hasattr(loader, "position") else None, tensors, f"loader {i}")
            for i, loader in enumerate(training.loaders)
        ],
        "scaler": encode(training.scaler.state_dict(), tensors, "scaler") if training.scaler is not None else None,
        "random": [encode(one["random"], tensors, f"random {rank}") for rank, one in enumerate(everyone)],
        "buffers": [encode(one["buffers"], tensors, f"buffers {rank}") for rank, one in enumerate(everyone)],
        "plugins": {
            name: encode(own, tensors, f"plugin {name}") for name, own in sorted(everyone[0]["plugins"].items())
        },
    }
    forms = {name: form for one in everyone for name, form in one["plugin_forms"].items()}  # a stage may have none
    if forms:
        state["plugin_forms"] = dict(sorted(forms.items()))
    if mesh.replicas > 1:
        state["replicas"] = []
    for number, ranks in enumerate(by_replica[1:], start=1):
        own, own_tensors = next(one["replica"] for one in ranks if one["replica"] is not None)
        own["values"] = [
            encode(_values(i, ranks), tensors, f"replica {number} optimizer {i} values")
            for i in range(len(training.optimizers))
        ]
        tensors |= own_tensors
        state["replicas"].append(own)
    return state


def _optimizer(
    training: TrainingObjects, index: int, ranks: list[dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    optimizer, where = training.optimizers[index], f"optimizer {index}"
    names = [one["names"][index] for one in ranks if one["names"] is not None]
    options = _options(optimizer, tensors, where)
    return {
        "class": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "groups": [
            {"names": list(dict.fromkeys(name for stage in names for name in stage[i])), "options": options[i]}
            for i in range(len(options))
        ],
        "values": encode(_values(index, ranks), tensors, f"{where} values"),
    }


def _options(optimizer: Any, tensors: dict[str, torch.Tensor], where: str) -> list[Any]:
    return [
        encode({k: v for k, v in group.items() if k != "params"}, tensors, f"{where} group {i}")
        for i, group in enumerate(optimizer.param_groups)
    ]


def _values(index: int, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the values in an optimizer's state that are not tensors, by FQN and entry."""
    return {name: entries for one in ranks for name, entries in one["values"][index].items()}


def _states(objects: Sequence[Any], kind: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [
        {"class": type(o).__name__, "state": encode(o.state_dict(), tensors, f"{kind} {i} ({type(o).__name__})")}
        for i, o in enumerate(objects)
    ]


class PluginStates:
    """The state of plugins on this rank. Collective.

    Attributes:
        items: tensors that are sharded like the parameters.
        plain: all other values, by plugin and key.
        forms: how a value is stored, by plugin and key, for values that are sharded or that each replica has its own
            of.
    """

    def __init__(self, states: dict[str, dict[str, Any]], run: Run) -> None:
        self.items: list[Item] = []
        self.plain: dict[str, dict[str, Any]] = {}
        self.forms: dict[str, dict[str, dict[str, Any]]] = {}
        for plugin, state in states.items():
            for key, value in state.items():
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
    version, words, extra = random.getstate()
    python = (version, np.asarray(words, dtype=np.uint32), extra)
    state = {"python": python, "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.apart:
        state["device"] = device.get_state()
    return state


def set_random_state(state: dict[str, Any], device: DeviceGenerator) -> None:
    """Inverse of :func:`random_state`. If the state has none for the device's generator, the generator is seeded with a
    number that is computed from the rest of the state."""
    version, words, extra = state["python"]
    random.setstate((version, tuple(map(operator.index, words)), extra))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.apart:
        if "device" in state:
            device.set_state(state["device"])
        else:
            device.seed(_seed(state))


def state_for(saved: Mesh, mesh: Mesh, rank: int) -> tuple[int, int | None]:
    """Returns which saved rank's state a rank continues with.

    If the mesh is the saved one, each rank gets its own state. Otherwise ranks that read the same samples must draw the
    same numbers, so a data-parallel rank gets the state of the saved rank with that data-parallel index and index 0
    along all other axes.

    Returns:
        The saved rank; and the data-parallel rank if the saved mesh did not have it, else None. In that case the rank
        calls :func:`reseed` with this number, so that it does not draw the numbers of another rank.
    """
    if saved == mesh:
        return rank, None
    index = mesh.position(rank, mesh.data_axes)
    rows = saved.groups(*saved.data_axes)[0]
    return rows[index % len(rows)], index if index >= len(rows) else None


def reseed(index: int, state: dict[str, Any], device: DeviceGenerator) -> None:
    """Seeds all generators of a rank without a saved state with a function of another rank's and its number."""
    seed = (_seed(state) + index * _ODD) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device.apart:
        device.seed(seed)


def _seed(state: dict[str, Any]) -> int:
    generator = torch.Generator()  # ranks that are threads share the default one
    generator.set_state(state["torch"])
    return int(torch.randint(2**62, (), dtype=torch.int64, generator=generator))


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
    firsts: dict[int, dict[str, tuple[str, ...]]] = {}
    for rank, theirs in enumerate(run.backend.gather_object(sums, run.world) or ()):
        replica = run.mesh.replica(rank)
        firsts[replica] = theirs | firsts.get(replica, {})
    first = run.backend.broadcast_object(firsts, run.world)[run.mesh.replica(run.backend.rank)]
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
