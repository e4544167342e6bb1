# SPDX-License-Identifier: Apache-2.0
"""One save: each rank writes its shards, then the main process all other state and finally the manifest.

Files get names that no other save uses, but for auxiliary files and the manifest, which are renamed into place. The
previous checkpoint in the folder thus stays complete until the new manifest replaces the old one atomically, and ranks
of an earlier start that still write change no file of this one. Files that only the old manifest lists are then
removed. If a save fails before, its own files are removed.
"""

from __future__ import annotations

import fnmatch
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.checkpoint.format.files import Files, Written, checksums_of, failure, in_order, read_bytes, threads_of
from neuron_accel.checkpoint.format.index import INDEX, INDEX_FILE, IndexPart
from neuron_accel.checkpoint.format.manifest import (
    KINDS,
    NAME,
    FileEntry,
    Manifest,
    folder_of,
    has_manifest,
    kind_of,
    numbered,
    read_manifest,
)
from neuron_accel.checkpoint.state.lock import SaveLock, describe, this_process
from neuron_accel.checkpoint.state.snapshot import Item, RankFacts, bytes_of, file_header, file_parts, tensors_header
from neuron_accel.checkpoint.state.training import Contents
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError, CommunicationError, NeuronAccelError
from neuron_accel.storage import Location, RemotePath

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run

STATE = "training_state"
"""Name of the file of the state other than models and optimizers, and key of that state in the file's metadata."""
FileList = dict[str, tuple[str, Written]]
"""Kind, and size with checksums, of each file by its relative path."""
_STATE_FILES, _NOTES, _TENSOR_FILES = f"{STATE}*.safetensors", (".*.new", ".*.rank_*.json"), "*rank_*.safetensors"
_INDEX_FILES = f"{INDEX_FILE}*.json"
"""Names of the files that saves write, but for auxiliary files and the manifest."""
_TENSORS = ".safetensors"
_ALIGNMENT = 64  # of tensors in host memory
_POLL_SECONDS = 0.02
_POLL_STORE_SECONDS = 0.5  # each time is a request
_PATIENCE_SECONDS = 3600


class SaveAttempt:
    """A save into a folder: :meth:`enter` it, :meth:`write` this rank's files, :meth:`commit` the checkpoint; or
    :meth:`abandon` it, which removes whatever it has made.

    Args:
        contents: what this rank saves.
        folder: the checkpoint.
        run: the run.
        files: performs the operations on files.
        finished: is called on the main process once the checkpoint is durable, to remove older ones.

    Attributes:
        token: a unique identifier of the save, the same on all ranks.
        is_main: whether this rank is the main process.
    """

    def __init__(
        self, contents: Contents, folder: Location, run: Run, files: Files, finished: Callable[[], None]
    ) -> None:
        self.contents, self.folder, self.token, self._generation, self._suffix = contents, folder, "", 0, ""
        self._run, self._files, self._finished = run, files, finished
        self.is_main, self._facts = run.backend.rank == 0, facts_of(run)
        self._lock, self._is_new = SaveLock(folder, files), isinstance(folder, Path) and not folder.exists()
        self._previous: Manifest | None = None
        self._unlisted: list[Location] = []  # files that no manifest lists before the save is complete
        self._notes: list[Location] = []
        self._headers: dict[str, bytes] = {}  # of this rank's files, by relative path
        self._index: IndexPart | None = None  # of all files, on the main process
        self._is_placing = False
        self._is_handed_over = False  # whether the main process may list the files of this rank in a manifest

    # ---- enter -------------------------------------------------------------------------------------------------------
    def enter(self, complete: Callable[[], None], last: str | None) -> None:
        """Makes the folder and acquires its lock. Collective.

        Args:
            complete: is called on the main process, to complete the contents.
            last: the token of this run's last save into the folder; None without one.

        Raises:
            CheckpointError: on every rank, if that is not possible, or another run saves or has saved into the folder.
        """
        run = self._run
        try:
            part, generation = agreed(
                run, lambda: (self._describe(), self._open(complete, last) if self.is_main else 0)
            )
            self._generation, self.token = run.backend.broadcast_object((generation, uuid.uuid4().hex), run.world)
            self._suffix = f"-g{self._generation}-{self.token[:12]}"  # nothing else writes or removes what has its name
            self._index = run.backend.gather_object(part, run.world, IndexPart.merge)
        except BaseException:
            if self.is_main:
                self._leave()
            raise

    def _open(self, complete: Callable[[], None], last: str | None) -> int:
        """Returns the number of earlier saves into the folder."""
        self._files.make_folder(self.folder)
        self._lock.acquire()
        kinds = ("model", "optimizer", *(("plugin",) if self.contents.state.get("plugin_forms") else ()))
        for kind in kinds:
            self._files.make_folder(self.folder / folder_of(kind))
        complete()
        self._previous = previous = self._find_previous()
        if previous is not None and last not in (None, previous.info.get("save")) and not _is_own(previous):
            raise _was_saved_by(previous, self.folder)
        if isinstance(self.folder, Path):  # left over by a save that was cut off; at a URL after this one
            _remove_unlisted(self.folder, previous, self._files)
        return 0 if previous is None else previous.generation + 1

    def _find_previous(self) -> Manifest | None:
        """The manifest of the checkpoint in the folder. A damaged one is removed: its checkpoint cannot be loaded."""
        path = self.folder / NAME
        if not has_manifest(self.folder):
            return None
        try:
            stored = read_bytes(path)  # if this fails, it may be valid
        except OSError as error:
            raise failure("read", path, error) from error
        try:
            return Manifest.from_bytes(stored, str(path))
        except CheckpointError:
            self._files.remove(path)
            return None

    def detach(self, memory: StagingMemory) -> None:
        """Copies this rank's tensors to host memory, so that training does not change what is saved."""
        items = self.contents.items
        copies = memory.copy([item.tensor for item in items], threads_of(self._run))
        self.contents.items = [replace(item, tensor=copy) for item, copy in zip(items, copies, strict=True)]

    # ---- write and commit --------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """Writes and commits. Collective; returns on every rank when the checkpoint is durable.

        Raises:
            CheckpointError: on every rank, if any rank could not write. A previous checkpoint in the folder is still
                valid.
        """
        run = self._run
        try:
            part = agreed(run, self.write)
            self._is_handed_over = True
            parts = run.backend.gather_object(part, run.world)
            agreed(run, lambda: None if parts is None else self.commit(parts))
        except BaseException as error:  # not all ranks come here if one is lost or interrupted
            self.abandon(alone=isinstance(error, CommunicationError) or not isinstance(error, Exception))
            raise

    def write(self) -> FileList:
        """Writes the tensors of this rank, one file for each kind. Returns the files, which are then on disk."""
        by_file = {self._named(relative): (relative, items) for relative, items in self._by_file().items()}
        self._unlisted += [self.folder / path for path in by_file]
        written: FileList = {}
        for path, (relative, items) in by_file.items():
            parts = file_parts(self._headers[relative], items)
            kind = kind_of(items[0].kind, self._facts.replica)
            written[path] = (kind, self._files.write(self.folder / path, parts))
        return written

    def _by_file(self) -> dict[str, list[Item]]:
        by_file: dict[str, list[Item]] = {}
        for item in sorted(self.contents.items, key=lambda item: (item.collection, item.name, item.start or 0)):
            by_file.setdefault(f"{folder_of(item.kind)}/{self._facts.file_name('')}", []).append(item)
        return by_file

    def _named(self, relative: str) -> str:
        """The path of a file in this save, by that in the first save into a folder."""
        return relative.removesuffix(_TENSORS) + self._suffix + _TENSORS

    def _describe(self) -> IndexPart:
        """Makes the headers of this rank's files. Returns what the index says of them, by their paths in a first
        save."""
        part, rank, coordinates = IndexPart(), self._run.backend.rank, self._facts.coordinates
        for relative, items in self._by_file().items():
            self._headers[relative] = header = file_header(items, coordinates)
            kind, offset = kind_of(items[0].kind, self._facts.replica), 0
            part.files[relative] = (kind, rank, len(header))
            for item in items:
                part.add(kind, rank, item.describe(coordinates), item.numel, offset)
                offset += item.nbytes
        return part

    def commit(self, parts: list[FileList]) -> None:
        """On the main process: writes other state, auxiliary files and the manifest, and removes old files.

        Args:
            parts: the files that each rank has written.
        """
        folder, files, contents = self.folder, self._files, self.contents
        entries = {relative: entry for part in parts for relative, entry in part.items()}
        state = f"{STATE}{self._suffix}.safetensors"
        tensors = sorted(contents.tensors.items())
        self._unlisted.append(folder / state)
        header = tensors_header(tensors, {"format": "pt", STATE: json.dumps(contents.state, separators=(",", ":"))})
        entries[state] = ("state", files.write(folder / state, [header, *(bytes_of(tensor) for _, tensor in tensors)]))
        if self._index is not None:
            index = f"{INDEX_FILE}{self._suffix}.json"
            self._unlisted.append(folder / index)
            entries[index] = (INDEX, files.write(folder / index, [self._index.to_bytes(self._named)]))
        entries |= self._write_auxiliary()
        for inside in {(folder / relative).parent for relative in entries} | {folder}:
            files.sync_folder(inside)
        manifest = Manifest(
            files={
                path: FileEntry(size=w.size, checksums=w.checksums, kind=kind) for path, (kind, w) in entries.items()
            },
            generation=self._generation,
            info={**contents.info, "save": self.token},
        )
        self._lock.confirm()
        self._is_placing = True
        files.replace(folder / NAME, manifest.to_bytes(), self.token)
        files.sync_folder(folder.parent)
        _remove_unlisted(folder, manifest, files)
        self._finished()
        self._lock.release()

    def _write_auxiliary(self) -> FileList:
        folder, files, auxiliary = self.folder, self._files, self.contents.auxiliary
        changed = {name for name, data in auxiliary.items() if not _holds(folder / name, data)}
        self._unlisted += [folder / name for name in changed if not (folder / name).exists()]
        if self._previous is not None and changed & self._previous.files.keys():
            # They are overwritten, so the old manifest must not list them; the old checkpoint is valid without.
            others = {path: entry for path, entry in self._previous.files.items() if path not in changed}
            files.replace(folder / NAME, replace(self._previous, files=others).to_bytes(), self.token)
        return {
            name: (
                "auxiliary",
                files.replace(folder / name, data, self.token)
                if name in changed
                else Written(len(data), checksums_of(data)),
            )
            for name, data in auxiliary.items()
        }

    # ---- abandon -----------------------------------------------------------------------------------------------------
    def abandon(self, *, alone: bool = False) -> None:
        """Removes what the save has made, as far as possible, but no file of a checkpoint whose manifest is in place or
        may still be placed, nor, in a local folder, if another run has taken that over: both have auxiliary files.
        Collective, unless this rank is ``alone``: at the end of its process, or because another is lost. What the main
        process may list then stays: it alone decides, or the next save into the folder does."""
        backend, world = self._run.backend, self._run.world
        if alone and self._is_handed_over and not self.is_main:
            return
        stays = self._may_be_in_place() or (isinstance(self.folder, Path) and self._lock.was_taken)
        if not alone:
            stays = backend.broadcast_object(stays, world)
        for path in [*self._notes, *([] if stays else self._unlisted)]:
            with suppress(NeuronAccelError):
                self._files.remove(path)
        if not alone:
            backend.barrier()
        if self.is_main:
            self._leave()

    def _may_be_in_place(self) -> bool:
        if not self._is_placing:
            return False
        try:
            return has_manifest(self.folder) and read_manifest(self.folder).info.get("save") == self.token
        except CheckpointError:
            return True  # it cannot be read at the moment

    def _leave(self) -> None:
        """Releases the lock, and removes folders that are empty again."""
        self._lock.release()
        if isinstance(self.folder, Path):
            inside = [self.folder / folder_of(kind) for kind in KINDS]
            for path in (*inside, *([self.folder] if self._is_new else [])):
                with suppress(OSError):  # it is not empty, or does not exist
                    path.rmdir()

    # ---- notes of ranks that must not meet ---------------------------------------------------------------------------
    def leave_note(self, note: Mapping[str, Any]) -> None:
        """Tells the main process, in a file, what became of :meth:`write`."""
        if not self.is_main:
            self._notes.append(self._note(self._run.backend.rank))
            self._files.replace(self._notes[-1], json.dumps(note).encode(), self.token)

    def hand_over(self, note: Mapping[str, Any]) -> None:
        """Leaves a note with the files that this rank has written."""
        self._is_handed_over = True
        self.leave_note(note)

    def _note(self, rank: int) -> Location:
        return self.folder / f".{self.token}.rank_{rank}.json"

    def wait_for_notes(self, failed: Callable[[], NeuronAccelError | None]) -> list[FileList]:
        """Returns the files that the other ranks have written, on the main process.

        Args:
            failed: returns the error of a rank that may have been unable to leave a note.
        """
        parts: list[FileList] = []
        for rank in range(1, self._run.world.size):
            self._notes.append(self._note(rank))
            note = json.loads(self._awaited(rank, failed).read_bytes())
            if "files" not in note:
                raise CheckpointError(f"Rank {rank} could not write its files of the checkpoint: {note.get('error')}")
            parts.append(
                {path: (kind, Written(size, tuple(sums))) for path, (kind, size, sums) in note["files"].items()}
            )
            self._unlisted += [self.folder / relative for relative in parts[-1]]
        return parts

    def _awaited(self, rank: int, failed: Callable[[], NeuronAccelError | None]) -> Location:
        path, deadline = self._note(rank), time.monotonic() + _PATIENCE_SECONDS
        while not path.exists():
            if (error := failed()) is not None:
                raise error
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Rank {rank} has not written its files of the checkpoint within {_PATIENCE_SECONDS} s.",
                    where=str(self.folder),
                    why="the rank has ended, or its folder is on another file system",
                    fix="save into a folder on a file system that all machines share",
                )
            time.sleep(_POLL_STORE_SECONDS if isinstance(path, RemotePath) else _POLL_SECONDS)
        return path


class StagingMemory:
    """The host memory that saves in the background copy tensors to, one save at a time.

    New memory costs more than copying, since the system has to find and clear every page. All tensors are therefore
    copied to one region, which is reused by each save and grows as needed. It does not ask for huge pages: where memory
    is fragmented, the system moves other pages to make them, which takes several times as long as small ones.
    """

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor], threads: int) -> list[torch.Tensor]:
        """Returns contiguous copies of ``tensors`` on the CPU. The next call overwrites them.

        Args:
            tensors: tensors on any device.
            threads: number of threads to use if all tensors are on the CPU.
        """
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if size > self._region.numel():
            self._region = torch.empty(0, dtype=torch.uint8)  # releases the memory before more is allocated
            self._region = torch.empty(size, dtype=torch.uint8)
        copies = [
            self._region[offset : offset + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            threads = 1  # devices may be used by the training thread only
        for _ in in_order(_copy, zip(copies, tensors, strict=True), threads):
            pass
        return copies


def _copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        pair[0].copy_(pair[1])


class BackgroundSave:
    """The rest of a save that all ranks have entered, in a thread of each, which issues no collectives: they would be
    mixed up with those of training.

    Args:
        attempt: the save. Nothing else changes the tensors of its contents.
    """

    def __init__(self, attempt: SaveAttempt) -> None:
        self.attempt = attempt
        self.error: NeuronAccelError | None = None
        self._failed_elsewhere: NeuronAccelError | None = None
        self._written = threading.Event()
        self._thread = threading.Thread(target=self._work, name="neuron_accel-save")
        self._thread.start()

    def join_writing(self) -> None:
        """Waits until this rank has written its files, or has failed with :attr:`error`."""
        self._written.wait()

    def give_up(self, error: NeuronAccelError) -> None:
        """Ends the wait for other ranks, of which one has failed."""
        self._failed_elsewhere = error

    def join(self) -> None:
        """Waits until the save is complete on this rank, or has failed with :attr:`error`."""
        self._thread.join()

    def report(self) -> None:
        """Raises the error with which this rank has failed, if it has."""
        if self.error is not None:
            raise self.error

    def _work(self) -> None:
        attempt = self.attempt
        try:
            try:
                part = attempt.write()
            except NeuronAccelError as error:
                with suppress(NeuronAccelError):  # on a full disk the note cannot be written either
                    attempt.leave_note({"error": str(error)})
                raise
            attempt.hand_over({"files": {path: [kind, w.size, w.checksums] for path, (kind, w) in part.items()}})
            self._written.set()
            if attempt.is_main:
                attempt.commit([part, *attempt.wait_for_notes(lambda: self._failed_elsewhere)])
        except NeuronAccelError as error:
            self.error = error
        except Exception as error:  # an exception of a thread would only be printed
            self.error = CheckpointError(f"The background save failed: {error!r}", where=str(attempt.folder))
            self.error.__cause__ = error
        finally:
            self._written.set()
            attempt.contents = Contents(items=[])


def facts_of(run: Run) -> RankFacts:
    """Returns this rank's coordinates along axes with more than one rank, and its replica."""
    degrees = {axis.name: axis.degree for axis in run.mesh.axes}
    coordinates = {axis: i for axis, i in run.coordinates.items() if degrees[axis] > 1}
    return RankFacts(coordinates=coordinates, replica=run.mesh.replica(run.backend.rank))


def _is_own(manifest: Manifest) -> bool:
    """Whether this process has saved it, by whichever accelerator."""
    return manifest.info.get("saved_by") == this_process()


def _was_saved_by(manifest: Manifest, folder: Location) -> CheckpointError:
    other = manifest.info.get("saved_by")
    return CheckpointError(
        f"Another run, {describe(other if isinstance(other, dict) else {})}, has saved into this folder since this run "
        "did.",
        where=str(folder),
        why="the two runs would overwrite each other's checkpoints",
        fix="give each run a folder of its own",
    )


def _holds(path: Location, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False
    except OSError as error:
        raise failure("read", path, error) from error


def _remove_unlisted(folder: Location, manifest: Manifest | None, files: Files) -> None:
    """Removes files of saves into the folder that the manifest does not list, and aborts uploads of such."""
    listed = {} if manifest is None else manifest.files
    found: list[Location] = [path for pattern in (_STATE_FILES, _INDEX_FILES, *_NOTES) for path in folder.glob(pattern)]
    found += [path for kind in KINDS for path in (folder / folder_of(kind)).glob(_TENSOR_FILES)]
    for path in found:
        if path.relative_to(folder).as_posix() not in listed:  # type: ignore[arg-type]  # both are local, or not
            files.remove(path)
    if isinstance(folder, RemotePath):
        files.operation("abort uploads", folder)
        folder.abort_uploads(is_of_a_save)


def is_of_a_save(relative: str) -> bool:
    """Whether a save writes files of this path, relative to its folder, in several parts."""
    inside, _, name = relative.rpartition("/")
    pattern = _TENSOR_FILES if inside in map(folder_of, KINDS) else _STATE_FILES
    return fnmatch.fnmatchcase(name, pattern) and inside in ("", *map(folder_of, KINDS))


def prune(folder: Location, keep: int, files: Files) -> list[Location]:
    """Removes all but the newest ``keep`` complete checkpoints, and incomplete ones that are older than the newest, but
    not one that another process is saving.

    Must be called when the newest is durable. The manifest of a checkpoint is removed first, so that an interruption
    does not leave a folder that looks complete.

    Returns:
        The removed folders.
    """
    complete = [(number, path) for number, path in numbered(folder).items() if has_manifest(path)]
    if not complete:
        return []
    number, newest = complete[-1]
    old = [path for _, path in complete[:-keep]]
    incomplete = [path for other, path in numbered(folder).items() if other < number and not has_manifest(path)]
    old += [path for path in incomplete if not SaveLock(path, files).is_held(newest / NAME)]
    for path in old:
        files.remove(path / NAME)
        files.sync_folder(path)
        files.remove(path, is_folder=True)
        if isinstance(path, RemotePath):
            path.abort_uploads(is_of_a_save)
    return old
