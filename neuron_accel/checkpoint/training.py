"""What a training consists of, beside its tensors: taken when a checkpoint is saved, given back when it is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.checkpoint.agreement import agreed
from neuron_accel.checkpoint.own_buffers import own_buffers, set_own_buffers
from neuron_accel.checkpoint.plain_state import decode, encode
from neuron_accel.checkpoint.randomness import random_state, reseed, set_random_state, state_for
from neuron_accel.checkpoint.snapshot import Item, items_of_model, items_of_optimizer
from neuron_accel.engine.errors import CheckpointError
from neuron_accel.engine.mesh import Mesh
from neuron_accel.engine.plugin import AxisKind, AxisSpec

if TYPE_CHECKING:
    from neuron_accel.engine.run import PreparedModel, Run

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Training:
    """The objects that a checkpoint covers.

    Args:
        run: the run.
        models: prepared models; None for one that somebody else takes care of.
        optimizers: as the plugins made them, below Accelerate's wrapper.
        schedulers, loaders, custom: with ``state_dict`` and ``load_state_dict``; loaders with ``position``.
        scaler: of fp16 training, or None.
        counters: numbers to keep: the accumulation step, the number of the next checkpoint.
    """

    run: Run
    models: Sequence[PreparedModel | None]
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    custom: Sequence[Any] = ()
    scaler: Any = None
    counters: Mapping[str, int] = field(default_factory=dict)

    def numbered_models(self) -> list[tuple[int, PreparedModel]]:
        return [(index, model) for index, model in enumerate(self.models) if model is not None]


@dataclass(kw_only=True)
class Captured:
    """This rank's view of a training at one moment.

    Args:
        items: all tensors of models and optimizers on this rank.
        state: everything else, encoded; complete on the main process only.
        tensors: those that ``state`` refers to.
    """

    items: list[Item]
    state: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def capture(training: Training) -> Captured:
    """Collective: the main process gets what the others know.

    Raises:
        CheckpointError: on every rank, if the state of some object cannot be stored.
    """
    run = training.run
    run.backend.step_boundary()  # a lazy device computes what is saved
    items, facts = agreed(run, lambda: _local(training))
    facts["buffers"] = own_buffers(training)
    everyone = run.backend.all_gather_object(facts, run.world)
    tensors: dict[str, torch.Tensor] = {}
    state = agreed(run, lambda: _state(training, everyone, tensors) if run.backend.rank == 0 else {})
    return Captured(items=items, state=state, tensors=tensors)


def _local(training: Training) -> tuple[list[Item], dict[str, Any]]:
    items = [item for index, model in training.numbered_models() for item in items_of_model(model, index)]
    values = []
    for index, optimizer in enumerate(training.optimizers):
        mine, rest = items_of_optimizer(optimizer, index, training.run)
        items += mine
        values.append(rest)
    facts = {"random": random_state(training.run.backend.generator), "values": values, "names": _group_names(training)}
    facts["plugins"] = _plugin_states(training.run)
    return items, facts


def _state(training: Training, everyone: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "counters": dict(training.counters),
        "optimizers": [_optimizer(training, index, everyone, tensors) for index in range(len(training.optimizers))],
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


def _plugin_states(run: Run) -> dict[str, Any]:
    states = {plugin.spec.name: plugin.checkpoint_state(run) for plugin in run.plan.plugins}
    return {
        name: {key: v.detach().cpu() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
        for name, state in states.items()
        if state
    }


def position_of(loader: Any) -> Any:
    return loader.position() if hasattr(loader, "position") else None


def _states(objects: Sequence[Any], kind: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    return [
        {"class": type(o).__name__, "state": encode(o.state_dict(), tensors, f"{kind} {i} ({type(o).__name__})")}
        for i, o in enumerate(objects)
    ]


def _group_names(training: Training) -> list[list[list[str]]] | None:
    """FQNs by optimizer and group; only from one rank of each stage, the others would repeat it."""
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
    training: Training, index: int, everyone: list[dict[str, Any]], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    optimizer = training.optimizers[index]
    names = [one["names"][index] for one in everyone if one["names"] is not None]
    values: dict[str, Any] = {}
    for one in everyone:
        values.update(one["values"][index])
    where = f"optimizer {index}"
    return {
        "class": type(getattr(optimizer, "optimizer", optimizer)).__name__,
        "groups": [
            {
                "names": list(dict.fromkeys(name for stage in names for name in stage[i])),
                "options": encode({k: v for k, v in group.items() if k != "params"}, tensors, f"{where} group {i}"),
            }
            for i, group in enumerate(optimizer.param_groups)
        ],
        "values": encode(values, tensors, f"{where} values"),
    }


# ---- back ----------------------------------------------------------------------------------------------------------
class Restored:
    """The state of a checkpoint, decoded and checked against a training; nothing is changed before :meth:`apply`.

    Args:
        training: what is to be given the state.
        state: as :func:`capture` made it.
        tensor: gives one of its tensors.
        info: the manifest's.

    Raises:
        CheckpointError: if it does not fit the training.
    """

    def __init__(
        self,
        training: Training,
        state: Mapping[str, Any],
        tensor: Callable[[str], torch.Tensor],
        info: Mapping[str, Any],
    ) -> None:
        self._training = training
        try:
            self.counters: dict[str, int] = dict(state["counters"])
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
            own = state["buffers"][training.run.backend.rank] if saved == training.run.mesh else {}
            self._buffers = decode(own, tensor, "buffers")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"The saved training state cannot be read: {error!r}.") from error
        self._random = state_for(random, saved, training.run.mesh, training.run.backend.rank)
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
        for loader, position in zip(training.loaders, self._loaders, strict=False):
            if position is not None and hasattr(loader, "check_position"):
                loader.check_position(position)
        for index, optimizer in enumerate(training.optimizers):
            self._check_groups(optimizer, index)

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
        where = f"optimizer {index} ({type(getattr(optimizer, 'optimizer', optimizer)).__name__})"
        if len(groups) != len(optimizer.param_groups):
            raise CheckpointError(
                f"The checkpoint's optimizer has {len(groups)} groups, this one has {len(optimizer.param_groups)}.",
                where=where,
                fix="build the optimizer as it was when the checkpoint was saved",
            )
        for i, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
            for parameter in group["params"]:
                record = self._training.run.find_parameter(parameter)
                if record is None or saved["names"].isdisjoint(record.names):
                    name = "a parameter of no prepared model" if record is None else repr(record.fqn)
                    raise CheckpointError(
                        f"{name} is not in this group of the checkpoint's optimizer.",
                        where=f"{where}, group {i}",
                        why="its learning rate and other options would be those of other parameters",
                        fix="build the optimizer's groups as they were when the checkpoint was saved",
                    )

    def apply(self) -> None:
        """Gives everything but tensors of models and optimizers back."""
        training = self._training
        set_own_buffers(training, self._buffers)
        for optimizer, saved in zip(training.optimizers, self.optimizers, strict=False):
            for group, theirs in zip(optimizer.param_groups, saved["groups"], strict=True):
                _set_options(group, theirs["options"])
        for scheduler, state in zip(training.schedulers, self._states["schedulers"], strict=False):
            scheduler.load_state_dict(state)
        for loader, position in zip(training.loaders, self._loaders, strict=False):
            if position is not None and hasattr(loader, "set_position"):
                loader.set_position(position)
        for custom, state in zip(training.custom, self._states["custom"], strict=True):
            custom.load_state_dict(state)
        if training.scaler is not None and self._scaler is not None:
            training.scaler.load_state_dict(self._scaler)
        plugins = {plugin.spec.name: plugin for plugin in training.run.plan.plugins}
        for name, state in self._plugins.items():
            if name in plugins:
                plugins[name].load_checkpoint_state(state, training.run)
            else:
                _log.warning("The checkpoint has state of a plugin %r, which this run has not; it is left out.", name)
        state, newcomer = self._random
        # A lazy device puts what was loaded in its place, so that the next step's graph is like any other. It moves its
        # random numbers on when it does so.
        training.run.backend.step_boundary()
        generator = training.run.backend.generator
        set_random_state(state, generator)
        if newcomer is not None:
            reseed(newcomer, generator)


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
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
        why="objects are told apart by the order in which they were prepared or registered",
        fix="prepare and register the same objects as when the checkpoint was saved",
    )


def mesh_to(mesh: Mesh) -> list[dict[str, Any]]:
    """A mesh as plain data."""
    return [{"name": axis.name, "degree": axis.degree, "kind": axis.kind.value} for axis in mesh.axes]


def mesh_from(data: Sequence[Mapping[str, Any]]) -> Mesh:
    """The inverse of :func:`mesh_to`."""
    axes = (AxisSpec(name=a["name"], degree=a["degree"], kind=AxisKind(a["kind"])) for a in data)
    return Mesh(tuple(axes))
