# SPDX-License-Identifier: Apache-2.0
"""Saves the adapter of a prepared model, or of a checkpoint, in peft's format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.errors import CheckpointError, UsageError
from neuron_accel_lora.files import write_adapter
from neuron_accel_lora.plugin import LoraPlugin, lora_of
from neuron_accel_lora.survey import Survey, take_survey

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel import NeuronAccelerator
    from neuron_accel.contract import ParameterMap, Run


def save_adapter(accelerator: NeuronAccelerator, model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes the adapter of a prepared model in peft's format, so that ``PeftModel.from_pretrained(base, folder)``
    loads it. Collective; the main process writes, and all return once the files are complete.

    Args:
        accelerator: the accelerator that prepared ``model``.
        model: the prepared model.
        folder: the folder; created if it is missing.

    Raises:
        UsageError: if ``model`` was not prepared.
        CheckpointError: on every rank, if the files cannot be written.
    """
    run = accelerator.run
    record = run.prepared(model)
    if record is None:
        raise UsageError(f"This {type(model).__name__} was not prepared.", where="save_adapter")
    survey = lora_of(run).survey_of(record.parameters, run)
    tensors = _gathered(_file_names(survey), record.parameters, run)
    error = None
    if run.backend.rank == 0:
        try:
            write_adapter(Path(folder), tensors, survey, record.original)
        except OSError as failure:
            error = str(failure)
    error = run.backend.broadcast_object(error, run.world)
    if error is not None:
        raise CheckpointError(f"The adapter cannot be written: {error}", where=str(folder))


def extract_adapter(
    checkpoint: str | os.PathLike[str], model: nn.Module, plugin: LoraPlugin, folder: str | os.PathLike[str]
) -> None:
    """Writes the adapter in a consolidated checkpoint in peft's format, in one process without an accelerator.

    Args:
        checkpoint: the output folder of ``neuron-accel consolidate``.
        model: the base model, without adapters; its weights are not used.
        plugin: the plugin of the training.
        folder: the folder; created if it is missing.

    Raises:
        CheckpointError: if the checkpoint lacks a weight of the adapter.
    """
    from safetensors import safe_open

    survey = take_survey(model, plugin.options())
    names, tensors = _file_names(survey), {}
    for path in sorted(Path(checkpoint).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors.update({names[name]: file.get_tensor(name) for name in file.keys() if name in names})  # noqa: SIM118
    missing = sorted(names.values() - tensors.keys())
    if missing:
        raise CheckpointError(
            f"The checkpoint lacks {missing[0]!r}.",
            where=f"{checkpoint}; {len(missing)} such weights",
            why="it is from another training, or is not consolidated",
            fix="run `neuron-accel consolidate` first, and pass the plugin of the training",
        )
    write_adapter(Path(folder), tensors, survey, model)


def _file_names(survey: Survey) -> dict[str, str]:
    """The name in peft's files of each trained parameter, by FQN."""
    names = dict(survey.base)
    for target in survey.targets:
        names.update(zip(target.names, target.stored, strict=True))
    return names


def _gathered(names: dict[str, str], parameters: ParameterMap, run: Run) -> dict[str, torch.Tensor]:
    """The full tensors by their names in the file, on the main process; empty on the others. Collective."""
    run.backend.step_boundary()
    here = run.coordinates
    is_first_replica = all(here[axis] == 0 for axis in (*run.mesh.data_axes, *run.mesh.gradient_axes))  # one copy
    parts: dict[str, Any] = {}
    for name in names:
        record = parameters[name]
        if record.current is not None:
            kept = record.weights  # if ranks keep a part each, these are the values until others are gathered
            part = run.backend.to_host(record.current) if kept is None else run.backend.to_host(kept.gather()).clone()
            if is_first_replica:
                parts[name] = part
    for record in parameters:
        if record.weights is not None:
            record.weights.changed()  # what was gathered last is freed
    everywhere = run.backend.all_gather_object(parts, run.world)
    if run.backend.rank != 0:
        return {}
    full: dict[str, torch.Tensor] = {}
    for name, stored in names.items():
        layout = parameters[name].layout
        for rank, given in zip(run.world.ranks, everywhere, strict=True):
            if name in given:
                tensor = full.setdefault(stored, torch.empty(layout.shape, dtype=given[name].dtype))
                layout.write(given[name], tensor, run.mesh.coordinates(rank))
    return full
