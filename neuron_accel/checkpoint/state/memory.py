# SPDX-License-Identifier: Apache-2.0
"""Snapshots: checkpoints in files in memory, which outlive the ranks and end with their launcher.

A snapshot is a checkpoint like any other, in a folder that the launcher of each machine has made on a file system in
memory. Two folders are used in turn, so that if a rank ends while a snapshot is written, the other snapshot remains.
Every rank writes its shards on its own machine, which sends a copy of them to the next machine; the manifest and the
state that only the main process writes are copied to all machines. So the remaining machines have a full snapshot if
one machine is lost, or several that are not neighbours. Before a snapshot is loaded, files that a machine does not have
are fetched from those that have them. (Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with
In-Memory Checkpoints", SOSP 2023, introduced checkpoints in the memory of the training machines, with copies on
others.)
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import failure
from neuron_accel.checkpoint.format.index import KINDS
from neuron_accel.checkpoint.format.manifest import NAME, FileEntry, Manifest, check_file, has_manifest, read_manifest
from neuron_accel.checkpoint.state.resume import when_saved
from neuron_accel.checkpoint.state.snapshot import folder_of
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.storage import Location

SNAPSHOTS = "NEURON_ACCEL_SNAPSHOTS"
"""Environment variable: the folder in memory of this machine's launcher."""
NO_MEMORY = (
    "save_state(in_memory=True) has no effect here: no launcher would restart ranks that could load the snapshot. Use "
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
        self._taken: Path | None = None

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
    def _firsts(self) -> list[int]:
        """The first rank of each machine."""
        roots = self._roots or []
        return [rank for rank, root in enumerate(roots) if roots.index(root) == rank]

    # ---- saving ------------------------------------------------------------------------------------------------------
    def begin(self) -> Path:
        """Empties the folder of the older snapshot, on every machine, and returns it. Collective.

        Raises:
            CheckpointError: on every rank, if it cannot be made.
        """
        assert self._root is not None
        backend, world = self._run.backend, self._run.world
        newest = self._newest()
        slot = backend.broadcast_object(next(name for name in _SLOTS if name not in newest[:1]), world)
        folder = self._root / slot
        self._taken = folder

        def make() -> None:
            if not self._is_first:
                return
            _remove(folder)
            try:
                for kind in KINDS:
                    (folder / folder_of(kind)).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise failure("write", folder, error) from error

        agreed(self._run, make)
        return folder

    def drop(self) -> None:
        """Removes what there is of a snapshot that could not be taken. Collective."""
        if self._taken is not None and self._is_first:
            _remove(self._taken)
        self._run.backend.barrier()

    def complete(self, folder: Path) -> None:
        """Copies the files of the main process to the other machines, and the shards of each machine to the next one.
        Collective.

        Raises:
            CheckpointError: on every rank, if a file cannot be read or written.
        """
        if len(self._firsts) == 1:
            return
        run, written = self._run, dict[str, bytes]()
        if run.backend.rank == 0:
            manifest = read_manifest(folder)
            names = [path for path, entry in manifest.files.items() if not _is_shard(entry)]
            written = {name: (folder / name).read_bytes() for name in (*names, NAME)}  # the manifest last
        written = run.backend.broadcast_object(written, run.world)

        def copy() -> None:
            for name, content in written.items() if self._is_first and run.backend.rank else ():
                _write(folder / name, [content])

        agreed(run, copy)
        self._copy_to_neighbours(folder)

    def _copy_to_neighbours(self, folder: Path) -> None:
        """Sends the shards of each machine to the next one."""
        run = self._run

        def own_shards() -> dict[str, int]:
            if not self._is_first:
                return {}
            entries = read_manifest(folder).files.items()
            return {name: entry.size for name, entry in entries if (folder / name).is_file() and _is_shard(entry)}

        mine, errors = agreed(run, own_shards), list[CheckpointError]()
        for number, pairs in enumerate(_rounds(self._firsts)):
            alone = [(rank,) for rank in range(run.world.size) if not any(rank in pair for pair in pairs)]
            partition = [*(tuple(sorted(pair)) for pair in pairs), *alone]
            group = run.backend.new_group(partition, f"neighbours {number}")
            source = next((source for source, target in pairs if run.backend.rank in (source, target)), None)
            if source is None:
                continue
            index, is_source = group.ranks.index(source), run.backend.rank == source
            sizes = run.backend.broadcast_object(mine if is_source else None, group, index)
            for name, size in sizes.items():
                chunks = self._chunks(folder / name, size, group, index)
                errors += _receive(None if is_source else folder / name, chunks)

        def report() -> None:
            if errors:
                raise errors[0]

        agreed(run, report)

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
        firsts = self._firsts
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
        chunks = self._chunks(path, size, run.world, holder)
        errors = _receive(path if wanted else None, chunks)

        def report() -> None:
            if errors:
                raise errors[0]

        agreed(run, report)

    def _chunks(self, path: Path, size: int, group: Group, holder: int) -> Iterator[bytes]:
        """Yields the bytes of a file of the rank at position ``holder`` of a group, of which all ranks take part."""
        backend = self._run.backend
        for begin in range(0, size, _CHUNK):
            part: bytes | None = None
            if group.index == holder:
                with suppress(OSError), path.open("rb") as file:
                    file.seek(begin)
                    part = file.read(_CHUNK)
            yield backend.broadcast_object(part, group, holder) or b""


def _rounds(machines: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pairs of each machine and the next one, such that a machine is in one pair of a round at most."""
    pairs = list(zip(machines, [*machines[1:], machines[0]], strict=True))
    if len(machines) == 2:
        return [[pair] for pair in pairs]
    if len(machines) % 2 == 0:
        return [pairs[0::2], pairs[1::2]]
    return [pairs[0:-1:2], pairs[1:-1:2], pairs[-1:]]


def _remove(folder: Path) -> None:
    with suppress(OSError):
        (folder / NAME).unlink()  # first, so that the rest never looks complete
    shutil.rmtree(folder, ignore_errors=True)


def _is_shard(entry: FileEntry) -> bool:
    return entry.kind not in ("state", "auxiliary")


def _receive(path: Path | None, chunks: Iterator[bytes]) -> list[CheckpointError]:
    """Takes part in sending a file, and writes it to ``path``. Returns the error if that fails."""
    errors = []
    if path is not None:
        try:
            _write(path, chunks)
        except CheckpointError as error:
            errors.append(error)
    for _ in chunks:  # what was not written: other ranks take part in it
        pass
    return errors


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
