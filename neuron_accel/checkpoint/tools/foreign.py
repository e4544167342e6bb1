# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other libraries, for which packages bring readers.

A reader is an entry point of the group ``neuron_accel.checkpoint_readers``: a function that is given a folder and
returns None, or an object with

- ``home``: the folder in which the configuration and the tokenizer are,
- ``tensors(config, compare=...)``: the tensors of the original model, given the folder of its ``config.json`` or None,
  and whether values that several ranks hold must be equal. Each has ``name``, ``shape``, ``dtype`` (``"bfloat16"``) and
  ``read(out, start)``, which fills a one-dimensional array of unsigned integers of the size of an element with the
  elements from ``start`` on, full rows of the first dim.

It raises CheckpointError for a checkpoint of its format that it cannot read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.manifest import locate
from neuron_accel.checkpoint.format.ranges import FileRanges
from neuron_accel.checkpoint.format.source import SourceTensor
from neuron_accel.doors import CHECKPOINT_READERS, entry_points, how_to_install, not_installed
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError, PluginError

if TYPE_CHECKING:
    import numpy as np

    from neuron_accel.storage import Location

_BESIDE = (
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "*.jinja"),
)


@dataclass(kw_only=True)
class ForeignTensor(SourceTensor):
    """A full tensor that a reader reads."""

    reader: Any

    def check(self) -> None:
        """The reader has checked it."""

    def extents(self) -> None:
        return None

    def read(
        self,
        files: FileRanges,
        layout: Layout,
        at: Mapping[str, int],
        out: np.ndarray,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.reader.read(out, start)


@dataclass(frozen=True)
class Foreign:
    """A checkpoint of another library, as a reader has found it."""

    found: Any

    @property
    def home(self) -> Path:
        return self.found.home

    def tensors(self, config: Path | None, *, compare: bool) -> list[ForeignTensor]:
        """Returns the tensors of the model by name.

        Raises:
            CheckpointError: if there is none, and the errors of the reader.
        """
        tensors = [
            ForeignTensor(name=each.name, layout=Layout(shape=tuple(each.shape), dtype=each.dtype), reader=each)
            for each in sorted(self.found.tensors(config, compare=compare), key=lambda each: each.name)
        ]
        if not tensors:
            raise CheckpointError("The checkpoint contains no model.", where=str(self.home))
        return tensors

    def beside(self, config: Path | None) -> dict[str, Location]:
        """Returns the files of configuration and tokenizer by name."""
        found = {path.name for pattern in _BESIDE for path in self.home.glob(pattern) if path.is_file()}
        beside = {name: locate(self.home, name) for name in sorted(found)}
        return beside | ({} if config is None else {"config.json": config / "config.json"})


def find_foreign(folder: Path) -> Foreign | None:
    """Returns the checkpoint of another library in a folder; None if no installed reader knows it.

    Raises:
        PluginError: if a reader cannot be imported.
        CheckpointError: if it cannot be read, or the folder is none of this library's and readers are not installed.
    """
    for point in entry_points(CHECKPOINT_READERS):
        try:
            find = point.load()
        except Exception as error:
            raise PluginError(
                f"The reader of checkpoints {point.name!r} cannot be imported.",
                where=point.value,
                why=f"{type(error).__name__}: {error}",
                fix="install its distribution again, or report it to its authors",
            ) from error
        if (found := find(folder)) is not None:
            return Foreign(found)
    if folder.is_dir() and (missing := not_installed(CHECKPOINT_READERS)):
        raise CheckpointError(
            f"{str(folder)!r} is not a complete checkpoint: it has no manifest.",
            where=str(folder),
            why="the manifest is written last; the save was interrupted, or this is another folder",
            fix="use the previous checkpoint, or the folder that `save_state` returned; for a checkpoint of another "
            f"library, {'; '.join(how_to_install(package) for package in missing)}",
        )
    return None
