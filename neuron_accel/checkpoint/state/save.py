"""Writing a checkpoint: every rank its shards, the main process the rest, the manifest last.

A folder is written into under names that the manifest in it, if there is one, does not use. So the checkpoint it held
stays complete until the new manifest replaces the old one, in one operation; what only the old one named is then
removed.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
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

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run

STATE = "training_state"
"""Name of the file, and key in its metadata, of everything but models and optimizers."""
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 3600


@dataclass(kw_only=True)
class Contents:
    """What one rank saves.

    Args:
        items: the tensors that this rank writes.
        state: encoded state, with its tensors; the main process's.
        info: for the manifest; the main process's.
        auxiliary: further files (a model's configuration, a tokenizer) by name; the main process's.
    """

    items: list[Item]
    state: Any = None
    state_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    auxiliary: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where one save goes; the same on all ranks.

    Args:
        folder: the checkpoint.
        generation: how often it was saved into before.
        token: a word that no other save has.
    """

    folder: Path
    generation: int
    token: str


def save(contents: Contents, target: Target, run: Run, files: Files, finished: Callable[[], None]) -> None:
    """Writes a checkpoint. Collective; returns on every rank once it is durable.

    Args:
        finished: called on the main process afterwards; for retention.

    Raises:
        CheckpointError: on every rank, if any could not write. What was in the folder before is still valid.
    """
    part: FileList | NeuronAccelError
    try:
        part = _write_share(contents, target, run, files)
    except NeuronAccelError as error:
        part = error
    parts = run.backend.all_gather_object(part, run.world)
    result: NeuronAccelError | None = first_error(parts)
    if result is None and run.backend.rank == 0:
        try:
            complete(contents, target, parts, files)
            finished()
        except NeuronAccelError as error:
            result = error
    result = run.backend.broadcast_object(result, run.world)
    if result is not None:
        raise result


def first_error(parts: list[Any]) -> NeuronAccelError | None:
    return next((part for part in parts if isinstance(part, NeuronAccelError)), None)


def _write_share(contents: Contents, target: Target, run: Run, files: Files) -> FileList:
    return write_items(target.folder, contents.items, facts_of(run), target.generation, files)


def facts_of(run: Run) -> RankFacts:
    """Coordinates along the axes that are there."""
    degrees = {axis.name: axis.degree for axis in run.mesh.axes}
    coordinates = {axis: i for axis, i in run.coordinates.items() if degrees[axis] > 1}
    return RankFacts(coordinates=coordinates, replica=run.mesh.replica(run.backend.rank))


def complete(contents: Contents, target: Target, parts: list[FileList], files: Files) -> None:
    """The main process's end of a save: other state, auxiliary files, the manifest, and the removal of what is old."""
    folder = target.folder
    entries: dict[str, tuple[str, Written]] = {path: entry for part in parts for path, entry in part.items()}
    name = STATE + (f"-g{target.generation}" if target.generation else "") + ".safetensors"
    tensors = sorted(contents.state_tensors.items())
    header = tensors_header(tensors, {"format": "pt", STATE: json.dumps(contents.state, separators=(",", ":"))})
    entries[name] = ("state", files.write(folder / name, [header, *(bytes_of(tensor) for _, tensor in tensors)]))
    previous = read_manifest(folder) if has_manifest(folder) else None
    changed = {n: data for n, data in contents.auxiliary.items() if not _holds(folder / n, data)}
    if previous is not None and set(changed) & set(previous.files):
        # From here on the old checkpoint's auxiliary files are not its own any more; it stays valid without them.
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
        generation=target.generation,
        info=contents.info,
    )
    files.replace(folder / NAME, manifest.to_bytes())
    files.sync_folder(folder.parent)
    _remove_old(folder, manifest, files)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except FileNotFoundError:
        return False
    except OSError as error:
        raise failure("read", path, error) from error


def _remove_old(folder: Path, manifest: Manifest, files: Files) -> None:
    """Removes what earlier saves into the folder have left and the manifest does not name."""
    candidates = [*folder.glob(f"{STATE}*.safetensors"), *folder.glob(".*.new"), *folder.glob(".*.rank_*.json")]
    for inside in map(folder_of, KINDS):
        candidates += (folder / inside).glob("*rank_*.safetensors")
    for path in candidates:
        if path.relative_to(folder).as_posix() not in manifest.files:
            files.remove(path)


# ---- in the background -----------------------------------------------------------------------------------------------
class BackgroundSave:
    """A save that goes on while training does.

    Ranks do not talk to each other in the background, where their messages would get among those of training. Each
    leaves a note of what it wrote in the folder, and the main process waits for all of them.

    Args:
        contents: its tensors are copied to host memory here, which is all that the caller waits for.
        memory: that memory, from one save to the next.
    """

    def __init__(
        self,
        contents: Contents,
        target: Target,
        run: Run,
        files: Files,
        finished: Callable[[], None],
        memory: StagingMemory,
    ) -> None:
        self._target, self._files, self._finished = target, files, finished
        self._contents = replace(contents, items=copy_to_host(contents.items, memory, threads_of(run)))
        self._rank, self._size, self._facts = run.backend.rank, run.world.size, facts_of(run)
        self.error: NeuronAccelError | None = None
        self._share_done, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="neuron_accel-save")
        self._thread.start()

    def join_share(self) -> None:
        """Returns when this rank has written its files, or has failed with :attr:`error`."""
        self._share_done.wait()

    def abandon(self) -> None:
        """Another rank has failed, and may not even have been able to leave a note of that."""
        self._abandoned.set()

    def join(self) -> None:
        """Returns when this rank has nothing left to do; :attr:`error` then says how it went here."""
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write()
        except NeuronAccelError as error:
            self.error = error
        except Exception as error:  # a thread's exception would be printed and forgotten
            self.error = CheckpointError(f"The background save failed: {error!r}", where=str(self._target.folder))
            self.error.__cause__ = error
        finally:
            self._share_done.set()
            self._contents = Contents(items=[])

    def _write(self) -> None:
        folder, files = self._target.folder, self._files
        try:
            part = write_items(folder, self._contents.items, self._facts, self._target.generation, files)
        except NeuronAccelError as error:
            with suppress(NeuronAccelError):  # a full disk has no room for a note either
                self._leave_note({"error": str(error)})
            raise
        self._leave_note({"files": {path: [kind, w.size, w.checksums] for path, (kind, w) in part.items()}})
        self._share_done.set()
        if self._rank == 0:
            parts = [part, *(self._wait_for(rank) for rank in range(1, self._size))]
            complete(self._contents, self._target, parts, files)
            self._finished()

    def _leave_note(self, note: Mapping[str, Any]) -> None:
        if self._rank:
            self._files.replace(self._note(self._rank), json.dumps(note).encode())

    def _note(self, rank: int) -> Path:
        return self._target.folder / f".{self._target.token}.rank_{rank}.json"

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
                    where=str(self._target.folder),
                    why="it ended, or its folder is not the one of the other ranks",
                    fix="save into a folder on a file system that all machines share",
                )
            time.sleep(_POLL_SECONDS)
        note = json.loads(path.read_bytes())
        if "files" not in note:
            raise CheckpointError(f"Rank {rank} could not write its files of the checkpoint: {note.get('error')}")
        return {
            path: (kind, Written(size, tuple(checksums))) for path, (kind, size, checksums) in note["files"].items()
        }
