# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint: each rank its shards, then the main process all other state and finally the manifest.

Files get names that an existing manifest in the folder does not use; at a URL, names that no other save uses. The
previous checkpoint in the folder thus stays complete until the new manifest replaces the old one atomically. Files that
only the old manifest lists are then removed. If a save fails before, its own files are removed.
"""

from __future__ import annotations

import fnmatch
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.checkpoint.format.files import Files, Written, checksums_of, failure, threads_of
from neuron_accel.checkpoint.format.index import KINDS
from neuron_accel.checkpoint.format.manifest import (
    NAME,
    FileEntry,
    Manifest,
    has_manifest,
    read_manifest,
)
from neuron_accel.checkpoint.state.snapshot import (
    FileList,
    Item,
    RankFacts,
    bytes_of,
    copy_to_host,
    folder_of,
    tensors_header,
    write_items,
)
from neuron_accel.checkpoint.state.staging import StagingMemory
from neuron_accel.errors import CheckpointError, NeuronAccelError
from neuron_accel.storage import Location, RemotePath

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run

STATE = "training_state"
"""Name of the file of the state other than models and optimizers, and key of that state in the file's metadata."""
_POLL_SECONDS = 0.02
_POLL_STORE_SECONDS = 0.5  # each time is a request
_PATIENCE_SECONDS = 3600


@dataclass(kw_only=True)
class Contents:
    """What one rank saves. All fields but ``items`` are used on the main process only.

    Args:
        items: the tensors that this rank writes.
        state: other state, encoded.
        state_tensors: the tensors that ``state`` refers to.
        info: ``info`` of the manifest.
        auxiliary: further files by name, such as the configuration of a model or the files of a tokenizer.
    """

    items: list[Item]
    state: Any = None
    state_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Destination:
    """The folder of one save, the same on all ranks.

    Args:
        folder: the checkpoint.
        generation: number of earlier saves into the folder.
        token: a unique identifier of the save.
        is_new: whether the folder was made for this save; used on the main process only.
        confirm: is called on the main process before the manifest is replaced; raises CheckpointError if another run
            has taken the folder over.
        placing: is set on the main process when it begins to replace the manifest.
    """

    folder: Location
    generation: int
    token: str
    is_new: bool = False
    confirm: Callable[[], None] = lambda: None
    placing: threading.Event = field(default_factory=threading.Event)

    @property
    def suffix(self) -> str:
        """What the names of the files of this save end in."""
        if isinstance(self.folder, RemotePath):  # a store has no locks: a name of its own cannot be overwritten
            return f"-g{self.generation}-{self.token[:12]}"
        return f"-g{self.generation}" if self.generation else ""

    def remove_empty_folders(self) -> None:
        """Removes the folders that a save has made, after its files were removed."""
        if isinstance(self.folder, RemotePath):
            return
        inside = [self.folder / folder_of(kind) for kind in KINDS]
        for path in (*inside, *([self.folder] if self.is_new else [])):
            with suppress(OSError):  # it is not empty, or does not exist
                path.rmdir()

    def is_current(self) -> bool:
        """Whether the manifest of this save is in place, so that its files must stay."""
        if not self.placing.is_set():
            return False
        try:
            return has_manifest(self.folder) and read_manifest(self.folder).info.get("save") == self.token
        except CheckpointError:
            return True  # it cannot be read at the moment, and may be of this save


def save(contents: Contents, destination: Destination, run: Run, files: Files, finished: Callable[[], None]) -> None:
    """Writes a checkpoint. Collective; returns on every rank when the checkpoint is durable.

    Args:
        contents: what this rank saves.
        destination: the folder.
        run: the run.
        files: performs the operations on files.
        finished: is called on the main process afterwards, to remove older checkpoints.

    Raises:
        CheckpointError: on every rank, if any rank could not write. A previous checkpoint in the folder is still valid.
    """
    part: FileList | NeuronAccelError
    draft = own_files(contents, destination, facts_of(run))
    try:
        part = _write_files(contents, destination, run, files)
    except NeuronAccelError as error:
        part = error
    parts = run.backend.all_gather_object(part, run.world)
    result: NeuronAccelError | None = first_error(parts)
    stays = False
    if result is None and run.backend.rank == 0:
        try:
            complete(contents, destination, parts, files, draft)
            finished()
        except NeuronAccelError as error:
            result, stays = error, destination.is_current()
    result, stays = run.backend.broadcast_object((result, stays), run.world)
    if result is not None:
        if not stays:
            discard(draft, files)
        run.backend.barrier()
        raise result


def own_files(contents: Contents, destination: Destination, facts: RankFacts) -> list[Location]:
    """Returns the files of tensors that a rank writes. No manifest lists them before the save is complete."""
    kinds = sorted({item.kind for item in contents.items})
    return [destination.folder / folder_of(kind) / facts.file_name(destination.suffix) for kind in kinds]


def discard(draft: list[Location], files: Files) -> None:
    """Removes the files of a save that has failed, as far as possible."""
    for path in draft:
        with suppress(NeuronAccelError):
            files.remove(path)


def first_error(parts: list[Any]) -> NeuronAccelError | None:
    """Returns the first error in ``parts``, or None."""
    return next((part for part in parts if isinstance(part, NeuronAccelError)), None)


def _write_files(contents: Contents, destination: Destination, run: Run, files: Files) -> FileList:
    return write_items(destination.folder, contents.items, facts_of(run), destination.suffix, files)


def facts_of(run: Run) -> RankFacts:
    """Returns this rank's coordinates along axes with more than one rank, and its replica."""
    degrees = {axis.name: axis.degree for axis in run.mesh.axes}
    coordinates = {axis: i for axis, i in run.coordinates.items() if degrees[axis] > 1}
    return RankFacts(coordinates=coordinates, replica=run.mesh.replica(run.backend.rank))


def complete(
    contents: Contents, destination: Destination, parts: list[FileList], files: Files, draft: list[Location]
) -> None:
    """Completes a save on the main process: writes other state, auxiliary files and the manifest, and removes old
    files. Files that did not exist before are added to ``draft``."""
    folder = destination.folder
    entries: dict[str, tuple[str, Written]] = {path: entry for part in parts for path, entry in part.items()}
    name = f"{STATE}{destination.suffix}.safetensors"
    tensors = sorted(contents.state_tensors.items())
    draft.append(folder / name)
    header = tensors_header(tensors, {"format": "pt", STATE: json.dumps(contents.state, separators=(",", ":"))})
    entries[name] = ("state", files.write(folder / name, [header, *(bytes_of(tensor) for _, tensor in tensors)]))
    previous = read_manifest(folder) if has_manifest(folder) else None
    changed = {n: data for n, data in contents.auxiliary.items() if not _holds(folder / n, data)}
    draft += [folder / n for n in changed if not (folder / n).exists()]
    if previous is not None and set(changed) & set(previous.files):
        # Auxiliary files are overwritten, so the old manifest must not list them; the old checkpoint is valid without.
        kept = {path: entry for path, entry in previous.files.items() if path not in changed}
        files.replace(folder / NAME, replace(previous, files=kept).to_bytes())
    for aux, data in contents.auxiliary.items():
        entries[aux] = (
            "auxiliary",
            files.replace(folder / aux, data) if aux in changed else Written(len(data), checksums_of(data)),
        )
    for inside in {(folder / path).parent for path in entries} | {folder}:
        files.sync_folder(inside)
    manifest = Manifest(
        files={path: FileEntry(size=w.size, checksums=w.checksums, kind=kind) for path, (kind, w) in entries.items()},
        generation=destination.generation,
        info={**contents.info, "save": destination.token},
    )
    destination.confirm()
    destination.placing.set()
    files.replace(folder / NAME, manifest.to_bytes())
    files.sync_folder(folder.parent)
    _remove_old(folder, manifest, files)


def _holds(path: Location, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False
    except OSError as error:
        raise failure("read", path, error) from error


_STATE_FILES, _NOTES, _TENSOR_FILES = f"{STATE}*.safetensors", (".*.new", ".*.rank_*.json"), "*rank_*.safetensors"
"""Names of the files that saves write, but for auxiliary files and the manifest."""


def _remove_old(folder: Location, manifest: Manifest, files: Files) -> None:
    """Removes files of earlier saves into the folder that the manifest does not list, and aborts uploads of such."""
    candidates: list[Location] = []
    for pattern in (_STATE_FILES, *_NOTES):
        candidates += folder.glob(pattern)
    for inside in map(folder_of, KINDS):
        candidates += (folder / inside).glob(_TENSOR_FILES)
    for path in candidates:
        if _relative(path, folder) not in manifest.files:
            files.remove(path)
    if isinstance(folder, RemotePath):
        files.operation("abort uploads", folder)
        folder.abort_uploads(is_of_a_save)


def _relative(path: Location, folder: Location) -> str:
    return path.relative_to(folder).as_posix()  # type: ignore[arg-type]  # both are local, or both at a URL


def is_of_a_save(relative: str) -> bool:
    """Whether a save writes files of this path, relative to its folder, in several parts."""
    inside, _, name = relative.rpartition("/")
    pattern = _TENSOR_FILES if inside in map(folder_of, KINDS) else _STATE_FILES
    return fnmatch.fnmatchcase(name, pattern) and inside in ("", *map(folder_of, KINDS))


# ---- in the background -----------------------------------------------------------------------------------------------
class BackgroundSave:
    """A save in a background thread.

    The thread issues no collectives, which would be mixed up with those of training. Each rank writes a note with the
    list of its files into the folder, and the main process waits for all notes.

    Args:
        contents: what this rank saves. The constructor copies its tensors to host memory and then returns.
        destination: the folder.
        run: the run.
        files: performs the operations on files.
        finished: is called on the main process afterwards, to remove older checkpoints.
        memory: the host memory to copy to, which is reused by later saves.
    """

    def __init__(
        self,
        contents: Contents,
        destination: Destination,
        run: Run,
        files: Files,
        finished: Callable[[], None],
        memory: StagingMemory,
    ) -> None:
        self.destination, self._files, self._finished = destination, files, finished
        self._contents = replace(contents, items=copy_to_host(contents.items, memory, threads_of(run)))
        self._rank, self._size, self._facts = run.backend.rank, run.world.size, facts_of(run)
        self._draft = own_files(contents, destination, self._facts)
        self.error: NeuronAccelError | None = None
        self._files_done, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="neuron_accel-save")
        self._thread.start()

    def join_files(self) -> None:
        """Waits until this rank has written its files, or has failed with :attr:`error`."""
        self._files_done.wait()

    def abandon(self) -> None:
        """Stops waiting for other ranks, because one has failed and may have been unable to write a note."""
        self._abandoned.set()

    def discard(self, *, stays: bool) -> None:
        """Removes the files of the save, which has failed, as far as this rank knows them; if the manifest is in place,
        so that the checkpoint ``stays``, only the note."""
        discard([*([] if stays else self._draft), *([self._note(self._rank)] if self._rank else [])], self._files)

    def join(self) -> None:
        """Waits until the save is complete on this rank, or has failed with :attr:`error`."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except NeuronAccelError as error:
            self.error = error
        except Exception as error:  # an exception of a thread would only be printed
            self.error = CheckpointError(f"The background save failed: {error!r}", where=str(self.destination.folder))
            self.error.__cause__ = error
        finally:
            self._files_done.set()
            self._contents = Contents(items=[])

    def _write(self) -> None:
        folder, files = self.destination.folder, self._files
        try:
            part = write_items(folder, self._contents.items, self._facts, self.destination.suffix, files)
        except NeuronAccelError as error:
            with suppress(NeuronAccelError):  # on a full disk the note cannot be written either
                self._leave_note({"error": str(error)})
            raise
        self._leave_note({"files": {path: [kind, w.size, w.checksums] for path, (kind, w) in part.items()}})
        self._files_done.set()
        if self._rank == 0:
            parts = [part]
            for rank in range(1, self._size):
                self._draft.append(self._note(rank))
                parts.append(self._wait_for(rank))
                self._draft += [folder / path for path in parts[-1]]
            complete(self._contents, self.destination, parts, files, self._draft)
            self._finished()

    def _leave_note(self, note: Mapping[str, Any]) -> None:
        if self._rank:
            self._files.replace(self._note(self._rank), json.dumps(note).encode())

    def _note(self, rank: int) -> Location:
        return self.destination.folder / f".{self.destination.token}.rank_{rank}.json"

    def _wait_for(self, rank: int) -> FileList:
        path, deadline = self._note(rank), time.monotonic() + _PATIENCE_SECONDS
        while not path.exists():
            if self._abandoned.is_set():
                raise CheckpointError(
                    f"Rank {rank} could not write its files of the checkpoint.", where=str(path.parent)
                )
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Rank {rank} has not written its files of the checkpoint within {_PATIENCE_SECONDS} s.",
                    where=str(self.destination.folder),
                    why="the rank has ended, or its folder is on another file system",
                    fix="save into a folder on a file system that all machines share",
                )
            time.sleep(_POLL_STORE_SECONDS if isinstance(path, RemotePath) else _POLL_SECONDS)
        note = json.loads(path.read_bytes())
        if "files" not in note:
            raise CheckpointError(f"Rank {rank} could not write its files of the checkpoint: {note.get('error')}")
        return {
            path: (kind, Written(size, tuple(checksums))) for path, (kind, size, checksums) in note["files"].items()
        }
