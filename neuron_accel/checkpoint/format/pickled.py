"""Pickled weights, as older folders of transformers have them, read without running what a pickle says.

``torch.load(weights_only=True)`` makes tensors and containers and nothing else. Files of the format that torch has
written since 1.6 (a zip archive, whose records are not compressed) are mapped, so that reading a slice takes no memory
for the rest; the older format has to be read completely.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import failure, open_file
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of ``torch.save``, by name, on the CPU; mapped where the format allows.

    Raises:
        CheckpointError: naming the file: if it cannot be read, is damaged, holds anything but named dense tensors, or
            could be read only by running code that it contains.
    """
    import torch

    loaded = read_containers(path)
    if not isinstance(loaded, Mapping):
        raise _damaged(path, f"it holds a {type(loaded).__name__}, no weights by name")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise _damaged(path, f"{name!r} in it is a {type(value).__name__}, not a dense tensor")
    return {name: value.detach() for name, value in loaded.items()}


def read_containers(path: Path) -> Any:
    """What a file of ``torch.save`` holds: tensors, on the CPU and mapped where the format allows, numbers, text and
    containers of these.

    Raises:
        CheckpointError: naming the file: if it cannot be read, is damaged, or could be read only by running code that
            it contains.
    """
    import torch

    try:
        os.close(open_file(path))  # torch would wait for a pipe
        if is_mapped(path):
            _check_stored(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped(path))
    except OSError as error:
        raise failure("read", path, error) from error
    except pickle.UnpicklingError as error:
        raise _refused(path) from error
    except CheckpointError:
        raise
    except Exception as error:  # whatever a parser raises for random bytes
        raise _damaged(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def is_mapped(path: Path) -> bool:
    """Whether this file is of the format that can be mapped."""
    return zipfile.is_zipfile(path)


def _check_stored(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise _damaged(path, "its records are compressed, which torch does not do")


def _refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} holds more than tensors.",
        where=str(path),
        why="its contents need code to be run, which is not done here; or it is not a file of torch.save at all",
        fix="if you trust it, load it with torch yourself and save the model with `model.save_pretrained(folder)`, "
        "which writes safetensors",
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} is not a file of pickled weights: {why}.",
        where=str(path),
        fix="restore the file from a copy, or save the model once more with `model.save_pretrained(folder)`",
    )
