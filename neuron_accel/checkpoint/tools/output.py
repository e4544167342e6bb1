# SPDX-License-Identifier: Apache-2.0
"""The folder that a tool writes: locked meanwhile, and cleaned by the next run if this one is killed.

Before its first file a tool writes a list of all of them into the folder, and removes that list last. So a folder with
such a list is incomplete, it is not loaded, and the next run knows what to remove.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

from neuron_accel.checkpoint.format.files import Files, failure, read_bytes
from neuron_accel.checkpoint.format.index import UNFINISHED
from neuron_accel.checkpoint.state.lock import SaveLock
from neuron_accel.errors import CheckpointError, NeuronAccelError
from neuron_accel.storage import Location, RemotePath


class Output:
    """A context manager in which a tool writes a folder. If the tool raises, the files that it has written are removed.

    Args:
        folder: the folder; made if it does not exist.
        files: performs the operations on files.

    Raises:
        CheckpointError: if another process writes the folder, or it cannot be made or cleaned.
    """

    def __init__(self, folder: Location, files: Files) -> None:
        self.folder, self._files = folder, files
        self._lock = SaveLock(folder, files)
        self._is_new = isinstance(folder, Path) and not folder.exists()
        self._names: list[str] = []

    def __enter__(self) -> Output:
        try:
            self._files.make_folder(self.folder)
            self._lock.acquire()
            self._remove_unfinished()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        mark = self.folder / UNFINISHED
        try:
            if kind is None and mark.exists():
                self._files.remove(mark)
            elif kind is not None:
                with suppress(NeuronAccelError):
                    self._remove(self._names)
        finally:
            self._leave(failed=kind is not None)

    def announce(self, names: Iterable[str]) -> None:
        """Must be called once, before the first file is written.

        Args:
            names: of the files that will be written, relative to the folder. Those that are there already are replaced
                and not removed should the tool fail.
        """
        self._names = [name for name in dict.fromkeys(names) if not (self.folder / name).exists()]
        self._files.replace(self.folder / UNFINISHED, json.dumps(self._names).encode())

    def _remove_unfinished(self) -> None:
        """Removes the files of a run that was killed."""
        mark = self.folder / UNFINISHED
        if isinstance(self.folder, Path):
            self._files.remove(_temporary(mark))
        if not mark.exists():
            return
        try:
            names = json.loads(read_bytes(mark))
        except OSError as error:
            raise failure("read", mark, error) from error
        except ValueError:
            names = None
        if not isinstance(names, list) or not all(isinstance(name, str) and _is_inside(name) for name in names):
            raise CheckpointError(
                f"{UNFINISHED!r}, the list of what an interrupted run has written, is damaged.",
                where=str(mark),
                fix="give a new folder",
            )
        self._remove(names)

    def _remove(self, names: Sequence[str]) -> None:
        """Removes files by name, the last first, what was written for them, and then the list."""
        folders: set[PurePosixPath] = set()
        for name in reversed(names):
            path = self.folder / name
            for each in (path,) if isinstance(path, RemotePath) else (path, _temporary(path), _tensors(path)):
                if each.exists():
                    self._files.remove(each)
            folders |= {parent for parent in PurePosixPath(name).parents if parent.name}
        if isinstance(self.folder, Path):
            for folder in sorted(folders, reverse=True):
                with suppress(OSError):  # it is not empty, or not there
                    (self.folder / folder).rmdir()
        self._files.remove(self.folder / UNFINISHED)

    def _leave(self, *, failed: bool = True) -> None:
        self._lock.release()
        if failed and self._is_new and isinstance(self.folder, Path):
            with suppress(OSError):
                self.folder.rmdir()


def _temporary(path: Location) -> Location:
    """Where :meth:`Files.replace` writes first."""
    return path.with_name(f".{path.name}.new")


def _tensors(path: Location) -> Location:
    """Where tensors are kept that are pickled into ``path``."""
    return path.with_name(f".{path.name}.tensors")


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts
