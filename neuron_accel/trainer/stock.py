# SPDX-License-Identifier: Apache-2.0
"""Resuming from checkpoints of transformers' ``Trainer``, with any composition of strategies.

Such a checkpoint contains the model's weights, ``optimizer.pt``, ``scheduler.pt``, a file of random states of each
process, and ``trainer_state.json``. The optimizer's state is stored by the position of a parameter in the groups. It is
assigned to names, and then loaded like a checkpoint of this library: every rank reads its shard. Only tensors, numbers
and containers are unpickled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_pt_utils import safe_globals

from neuron_accel.checkpoint.format.files import threads_of
from neuron_accel.checkpoint.format.index import Index
from neuron_accel.checkpoint.format.pickled import read_containers
from neuron_accel.checkpoint.format.ranges import FileRanges
from neuron_accel.checkpoint.format.source import Chunk, SourceTensor
from neuron_accel.checkpoint.format.tensorfile import state_collection
from neuron_accel.checkpoint.state.load import fulfil, load_weights, optimizer_needs, refresh_masters
from neuron_accel.checkpoint.state.restore import set_options
from neuron_accel.checkpoint.state.snapshot import pieces_of
from neuron_accel.checkpoint.state.training import (
    TrainingObjects,
    group_names,
    random_state,
    reseed,
    set_random_state,
)
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord

_log = logging.getLogger(__name__)

_OPTIMIZER, _SCHEDULER, _SCALER = "optimizer.pt", "scheduler.pt", "scaler.pt"
_SHARDED = ("optimizer.bin", "optimizer_*", "pytorch_model_fsdp*", "global_step*", "rank*-of-*-optimizer.pt")
"""Files of FSDP and DeepSpeed."""
_IMPLEMENTATION = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Options of a group that select an implementation, which depends on the device."""


@dataclass(kw_only=True)
class StockState:
    """The content of a checkpoint besides the weights.

    Args:
        optimizer, scheduler, scaler: state dicts; None if there is no such file.
        random: random states of the processes that saved it.
    """

    optimizer: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    scaler: dict[str, Any] | None
    random: list[dict[str, Any]] = field(default_factory=list)


def read_stock(folder: Path) -> StockState:
    """Reads a checkpoint without the weights; tensors of the optimizer are memory-mapped.

    Raises:
        CheckpointError: if a file is damaged, contains other objects than data, or was written by FSDP or DeepSpeed.
    """
    foreign = sorted(path.name for pattern in _SHARDED for path in folder.glob(pattern))
    if foreign:
        raise CheckpointError(
            f"The optimizer's state in {folder.name!r} cannot be read.",
            where=str(folder / foreign[0]),
            why="it is in the format of FSDP or DeepSpeed",
            fix="start a new training with the weights, from_pretrained(folder), without resume_from_checkpoint",
        )
    states = {name: _read(folder / name) for name in (_OPTIMIZER, _SCHEDULER, _SCALER)}
    files = sorted(folder.glob("rng_state_*.pth"), key=lambda path: (len(path.name), path.name))
    with safe_globals():  # numpy's arrays
        random = [_random(path) for path in files or folder.glob("rng_state.pth")]
    return StockState(optimizer=states[_OPTIMIZER], scheduler=states[_SCHEDULER], scaler=states[_SCALER], random=random)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    state = read_containers(path)
    if not isinstance(state, dict):
        raise _damaged(path, f"it contains a {type(state).__name__}, not a state dict")
    return state


def _random(path: Path) -> dict[str, Any]:
    state = _read(path) or {}
    try:
        return {"python": state["python"], "numpy": state["numpy"], "torch": state["cpu"]}
    except KeyError as error:
        raise _damaged(path, f"it has no entry {error}") from error


def restore(training: TrainingObjects, model: PreparedModel, scheduler: Any, folder: Path) -> dict[str, Any] | None:
    """Loads the weights, the optimizer's state and the scheduler's state of a checkpoint. Collective.

    Args:
        training: the objects of the run, with one optimizer.
        model: the prepared model.
        scheduler: the learning rate scheduler, or None.
        folder: the checkpoint.

    Returns:
        the random state of this rank, to be set after batches are skipped; None if none was saved.

    Raises:
        CheckpointError: on every rank, before anything is changed.
    """
    run, path = training.run, folder / _OPTIMIZER
    state = agreed(run, lambda: read_stock(folder))
    missing = [name for name, value in ((_OPTIMIZER, state.optimizer), (_SCHEDULER, state.scheduler)) if value is None]
    if missing:
        _log.warning("%s has no %s: this state is not restored.", folder, " and no ".join(missing))
    everyone = run.backend.all_gather_object(group_names(training), run.world)
    named = agreed(run, lambda: _Named(training, state.optimizer, everyone, path))
    agreed(run, lambda: _check_scheduler(scheduler, state.scheduler, folder / _SCHEDULER))
    with FileRanges() as files:
        files.hold(path, named.tensors)
        needs = agreed(run, lambda: list(named.needs()))
        load_weights(model, folder, run)
        refresh_masters(training.optimizers, run)
        named.make_room()
        agreed(run, lambda: fulfil(needs, files, run, threads_of(run)))
    named.finish()
    if scheduler is not None and state.scheduler is not None:
        scheduler.load_state_dict(state.scheduler)
    if training.scaler is not None and state.scaler is not None:
        training.scaler.load_state_dict(state.scaler)
    return _random_state(state.random, run) if state.random else None


class _Named:
    """The state of an optimizer, by names of parameters.

    Args:
        training: the objects of the run, with the optimizer.
        state: the state dict; None: there is none.
        everyone: the :func:`group_names` of every rank.
        path: the file, for messages.

    Raises:
        CheckpointError: if the state does not match the optimizer.
    """

    def __init__(
        self, training: TrainingObjects, state: dict[str, Any] | None, everyone: list[Any], path: Path
    ) -> None:
        (self._optimizer,) = training.optimizers
        self._run, self._path = training.run, path
        self._index = Index()
        self.tensors: dict[str, Any] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._options: list[dict[str, Any]] = []
        self._found = state is not None
        if state is None:
            return
        stages = [one[0] for one in everyone if one is not None]
        try:
            groups, entries = state["param_groups"], state["state"]
            if len(groups) != len(self._optimizer.param_groups):
                raise _other(path, f"it has {len(groups)} groups, this optimizer {len(self._optimizer.param_groups)}")
            for i, group in enumerate(groups):
                names = self._ordered([stage[i] for stage in stages])
                if len(names) != len(group["params"]):
                    raise _other(
                        path, f"group {i} has {len(group['params'])} parameters, in this optimizer {len(names)}"
                    )
                for name, number in zip(names, group["params"], strict=True):
                    self._add(name, entries.get(number, {}))
                self._options.append({k: v for k, v in group.items() if k not in {"params", *_IMPLEMENTATION}})
        except (KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, f"it is not an optimizer's state: {error!r}") from error
        self._check_shapes()

    def _ordered(self, stages: list[list[str]]) -> list[str]:
        """The names of the parameters of a group, in the order of the optimizer.

        Args:
            stages: the names on each rank of a pipeline; one list without a pipeline.

        Raises:
            CheckpointError: in a pipeline, if the order on a rank is not that of the model.
        """
        if len(stages) == 1:
            return stages[0]
        order = {record.fqn: i for i, record in enumerate(r for m in self._run.models for r in m.parameters)}
        if any(stage != sorted(stage, key=order.__getitem__) for stage in stages):
            raise CheckpointError(
                "It cannot be determined which parameters the optimizer's state belongs to.",
                where=str(self._path),
                why="it is stored by position; in a pipeline no rank has all parameters of the optimizer, and their "
                "order is not that of the model",
                fix="pass model.parameters() to the optimizer in this order, or resume without a pipeline",
            )
        return sorted({name for stage in stages for name in stage}, key=order.__getitem__)

    def _add(self, name: str, entries: Mapping[str, Any]) -> None:
        record = self._record(name)
        for entry, value in entries.items():
            if not isinstance(value, torch.Tensor):
                self._values.setdefault(record.fqn, {})[entry] = value
                continue
            is_whole = tuple(value.shape) == record.layout.shape and value.dim() > 0
            if not is_whole and value.dim() > 0:
                self._check_uncut(record.fqn, entry, value)
            key = f"{name}/{entry}"
            chunk = Chunk(start=0, stop=value.numel(), path=self._path, offset=0, key=key)
            self.tensors[key] = value
            self._index.collections.setdefault(state_collection(0, entry), {})[record.fqn] = SourceTensor(
                name=record.fqn,
                layout=Layout.of(value),
                form="parameter" if is_whole else "own",
                parts={(): [chunk]},
            )

    def _check_shapes(self) -> None:
        """Checks that an entry with the shape of the parameter for some parameters has it for all. Other entries, such
        as factored moments, are not checked."""
        for tensors in self._index.collections.values():
            odd = [t for t in tensors.values() if t.form == "own" and t.layout.shape]
            if odd and any(t.form == "parameter" for t in tensors.values()):
                shape = self._record(odd[0].name).layout.shape
                raise _other(self._path, f"an entry of {odd[0].name!r} has shape {odd[0].layout.shape}, not {shape}")

    def _record(self, name: str) -> ParameterRecord:
        return next(m.parameters[name] for m in self._run.models if name in m.parameters)

    def _check_uncut(self, name: str, entry: str, value: torch.Tensor) -> None:
        for piece in pieces_of(self._optimizer, self._run):
            record = piece.record
            size = torch.Size(record.layout.shape).numel()
            if record.fqn == name and not piece.whole and (record.layout.axes or piece.stop - piece.start != size):
                raise _other(
                    self._path,
                    f"{entry!r} of {name!r} has shape {tuple(value.shape)}, the parameter {record.layout.shape}, which "
                    "is sharded over ranks",
                )

    def needs(self) -> Any:
        return optimizer_needs(self._optimizer, 0, self._index, self._run) if self._found else ()

    def make_room(self) -> None:
        """Restores the values of the optimizer that are not tensors, and allocates the tensors."""
        for piece in pieces_of(self._optimizer, self._run) if self._found else ():
            values = next((self._values[name] for name in piece.record.names if name in self._values), {})
            if values or self._index.entries(0, piece.record.names):
                piece.new_state(self._optimizer).update(values)
            else:
                piece.drop_state(self._optimizer)

    def finish(self) -> None:
        """Restores options of groups, and converts moments to the dtype of the parameters, as ``load_state_dict``
        does."""
        for group, options in zip(self._optimizer.param_groups, self._options, strict=False):
            set_options(group, options)
        for piece in pieces_of(self._optimizer, self._run) if self._found else ():
            entries = piece.read_state(self._optimizer)
            for entry, value in entries.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() and entry != "step":
                    entries[entry] = value.to(piece.parameter.dtype)


def _check_scheduler(scheduler: Any, state: dict[str, Any] | None, path: Path) -> None:
    if scheduler is None or state is None:
        return
    lacking = sorted(set(scheduler.state_dict()) ^ set(state))
    if lacking:
        raise CheckpointError(
            f"The scheduler's state in {path.name!r} is from another scheduler class.",
            where=str(path),
            why=f"only one of them has {', '.join(map(repr, lacking))}; this one is a {type(scheduler).__name__}",
            fix="use the lr_scheduler_type of the saved training",
        )


def _random_state(states: list[dict[str, Any]], run: Run) -> dict[str, Any]:
    """The random state of this rank, by its data-parallel rank; ranks that the saved run did not have are reseeded."""
    index = run.mesh.position(run.backend.rank, run.mesh.data_axes)
    before = random_state(run.backend.generator)
    try:
        set_random_state(state := states[index % len(states)], run.backend.generator)
        if index >= len(states):
            reseed(index, state, run.backend.generator)
        return random_state(run.backend.generator)
    finally:
        set_random_state(before, run.backend.generator)


def _other(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The optimizer's state in {path.name!r} does not match this optimizer.",
        where=str(path),
        why=why,
        fix="use the model and the optimizer of the saved training",
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} is damaged: {why}.", where=str(path), fix="resume from another checkpoint of this training"
    )
