"""Numbered checkpoints in one folder: which is the latest, which may go."""

from __future__ import annotations

import re
from pathlib import Path

from neuron_accel.checkpoint.files import Files, failure
from neuron_accel.checkpoint.manifest import has_manifest, read_manifest
from neuron_accel.engine.errors import CheckpointError

_NAME = re.compile(r"checkpoint_(\d+)")


def numbered(folder: Path) -> dict[int, Path]:
    """The folders ``checkpoint_N`` by number, complete or not."""
    try:
        names = list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise failure("read", folder, error) from error
    matches = ((_NAME.fullmatch(path.name), path) for path in names)
    return dict(sorted((int(m.group(1)), path) for m, path in matches if m and path.is_dir()))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``folder``; None if there is none.

    One that was not finished is passed over; so is one whose manifest is damaged: an older one is better than none.
    """
    for path in reversed(numbered(folder).values()):
        if has_manifest(path):
            try:
                read_manifest(path)
            except CheckpointError:
                continue
            return path
    return None


def prune(folder: Path, keep: int, files: Files) -> list[Path]:
    """Removes all but the newest ``keep`` complete checkpoints, and older ones that were never finished.

    Call it when the newest is durable. The manifest of a checkpoint goes first, so that a crash in between leaves
    nothing that looks complete.

    Returns:
        what was removed.
    """
    complete = [(number, path) for number, path in numbered(folder).items() if has_manifest(path)]
    if not complete:
        return []
    newest = complete[-1][0]
    old = [path for _, path in complete[:-keep]]
    old += [path for number, path in numbered(folder).items() if number < newest and not has_manifest(path)]
    for path in old:
        files.remove(path / "manifest.json")
        files.sync_folder(path)
        files.remove(path)
    return old
