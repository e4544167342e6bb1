# SPDX-License-Identifier: Apache-2.0
"""Reads and writes adapters in peft's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from neuron_accel.errors import CheckpointError, did_you_mean
from neuron_accel_lora.options import check
from neuron_accel_lora.survey import Survey

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import nn

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"


def read_config(folder: str | os.PathLike[str]) -> LoraConfig:
    """Reads the configuration of an adapter in a folder.

    Raises:
        CheckpointError: if there is none, or it is not a LoRA configuration.
        ConfigurationError: if an option is not supported.
    """
    from peft import LoraConfig, PeftConfig

    path = Path(folder, CONFIG)
    if not path.is_file():
        raise CheckpointError(
            f"There is no {CONFIG}.", where=str(folder), fix="pass a folder that peft or save_adapter wrote"
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
    """Loads adapters and other trained parameters from a folder.

    Args:
        folder: the folder.
        survey: the survey of ``model``, whose initial values are replaced.
        model: the unsharded base model.

    Raises:
        CheckpointError: if the tensors in the folder are not exactly those, before anything is changed.
    """
    from safetensors.torch import load_file

    path = Path(folder, WEIGHTS)
    try:
        stored = load_file(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"The adapter's weights cannot be read: {error}", where=str(path), why="only safetensors are read"
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
            why="it is the adapter of another model",
            fix=did_you_mean(name, wanted if name in stored else stored),
        )
    for name, value in wanted.items():
        if stored[name].shape != value.shape:
            raise CheckpointError(
                f"{name!r} has shape {tuple(stored[name].shape)}, not {tuple(value.shape)}.", where=str(path)
            )
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(stored[name])


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], survey: Survey, model: nn.Module) -> None:
    """Writes the tensors of an adapter, by their names in the file, and its configuration.

    Args:
        folder: the folder; created if it is missing.
        tensors: full tensors.
        survey: has the configuration.
        model: the base model.
    """
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
