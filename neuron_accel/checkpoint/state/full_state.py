# SPDX-License-Identifier: Apache-2.0
"""Unsharded state dicts and gradients, with the names and shapes of the original model."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.engine.runtime.tensors import full_tensor
from neuron_accel.errors import UsageError
from neuron_accel.storage import is_url

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


# ---- Unsharded state dicts and gradients -----------------------------------------------------------------------------
def full_state_dict(model: PreparedModel, run: Run) -> dict[str, torch.Tensor]:
    """Returns the state dict of the original model, with original names and shapes; tied weights are one tensor.
    Collective.

    Returns:
        On the main process copies of all tensors, on the CPU. On the other ranks the same if no parameter is sharded,
        else an empty dict, so that only one rank needs memory for the full model.
    """
    module = model.inner
    run.backend.step_boundary()  # a lazy device computes the tensors that are read below
    stages = stage_group(run)
    if stages.size > 1:
        return _state_of_stages(model, module, run, stages)
    cut = any(record.layout.cuts or record.weights for record in model.parameters)
    keep = run.backend.rank == 0 or not cut
    result: dict[str, torch.Tensor] = {}
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            if keep:
                result[name] = value
            continue
        if value not in copies:
            full = _full_value(name, value, model, run)
            copies[value] = full.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            result[name] = copies[value]
    _release(model)
    return result


def _full_value(name: str, local: torch.Tensor, model: PreparedModel, run: Run) -> torch.Tensor:
    """Returns a parameter or buffer of this rank's stage in full, until that of another is asked for. Collective."""
    if name not in model.parameters:
        return local.detach()
    record = model.parameters[name]
    return full_tensor(local.detach() if record.weights is None else record.weights.gather(), record.layout, run)


def _release(model: PreparedModel) -> None:
    """Frees the last values that were gathered."""
    for record in model.parameters:
        if record.weights is not None:
            record.weights.changed()


def without_ties(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the result of :func:`full_state_dict` with each tensor under its first name only."""
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: value for name, value in state.items() if first[id(value)] == name}


class Weights(nn.Module):
    """A module whose state dict is a given one, for a function of another library that takes a module."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._state = state

    def state_dict(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return self._state


def is_of_transformers(model: Any) -> bool:
    """Whether a model is a ``PreTrainedModel``; transformers is not imported to find out."""
    return hasattr(type(model), "config_class") and hasattr(type(model), "save_pretrained")


def save_configuration(model: Any, folder: str | os.PathLike[str]) -> None:
    """Writes the configurations that a model has. That of a model of transformers names its dtype and its class, by
    which servers choose theirs, as after ``save_pretrained`` of the model."""
    config: Any = getattr(model, "config", None)
    if is_of_transformers(model):
        config.dtype, config.architectures = str(model.dtype).removeprefix("torch."), [type(model).__name__]
    parts: list[Any] = [config, getattr(model, "generation_config", None)]
    for part in parts:
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder)


def full_gradients(model: PreparedModel, run: Run) -> dict[str, torch.Tensor]:
    """Returns the reduced gradients by FQN, in the shapes of the original model, on the CPU of every rank. Collective.

    For tests and debugging, since all gradients are in memory at once. Parameters without a gradient are left out.
    """
    result = {}
    stages = stage_group(run)
    for record in model.parameters:
        holder = next((indices[0] for indices in record.holders.values()), 0)
        gradient = None
        if stages.index == holder and record.current is not None and record.current.requires_grad:
            gradient = run.gradients.full(record.current)
            if gradient is not None:
                gradient = full_tensor(gradient, record.layout, run)
        form = None if gradient is None else (tuple(gradient.shape), gradient.dtype)
        form = run.backend.broadcast_object(form, stages, holder)
        if form is not None:
            result[record.fqn] = run.backend.to_host(_from_stage(gradient, form, run, stages, holder))
    return result


def full_optimizer_state(optimizer: Any, run: Run) -> dict[str, Any]:
    """Returns the state of an optimizer in full, by the names of the original parameters, with the options of its
    groups, on the CPU of every rank. Collective.

    Args:
        optimizer: the optimizer below Accelerate's wrapper.
        run: the run.
    """
    from neuron_accel.checkpoint.state.snapshot import pieces_of

    run.backend.step_boundary()
    known = {}
    for piece in pieces_of(optimizer, run):
        host = {
            k: run.backend.to_host(v.detach()) if torch.is_tensor(v) else v
            for k, v in piece.read_state(optimizer).items()
        }
        known[_place(piece.record, run)] = [(piece.start, piece.stop, host)]
    group = run.group(*getattr(optimizer, "shard_axes", ()))
    parts: dict[Any, list[Any]] = {}
    for of_rank in run.backend.all_gather_object(known, group):
        for place, part in of_rank.items():
            parts.setdefault(place, []).extend(part)
    state, groups = {}, []
    for options in optimizer.param_groups:
        records = [record for p in options["params"] if (record := run.find_parameter(p)) is not None]
        for record in records:
            state[run.name_of(record)] = _full_entries(
                record, sorted(parts.get(_place(record, run), ()), key=itemgetter(0)), run
            )
        plain = {name: value for name, value in options.items() if name not in ("params", "param_names")}
        groups.append({**plain, "params": [run.name_of(record) for record in records]})
    for others, of_stage in run.backend.all_gather_object((groups, state), stage_group(run)):
        state = {**of_stage, **state}
        for mine, other in zip(groups, others, strict=True):
            mine["params"] += [name for name in other["params"] if name not in mine["params"]]
    return {"state": {name: entries for name, entries in state.items() if entries}, "param_groups": groups}


def _place(record: ParameterRecord, run: Run) -> tuple[Any, ...]:
    return run.name_of(record), *(run.coordinates[axis] for axis in record.layout.axes)


def _full_entries(record: ParameterRecord, parts: list[tuple[int, int, dict[str, Any]]], run: Run) -> dict[str, Any]:
    """Joins the entries of the ranges of one parameter, and gathers them over the axes over which it is sharded."""
    layout, result = record.layout, {}
    ranges = list({start: (stop - start, entries) for start, stop, entries in parts if stop > start}.values())
    for name, value in ranges[0][1].items() if ranges else ():
        if torch.is_tensor(value) and value.dim():
            local, flat = value, [entries[name].reshape(-1)[:length] for length, entries in ranges]
            if value.dim() == 1 and sum(map(len, flat)) == math.prod(layout.local_shape):  # 1-dim shards
                local = torch.cat(flat).view(layout.local_shape)
            if tuple(local.shape) == layout.local_shape and layout.axes:
                local = full_tensor(local if run.backend.is_lazy else local.to(run.device), layout, run).cpu()
            value = local
        result[name] = value.clone() if torch.is_tensor(value) else value
    return result


def load_full_optimizer_state(optimizer: Any, state: dict[str, Any], run: Run) -> None:
    """Loads the result of :func:`full_optimizer_state`, or the ``state_dict`` of the optimizer in one process.

    Raises:
        UsageError: if it has other groups or parameters.
    """
    from neuron_accel.checkpoint.state.snapshot import pieces_of

    groups, saved = optimizer.param_groups, state["param_groups"]
    names = [
        [run.name_of(record) for p in g["params"] if (record := run.find_parameter(p)) is not None] for g in groups
    ]
    given = [list(group["params"]) for group in saved]
    by_name = all(isinstance(key, str) for keys in given for key in keys)
    if len(saved) != len(groups) or any(
        not set(mine) <= set(keys) if by_name else len(mine) != len(keys)
        for mine, keys in zip(names, given, strict=False)
    ):
        raise UsageError(
            f"The state of {sum(map(len, given))} parameters in {len(saved)} groups is not that of this "
            f"{type(optimizer).__name__}, of {sum(map(len, names))} in {len(groups)}.",
            where="optimizer.load_state_dict",
            fix="load the state of an optimizer with the same groups, from `accelerator.get_optimizer_state_dict`",
        )
    key_of = {
        mine: mine if by_name else key
        for pair in zip(names, given, strict=True)
        for mine, key in zip(*pair, strict=not by_name)
    }
    for piece in pieces_of(optimizer, run):
        entries = state["state"].get(key_of[run.name_of(piece.record)])
        piece.drop_state(optimizer)
        new = piece.new_state(optimizer) if entries else {}
        options, layout = groups[piece.group], piece.record.layout
        for name, value in (entries or {}).items():
            if torch.is_tensor(value):
                if tuple(value.shape) == layout.shape and value.dim() and not piece.whole:
                    value = layout.shard(value, run.coordinates)
                on_host = name == "step" and not (options.get("capturable") or options.get("fused"))
                value = piece.fit(value).to(
                    "cpu" if on_host else piece.parameter.device, copy=True
                )  # as torch places it
            new[name] = value
    for mine, theirs in zip(groups, saved, strict=True):
        mine.update({name: value for name, value in theirs.items() if name not in ("params", "param_names")})


def stage_group(run: Run) -> Group:
    """Returns the group of the pipeline stages of this rank's copy of the model."""
    return run.group(*run.mesh.names(AxisKind.STAGE))


def _from_stage(
    tensor: torch.Tensor | None, form: tuple[tuple[int, ...], torch.dtype], run: Run, stages: Group, holder: int
) -> torch.Tensor:
    """Broadcasts a tensor from the stage at position ``holder`` to all stages. On lazy devices it is sent through the
    host, since each shape would be a graph to compile."""
    lazy = run.backend.is_lazy
    if stages.index != holder or tensor is None:
        tensor = torch.empty(form[0], dtype=form[1], device="cpu" if lazy else run.device)
    elif lazy:
        tensor = run.backend.to_host(tensor)
    return run.backend.broadcast(tensor, stages, holder)


def _state_of_stages(model: PreparedModel, module: torch.nn.Module, run: Run, stages: Group) -> dict[str, torch.Tensor]:
    """Returns the state dict of a model with several pipeline stages on the main process, and an empty dict
    elsewhere."""
    local = module.state_dict(keep_vars=True)
    records = model.parameters
    described: dict[str, Any] = {}
    for name, value in local.items():
        if isinstance(value, torch.Tensor):
            shape = records[name].layout.shape if name in records else tuple(value.shape)
            described[name] = (tuple(shape), value.dtype)
        else:
            described[name] = value
    everywhere = run.backend.all_gather_object(described, stages)
    holder_of: dict[str, int] = {}
    for index, names in enumerate(everywhere):
        for name in names:
            holder_of.setdefault(name, index)
    places = {name: place for place, name in enumerate(n for record in records for n in record.names)}
    result: dict[str, torch.Tensor] = {}
    copies: dict[str, torch.Tensor] = {}
    for name in sorted(holder_of, key=lambda name: places.get(name, len(places))):
        form, holder = everywhere[holder_of[name]][name], holder_of[name]
        identity = records[name].fqn if name in records else name
        if not (isinstance(form, tuple) and isinstance(form[-1], torch.dtype)):
            copies[identity] = form
        elif identity not in copies:
            full = None
            if stages.index == holder:
                full = _full_value(name, local[name], model, run)
            full = _from_stage(full, form, run, stages, holder)
            copies[identity] = full.to("cpu", copy=True) if run.backend.rank == 0 else torch.empty(0)
        result[name] = copies[identity]
    _release(model)
    return result if run.backend.rank == 0 else {}


# ---- ``save_pretrained`` of a sharded model --------------------------------------------------------------------------
# The model's own ``save_pretrained`` would write this rank's shards as if they were the model. It is therefore replaced
# on the object, as Accelerate replaces ``forward``. The replacement is valid for this model during this run: for a
# copy, and after the run, it raises an error.
_METHOD = "save_pretrained"


class SaveNothing:
    """Replaces ``save_pretrained`` of a copy of a sharded model, and of the model after the run. Raises an error when
    called, since shards cannot be gathered then."""

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            "This model contains one rank's shards of a sharded model.",
            where=_METHOD,
            why="it is a copy of a prepared model, or its run has ended; its shards would be written as if they "
            "were the model",
            fix="save the prepared model itself, before the run ends, or use `accelerator.get_state_dict(model)`",
        )


class SaveFull:
    """Replaces ``save_pretrained`` of a sharded model.

    All processes must call it. The main process writes the full model, with original names and shapes, and all
    processes return when the files are complete.

    Args:
        record: the prepared model.
        run: the run.
        save: the model's own ``save_pretrained``.
    """

    def __init__(self, record: PreparedModel, run: Run, save: Callable[..., Any]) -> None:
        self._record, self._run, self._save = record, run, save

    def __call__(
        self, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **options: Any
    ) -> None:
        """See transformers. A ``state_dict``, if given, must be the full one."""
        if is_url(str(save_directory)):  # a local folder of that name would be made
            raise UsageError(
                f"transformers cannot save to {save_directory}.",
                where=_METHOD,
                fix="use `accelerator.save_model(model, url)`",
            )
        if not _takes_weights(self._save):
            raise UsageError(
                f"{_METHOD} of {type(self._record.original).__name__} takes no `state_dict`.",
                where=_METHOD,
                why="it would write this rank's shards as if they were the model",
                fix="use `accelerator.save_model(model, folder)`",
            )
        with self._run.events.open("save_pretrained", "call"):
            if state_dict is None:
                state_dict = full_state_dict(self._record, self._run)
            if self._run.backend.rank == 0:
                self._save(save_directory, is_main_process=True, state_dict=state_dict, **options)
            self._run.backend.barrier()

    def __reduce__(self) -> tuple[type[SaveNothing], tuple[()]]:
        return SaveNothing, ()  # for copies and pickles of the model

    def remove(self) -> None:
        """Is called at the end of the run."""
        setattr(self._record.original, _METHOD, SaveNothing())


def _takes_weights(save: Callable[..., Any]) -> bool:
    """Whether a ``save_pretrained`` writes a ``state_dict`` that it is given. That of peft takes it among others."""
    return "state_dict" in inspect.signature(save).parameters or (
        (getattr(save, "__module__", None) or "").startswith("peft.")
    )


def save_in_full(record: PreparedModel, run: Run) -> None:
    """Makes ``save_pretrained`` of a sharded model write the full model, until the end of the run."""
    save = getattr(record.original, _METHOD, None)
    sharded = any(r.layout.cuts or r.holders for r in record.parameters)
    # Plugins that gather weights for their use have not acted yet. They refuse `state_dict()` themselves, so one that
    # takes no other weights, as of diffusers, keeps to their error.
    if record.optimizable and save is not None and _takes_weights(save):
        sharded |= any("weights" in plugin.spec.shards for plugin in run.plan.plugins)
    if sharded and save is not None:
        replacement = SaveFull(record, run, save)
        setattr(record.original, _METHOD, replacement)
        record.handles.append(replacement)
