# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint, and which folders are complete checkpoints.

``manifest.json`` is written last. It lists every file with its size and checksums, and contains a checksum of itself. A
folder with a manifest is therefore complete, and later changes are detected.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from neuron_accel.checkpoint.format.files import checksum_of_block, failure, number_of_blocks, read_bytes
from neuron_accel.checkpoint.format.tensorfile import unique_keys
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import Location, RemotePath

NAME = "manifest.json"
FORMAT = "neuron_accel checkpoint"
VERSION = 1
MODEL_FOLDER = "tensor_parallel_shards"
"""Name of the folder of the model's files, for any kind of sharding. Scripts written for optimum-neuron consolidate
this folder."""


KINDS = ("model", "optimizer", "plugin")
"""Kinds of files with tensors. The name of a collection begins with its kind."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        size: in bytes.
        checksums: checksums of its blocks, see :class:`~neuron_accel.checkpoint.format.files.Written`.
        kind: ``"model"``, ``"optimizer"``, ``"plugin"``, ``"state"`` or ``"auxiliary"``; ``"model@1"`` for the model of
            the second replica.
    """

    size: int
    checksums: tuple[str, ...]
    kind: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of a checkpoint, and a description of the run that saved it.

    Args:
        files: the files, by path relative to the folder.
        generation: number of earlier saves into the folder.
        info: mesh, plan, versions and counters, as plain data.
    """

    files: Mapping[str, FileEntry]
    generation: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "version": VERSION,
            "generation": self.generation,
            "info": dict(self.info),
            "files": {path: asdict(entry) for path, entry in sorted(self.files.items())},
        }
        return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Inverse of :meth:`to_bytes`.

        Raises:
            CheckpointError: if ``data`` is not a manifest, is damaged, or lists a file outside of the folder.
        """
        try:
            body = json.loads(data.decode(), object_pairs_hook=unique_keys)
            digest = body.pop("sha256")
            if digest != _digest(body):
                raise ValueError("its checksum does not match")
            if body["format"] != FORMAT:
                raise ValueError(f"its format is {body['format']!r}")
            if body["version"] != VERSION:
                raise ValueError(f"its version is {body['version']!r}, this is version {VERSION}")
            files = {_checked(path): _file_entry(entry) for path, entry in body["files"].items()}
            if not isinstance(body["info"], dict) or type(body["generation"]) is not int:
                raise ValueError("a value is of the wrong type")
            return cls(files=files, generation=body["generation"], info=body["info"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"The manifest cannot be used: {error or type(error).__name__}.",
                where=where,
                why="without it a checkpoint cannot be known to be complete",
                fix="restore the file from a copy, or use another checkpoint",
            ) from error

    def of_kind(self, kind: str) -> list[str]:
        """Returns the relative paths of the files of one kind."""
        return [path for path, entry in self.files.items() if entry.kind == kind]


def folder_of(kind: str) -> str:
    """Returns the folder, within a checkpoint, of the files of one kind."""
    return MODEL_FOLDER if kind == "model" else kind


def kind_of(base: str, replica: int) -> str:
    """Returns the kind of a file in the manifest: ``model``, ``optimizer`` or ``plugin``, followed by ``@`` and the
    number of the replica if it is not the first. A reader without support for replicas thus reads the first."""
    return f"{base}@{replica}" if replica else base


def replicas_in(manifest: Manifest) -> int:
    """Returns the number of replicas of which a checkpoint has a copy."""
    kinds = {entry.kind for entry in manifest.files.values()}
    count = 1
    while any(kind_of(base, count) in kinds for base in KINDS):
        count += 1
    return count


def has_manifest(folder: Location) -> bool:
    """Whether there is a manifest. Raises OSError if the file system does not say: ``Path.is_file`` of Python 3.14
    takes any failure for absence, and files of a checkpoint that is there would be removed."""
    path = folder / NAME
    if isinstance(path, RemotePath):
        return path.is_file()
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_manifest(folder: Location) -> Manifest:
    """Reads the manifest of the checkpoint in ``folder``.

    Raises:
        CheckpointError: if there is no checkpoint, or it is incomplete or damaged.
    """
    path = folder / NAME
    try:
        data = read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            raise CheckpointError(
                f"{str(folder)!r} is a file, not the folder of a checkpoint."
                if folder.exists()
                else f"{str(folder)!r} does not exist.",
                where=str(folder),
                fix="give the folder that `save_state` returned",
            ) from None
        raise CheckpointError(
            f"{str(folder)!r} is not a complete checkpoint: it has no {NAME}.",
            where=str(path),
            why="the manifest is written last; the save was interrupted, or this is another folder",
            fix="use the previous checkpoint, or the folder that `save_state` returned",
        ) from None
    except OSError as error:
        raise failure("read", path, error) from error
    return Manifest.from_bytes(data, str(path))


def locate(folder: Location, relative: str) -> Location:
    """Returns the path of a file that a manifest lists.

    Raises:
        CheckpointError: if it is a symbolic link to a file outside of the folder.
    """
    path = folder / relative
    if isinstance(folder, RemotePath) or isinstance(path, RemotePath):
        return path  # a store has no links
    if not os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), "")):
        raise CheckpointError(
            f"{relative!r} is outside of the folder of its checkpoint.", where=str(path), why="it is a symbolic link"
        )
    return path


def check_file(folder: Location, relative: str, entry: FileEntry) -> None:
    """Checks the size and the checksums of a file.

    Raises:
        CheckpointError: if the file is missing, or has another size or other contents.
    """
    check_size(folder, relative, entry)
    for block in range(number_of_blocks(entry.size)):
        check_block(folder, relative, entry, block)


def check_size(folder: Location, relative: str, entry: FileEntry) -> None:
    """Checks that a file exists and has the size in the manifest; raises CheckpointError otherwise."""
    path = locate(folder, relative)
    if not path.is_file():
        raise CheckpointError(f"{relative!r} is missing.", where=str(path), fix="use another checkpoint")
    size = path.size if isinstance(path, RemotePath) else path.stat().st_size
    if size != entry.size:
        raise CheckpointError(
            f"{relative!r} has {size} bytes; it was saved with {entry.size}.",
            where=str(path),
            why="it was truncated or replaced",
            fix="restore it from a copy, or use another checkpoint",
        )


def check_block(folder: Location, relative: str, entry: FileEntry, block: int) -> None:
    """Checks the checksum of one block of a file; raises CheckpointError if it does not match."""
    path = locate(folder, relative)
    if checksum_of_block(path, block, entry.size) != entry.checksums[block]:
        raise CheckpointError(
            f"{relative!r} is damaged: its checksum does not match.",
            where=str(path),
            why="its contents changed after it was saved",
            fix="restore it from a copy, or use another checkpoint",
        )


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _file_entry(entry: Mapping[str, Any]) -> FileEntry:
    result = FileEntry(**{**entry, "checksums": tuple(entry["checksums"])})
    if type(result.size) is not int or not all(isinstance(v, str) for v in (*result.checksums, result.kind)):
        raise ValueError("the entry of a file has a value of the wrong type")
    if result.size < 0 or len(result.checksums) != number_of_blocks(result.size):
        raise ValueError("the number of a file's checksums is not that of its blocks")
    return result


def _checked(path: str) -> str:
    pure = PurePosixPath(path)
    if (
        path in ("", ".", NAME)
        or pure.is_absolute()
        or ".." in pure.parts
        or "\\" in path
        or "\0" in path
        or str(pure) != path
    ):
        raise ValueError(f"the path {path!r} is not one of a file in the folder")
    return path


# ---- The checkpoints in a folder -------------------------------------------------------------------------------------
_NAME = re.compile(r"checkpoint_(\d+)")
NUMBERED = "checkpoints"
"""The folder of a project in which checkpoints are numbered."""


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


def last_number(folder: Location) -> int:
    """The largest number of saves of the complete checkpoints in ``folder``; 0 without one."""
    try:
        return max((saved[0] for path in _contents(folder) if (saved := when_saved(path)) is not None), default=0)
    except (CheckpointError, OSError):
        return 0


def when_saved(path: Location) -> tuple[int, str, int] | None:
    """Orders checkpoints by when they were saved: by the number of saves, which only grows, and those of versions
    without it before them, by the time in their manifest and then that of the file. None if a checkpoint is incomplete,
    or its manifest is damaged. An error of a store is raised, since an older checkpoint would be loaded instead."""
    if not has_manifest(path):
        return None
    try:
        stored, written = read_bytes(path / NAME), (path / NAME).stat().st_mtime_ns
    except OSError:
        return None
    try:
        info = Manifest.from_bytes(stored, str(path / NAME)).info
    except CheckpointError:
        return None
    number = saves_in(info)
    return (number, "", 0) if number else (0, str(info.get("saved", "")), written)


def saves_in(info: Mapping[str, Any]) -> int:
    """The number of saves in what a manifest says; 0 without one."""
    number = info.get("saves")
    return number if type(number) is int and 0 < number < 2**63 else 0


def _contents(folder: Location) -> list[Location]:
    try:
        return list(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise failure("read", folder, error) from error
