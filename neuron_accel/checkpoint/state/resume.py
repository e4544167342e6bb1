# SPDX-License-Identifier: Apache-2.0
"""What ``load_state(resume="latest")`` finds in a folder, and what it says about it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_accel.checkpoint.format.files import failure, read_bytes
from neuron_accel.checkpoint.format.manifest import NAME, Manifest, has_manifest
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import Location

_NAME = re.compile(r"checkpoint_(\d+)")
NUMBERED = "checkpoints"
"""The folder of a project in which checkpoints are numbered."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What `load_state` has loaded. False in a condition if there was nothing to load.

    Args:
        folder: the folder of the checkpoint; None if nothing was loaded.
        saved: when it was saved, in UTC; None for a folder that contains only weights.
        ranks: number of ranks that saved it.
        positions: for each loader the epoch, from 0, and the number of samples that all ranks together have had of it.
    """

    folder: str | None = None
    saved: str | None = None
    ranks: int | None = None
    positions: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return self.folder is not None

    def __str__(self) -> str:
        if self.folder is None:
            return "nothing to resume: training starts from the beginning"
        if self.saved is None:
            return f"loaded weights from {self.folder}"
        by = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        epochs = "; ".join(f"epoch {epoch}, after {samples} samples" for epoch, samples in self.positions)
        return f"resumed from {self.folder}, saved {self.saved} by {by}" + (f": {epochs}" if epochs else "")


def describe_loaded(folder: Location, info: Mapping[str, Any], loaders: Any) -> Resumed:
    """Describes a checkpoint that was loaded.

    Args:
        folder: its folder.
        info: what its manifest says of the run that saved it; empty for a folder that contains only weights.
        loaders: the prepared loaders, in their new positions.
    """
    places = [loader.position() for loader in loaders if info and hasattr(loader, "position")]
    return Resumed(
        folder=str(folder),
        saved=info.get("saved"),
        ranks=info.get("world_size"),
        positions=tuple((place["epoch"], 0 if place["begin"] is None else place["samples"]) for place in places),
    )


def step_of(counters: Mapping[str, int], step: int, accumulation: int) -> int:
    """Returns the number of micro-batches since accumulation began, for a run of ``accumulation`` of them per step.

    A run that continues on fewer data-parallel ranks accumulates more micro-batches than the one that saved, and a
    checkpoint between two steps of the one is between two steps of the other.

    Args:
        counters: those of the checkpoint; empty if it has none.
        step: the number if ``counters`` has none.
        accumulation: micro-batches of an optimizer step.
    """
    saved = counters.get("step", step)
    steps, within = divmod(saved, max(1, counters.get("accumulation", accumulation)))
    return saved if within else steps * accumulation


def numbered(folder: Location) -> dict[int, Location]:
    """Returns the folders ``checkpoint_N`` by number, complete or not."""
    matches = ((_NAME.fullmatch(path.name), path) for path in _contents(folder))
    return dict(sorted((int(m.group(1)), path) for m, path in matches if m and path.is_dir()))


def latest(folder: Location) -> Location | None:
    """Returns the complete checkpoint ``checkpoint_N`` with the highest number in ``folder``, or None.

    Incomplete checkpoints, and those whose manifest is damaged, are skipped.
    """
    return next((path for path in reversed(numbered(folder).values()) if when_saved(path) is not None), None)


def latest_of(folder: Location) -> Location | None:
    """Returns the complete checkpoint that was saved last, of ``folder`` itself, the folders in it and those in its
    folder ``checkpoints``; None if there is none."""
    places = (folder, *_contents(folder), *_contents(folder / NUMBERED))
    complete = [(saved, path) for path in places if (saved := when_saved(path)) is not None]
    return max(complete, key=lambda found: (found[0], str(found[1])))[1] if complete else None


def when_saved(path: Location) -> tuple[str, int] | None:
    """When a checkpoint was saved, in seconds and then by the time of the file; None if it is incomplete, or its
    manifest is damaged. An error of a store is raised, since an older checkpoint would be loaded instead."""
    if not has_manifest(path):
        return None
    try:
        stored, written = read_bytes(path / NAME), (path / NAME).stat().st_mtime_ns
    except OSError:
        return None
    try:
        return str(Manifest.from_bytes(stored, str(path / NAME)).info.get("saved", "")), written
    except CheckpointError:
        return None


def _contents(folder: Location) -> list[Location]:
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise failure("read", folder, error) from error
