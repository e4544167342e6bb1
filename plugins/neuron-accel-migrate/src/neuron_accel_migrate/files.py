# SPDX-License-Identifier: Apache-2.0
"""Reads files that ``torch.save`` has written, memory-mapped and without running code that a pickle contains."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

from neuron_accel.errors import CheckpointError


class TensorReference:
    """Placeholder for the class of this name in ``torch_xla.utils.serialization``: a reference to a tensor in another
    file."""

    tid: int


def check_inside(home: Path, path: Path) -> None:
    """Raises CheckpointError if a file is a symbolic link to one outside of the folder ``home``."""
    if not os.path.realpath(path).startswith(os.path.join(os.path.realpath(home), "")):
        raise CheckpointError(
            f"{path.name!r} is outside of the folder of its checkpoint.", where=str(path), why="it is a symbolic link"
        )


def read_saved(path: Path) -> Any:
    """Returns the contents of a file: tensors, numbers, strings and containers of these, and :class:`TensorReference`.

    Raises:
        CheckpointError: if it cannot be read, is damaged, or reading it would run code.
    """
    import torch

    try:
        with zipfile.ZipFile(path) as archive:
            is_compressed = any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist())
        if is_compressed:
            raise ValueError("its records are compressed, which torch does not do")
        known: list[Any] = [(TensorReference, "torch_xla.utils.serialization.TensorReference")]
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise unreadable(path, error) from error
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path.name!r} is not a file that torch.save has written since torch 1.6.", where=str(path)
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path.name!r} contains more than tensors.",
            where=str(path),
            why="reading it would run code that it contains, or it was not written by torch.save",
            fix="if you trust it, load it with torch yourself and save the model with `model.save_pretrained(folder)`, "
            "which writes safetensors",
        ) from error
    except Exception as error:  # parsers raise various types for invalid bytes
        raise CheckpointError(
            f"{path.name!r} is damaged: {str(error).splitlines()[0] if str(error) else type(error).__name__}.",
            where=str(path),
            fix="restore the file from a copy, or use another checkpoint",
        ) from error


def unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path.name!r} cannot be read: {error.strerror or error}.", where=str(path))
