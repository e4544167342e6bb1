"""Snapshots: checkpoints in files in memory, which outlive the ranks and end with their launcher.

A snapshot is a checkpoint like any other, in a folder that the launcher of each machine has made on a file system in
memory. Two folders are used in turn, so that a rank that ends while one is written leaves the other. Every rank writes
its shards on its own machine; the manifest and the state that only the main process writes are copied to all machines.
Before a snapshot is loaded, files that a machine does not have are fetched from those that have them. (Wang et al.,
"Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints", SOSP 2023, is the idea of
checkpoints in the memory of the machines that train.)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import failure
from neuron_accel.checkpoint.format.index import KINDS
from neuron_accel.checkpoint.format.manifest import NAME, Manifest, check_file, has_manifest, read_manifest
from neuron_accel.checkpoint.state.resume import when_saved
from neuron_accel.checkpoint.state.snapshot import folder_of
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.storage import Location

SNAPSHOTS = "NEURON_ACCEL_SNAPSHOTS"
"""Environment variable: the folder in memory of this machine's launcher."""
NO_MEMORY = (
    "save_state(in_memory=True) saves nothing here, because nothing would restart the ranks that could load it: use "
    "`neuron-accel launch --max-restarts N` on Linux"
)
_SLOTS = ("snapshot_0", "snapshot_1")
_CHUNK = 1 << 24  # bytes that are sent at a time


class SnapshotMemory:
    """The snapshots of a run.

    Args:
        run: the run.
        root: the folder of this machine's launcher; None if there is none.
    """

    def __init__(self, run: Run, root: str | None) -> None:
        self._run, self._root = run, None if root is None else Path(root)
        self._roots: list[str | None] | None = None

    @property
    def is_there(self) -> bool:
        """Whether every rank has such a folder. Collective at the first call."""
        if self._roots is None:
            mine = str(self._root) if self._root is not None and self._root.is_dir() else None
            self._roots = self._run.backend.all_gather_object(mine, self._run.world)
        return None not in self._roots

    @property
    def _is_first(self) -> bool:
        """Whether this is the first rank of its machine."""
        assert self._roots is not None
        return self._roots.index(str(self._root)) == self._run.backend.rank

    @property
    def _machines(self) -> int:
        return len(set(self._roots or ()))

    # ---- saving ------------------------------------------------------------------------------------------------------
    def begin(self) -> Path:
        """Empties the folder of the older snapshot, on every machine, and returns it. Collective."""
        assert self._root is not None
        backend, world = self._run.backend, self._run.world
        newest = self._newest()
        slot = backend.broadcast_object(next(name for name in _SLOTS if name not in newest[:1]), world)
        folder = self._root / slot
        if self._is_first:
            (folder / NAME).unlink(missing_ok=True)  # first, so that what is left never looks complete
            shutil.rmtree(folder, ignore_errors=True)
            for kind in KINDS:
                (folder / folder_of(kind)).mkdir(parents=True, exist_ok=True)
        backend.barrier()
        return folder

    def complete(self, folder: Path) -> None:
        """Copies what only the main process has written to the other machines. Collective."""
        if self._machines == 1:
            return
        run, written = self._run, dict[str, bytes]()
        if run.backend.rank == 0:
            manifest = read_manifest(folder)
            names = [path for path, entry in manifest.files.items() if entry.kind in ("state", "auxiliary")]
            written = {name: (folder / name).read_bytes() for name in (*names, NAME)}  # the manifest last
        written = run.backend.broadcast_object(written, run.world)

        def copy() -> None:
            for name, content in written.items() if self._is_first and run.backend.rank else ():
                _write(folder / name, [content])

        agreed(run, copy)

    # ---- loading -----------------------------------------------------------------------------------------------------
    def _newest(self) -> list[str]:
        """Names of the folders of complete snapshots on this machine, the newest first."""
        assert self._root is not None
        found = {name: when for name in _SLOTS if (when := when_saved(self._root / name)) is not None}
        return sorted(found, key=lambda name: found[name], reverse=True)

    def newer_than(self, checkpoint: Location | None) -> list[Path]:
        """Returns the folders of snapshots that are newer than a checkpoint, the newest first, the same on every rank.
        Collective."""
        if not self.is_there:
            return []
        assert self._root is not None
        run, found = self._run, list[tuple[Any, str]]()
        if self._is_first:
            found = [(when_saved(self._root / name), name) for name in self._newest()]
        everyone = run.backend.all_gather_object(found, run.world)
        than = when_saved(checkpoint) if checkpoint is not None and run.backend.rank == 0 else None
        than = run.backend.broadcast_object(than, run.world)
        newest = everyone[0] or max(everyone, key=len)  # a machine may have lost one
        return [self._root / name for when, name in newest if than is None or when > than]

    def gather(self, folder: Path) -> None:
        """Checks a snapshot, and fetches the files that this machine does not have. Collective.

        Raises:
            CheckpointError: on every rank, if a file is missing or damaged.
        """
        run = self._run
        content = agreed(run, lambda: _read(folder / NAME) if self._is_first and has_manifest(folder) else None)
        known = [each for each in run.backend.all_gather_object(content, run.world) if each is not None]
        if not known or len(set(known)) > 1:
            raise CheckpointError("Machines have the manifests of different snapshots.", where=folder.name)
        manifest = agreed(run, lambda: Manifest.from_bytes(known[0], str(folder / NAME)))
        own = {name for name in manifest.files if self._is_first and (folder / name).is_file()}
        holders = run.backend.all_gather_object(own, run.world)
        firsts = [index for index, root in enumerate(self._roots or ()) if (self._roots or []).index(root) == index]
        for name, entry in sorted(manifest.files.items()):
            holder = next((rank for rank in firsts if name in holders[rank]), None)
            if holder is None:
                raise CheckpointError(f"No machine has {name!r} of the snapshot.", where=folder.name)
            if any(name not in holders[rank] for rank in firsts):
                self._fetch(folder / name, entry.size, holder, wanted=self._is_first and name not in own)

        def check() -> None:
            for name, entry in manifest.files.items() if self._is_first else ():
                check_file(folder, name, entry)

        agreed(run, check)

    def _fetch(self, path: Path, size: int, holder: int, *, wanted: bool) -> None:
        """Writes the file of another machine to this one. Collective."""
        run = self._run
        chunks = self._chunks(path, size, holder)
        error: CheckpointError | None = None
        if wanted:
            try:
                _write(path, chunks)
            except CheckpointError as problem:
                error = problem
        for _ in chunks:  # what was not written takes part in the broadcasts all the same
            pass

        def report() -> None:
            if error is not None:
                raise error

        agreed(run, report)

    def _chunks(self, path: Path, size: int, holder: int) -> Iterator[bytes]:
        run = self._run
        for begin in range(0, size, _CHUNK):
            part: bytes | None = None
            if run.backend.rank == holder:
                with suppress(OSError), path.open("rb") as file:
                    file.seek(begin)
                    part = file.read(_CHUNK)
            yield run.backend.broadcast_object(part, run.world, holder) or b""


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise failure("read", path, error) from error


def _write(path: Path, parts: Any) -> None:
    """Writes a file under its name once it is complete."""
    partial = path.with_name(f".{path.name}.new")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
        partial.replace(path)
    except OSError as error:
        raise failure("write", path, error) from error
