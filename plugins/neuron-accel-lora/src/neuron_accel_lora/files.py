"""Adapters as peft keeps them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.contract import CheckpointError, UsageError, did_you_mean
from neuron_accel_lora.options import check
from neuron_accel_lora.survey import Survey, take_survey

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn

    from neuron_accel import NeuronAccelerator
    from neuron_accel.contract import ParameterMap, Run
    from neuron_accel_lora.plugin import LoraPlugin

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def read_config(folder: str | os.PathLike[str]) -> LoraConfig:
    """The configuration of an adapter in a folder.

    Raises:
        CheckpointError: if there is none, or it is none of LoRA.
        ConfigurationError: if it asks for something that is not possible.
    """
    from peft import LoraConfig, PeftConfig

    path = Path(folder, CONFIG)
    if not path.is_file():
        raise CheckpointError(
            f"There is no {CONFIG}.", where=str(folder), fix="name a folder that peft or save_adapter wrote"
        )
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError("peft cannot read the configuration.", where=str(path), why=str(error)) from error
    if not isinstance(config, LoraConfig):
        raise CheckpointError(f"This is an adapter of another kind: {config.peft_type}.", where=str(path))
    config.inference_mode = False
    check(config)
    return config


def load_adapter(folder: str | os.PathLike[str], survey: Survey, model: nn.Module) -> None:
    """Gives adapters, and what else is trained, the values in a folder.

    Args:
        survey: of ``model``; its values are replaced.
        model: still whole.

    Raises:
        CheckpointError: if the folder does not hold exactly these. Nothing is changed then.
    """
    from safetensors.torch import load_file

    path = Path(folder, WEIGHTS)
    try:
        stored = load_file(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The adapter's weights cannot be read: {error}", where=str(path), why="nothing that is pickled is read"
        ) from error
    own = dict(model.named_parameters())
    wanted = {name: own[fqn].data for fqn, name in survey.base.items()}
    for target in survey.targets:
        wanted.update(zip(target.stored, (target.a, target.b), strict=True))
    table = {name for name in stored if name.endswith(".base_layer.weight")}  # of adapted embeddings: peft adds them
    for name in sorted(wanted.keys() ^ (stored.keys() - table)):
        whose = "The adapter has" if name in stored else "The adapter lacks"
        raise CheckpointError(
            f"{whose} {name!r}.",
            where=str(path),
            why="it is an adapter of another model",
            fix=did_you_mean(name, wanted if name in stored else stored),
        )
    for name, target in wanted.items():
        if stored[name].shape != target.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(stored[name].shape)}, not {tuple(target.shape)}.", where=str(path)
            )
    with torch.no_grad():
        for name, target in wanted.items():
            target.copy_(stored[name])


def save_adapter(accelerator: NeuronAccelerator, model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes the adapter of a prepared model as peft does, so that ``PeftModel.from_pretrained(base, folder)`` loads
    it. Every process calls it; the main process writes, and all return once the files are complete.

    Args:
        accelerator: that prepared ``model``.
        folder: made where it is missing.

    Raises:
        UsageError: if ``model`` was not prepared.
    """
    run = accelerator.run
    record = run.prepared(model)
    if record is None:
        raise UsageError(f"This {type(model).__name__} was not prepared.", where="save_adapter")
    survey = run.plan.plugin("lora").survey_of(record.parameters, run)
    tensors = _gathered(_file_names(survey), record.parameters, run)
    error = None
    if run.backend.rank == 0:
        try:
            _write(Path(folder), tensors, survey, record.original)
        except OSError as failure:
            error = str(failure)
    error = run.backend.broadcast_object(error, run.world)
    if error is not None:
        raise CheckpointError(f"The adapter cannot be written: {error}", where=str(folder))


def extract_adapter(
    checkpoint: str | os.PathLike[str], model: nn.Module, plugin: LoraPlugin, folder: str | os.PathLike[str]
) -> None:
    """Writes the adapter in a consolidated checkpoint as :func:`save_adapter` writes that of a training. In one
    process, without an accelerator.

    Args:
        checkpoint: what ``neuron-accel consolidate`` wrote.
        model: the base model, without adapters; its weights are not looked at.
        plugin: as in the training.
        folder: made where it is missing.

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
            why="it is that of another training, or has not been consolidated",
            fix="run `neuron-accel consolidate` first, and give the plugin of the training",
        )
    _write(Path(folder), tensors, survey, model)


def _file_names(survey: Survey) -> dict[str, str]:
    """FQNs of what is trained, and what that is called in the files of an adapter."""
    names = dict(survey.base)
    for target in survey.targets:
        names.update(zip(target.names, target.stored, strict=True))
    return names


def _gathered(names: dict[str, str], parameters: ParameterMap, run: Run) -> dict[str, torch.Tensor]:
    """Whole tensors by the names of the file, on the main process."""
    run.backend.step_boundary()
    here = run.coordinates
    speaks = all(here[axis] == 0 for axis in (*run.mesh.data_axes, *run.mesh.gradient_axes))  # one copy
    parts: dict[str, Any] = {}
    for name in names:
        current = parameters[name].current
        if current is not None:
            part = run.backend.to_host(current)
            if speaks:
                parts[name] = part
    everywhere = run.backend.all_gather_object(parts, run.world)
    if run.backend.rank != 0:
        return {}
    full = {}
    for name, stored in names.items():
        layout = parameters[name].layout
        for rank, given in zip(run.world.ranks, everywhere, strict=True):
            if name in given:
                whole = full.setdefault(stored, torch.empty(layout.shape, dtype=given[name].dtype))
                layout.write(given[name], whole, run.mesh.coordinates(rank))
    return full


def _write(folder: Path, tensors: dict[str, torch.Tensor], survey: Survey, model: nn.Module) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(survey.config)
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    for name, write in (
        (WEIGHTS, lambda path: save_file(tensors, path, metadata={"format": "pt"})),
        (CONFIG, lambda path: _write_config(config, path)),
    ):
        staged = folder / f".{name}.part"
        write(staged)
        os.replace(staged, folder / name)


def _write_config(config: LoraConfig, path: Path) -> None:
    import json

    data = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    path.write_text(json.dumps(data, indent=2, sort_keys=True))
