# SPDX-License-Identifier: Apache-2.0
"""Reads pickled weights, as in older folders of transformers, without running code that a pickle contains.

``torch.load(weights_only=True)`` creates only tensors and containers. Files of the format that torch writes since 1.6
(a zip archive of uncompressed records) are memory-mapped, so that reading a slice does not read the rest; files of the
older format are read completely.
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
from neuron_accel.storage import Location, RemotePath

if TYPE_CHECKING:
    import torch


def read_pickled(path: Location) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file written by ``torch.save``, by name, on the CPU; memory-mapped if the format allows.

    Raises:
        CheckpointError: if the file cannot be read, is damaged, contains anything but a dict of dense tensors, or
            reading it would run code.
    """
    import torch

    loaded = read_containers(path)
    if not isinstance(loaded, Mapping):
        raise _damaged(path, f"it contains a {type(loaded).__name__}, not weights by name")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise _damaged(path, f"{name!r} in it is a {type(value).__name__}, not a dense tensor")
    return {name: value.detach() for name, value in loaded.items()}


def read_containers(path: Location) -> Any:
    """Returns the contents of a file written by ``torch.save``: tensors, on the CPU and memory-mapped if the format
    allows, numbers, strings and containers of these.

    Raises:
        CheckpointError: if the file cannot be read, is damaged, or reading it would run code.
    """
    import torch

    if isinstance(path, RemotePath):
        raise CheckpointError(
            f"{path.name!r} is a file of pickled weights, which are read from local folders only.",
            where=str(path),
            why="they are memory-mapped",
            fix="copy the folder, or save the model once more with `model.save_pretrained(folder)`",
        )
    try:
        os.close(open_file(path))  # raises for a pipe, on which torch would wait
        if is_mapped(path):
            _check_stored(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped(path))
    except OSError as error:
        raise failure("read", path, error) from error
    except pickle.UnpicklingError as error:
        raise _refused(path) from error
    except CheckpointError:
        raise
    except Exception as error:  # parsers raise various types for invalid bytes
        raise _damaged(path, str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def is_mapped(path: Location) -> bool:
    """Returns whether a file is of the format that can be memory-mapped."""
    if isinstance(path, RemotePath):
        return False
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # in the records of a large archive
        return False


def _check_stored(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
            raise _damaged(path, "its records are compressed, which torch does not do")


def _refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} contains more than tensors.",
        where=str(path),
        why="reading it would run code that it contains, or it was not written by torch.save",
        fix="if you trust it, load it with torch yourself and save the model with `model.save_pretrained(folder)`, "
        "which writes safetensors",
    )


def _damaged(path: Location, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} is not a file of pickled weights: {why}.",
        where=str(path),
        fix="restore the file from a copy, or save the model once more with `model.save_pretrained(folder)`",
    )
