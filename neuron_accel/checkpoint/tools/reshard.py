# SPDX-License-Identifier: Apache-2.0
"""Reshards a checkpoint, including optimizer state, for another mesh, whose ranks then read only their own files.

Loading does not require this: any mesh loads any checkpoint. It reduces the number of files that each rank reads, if
many ranks load often or from a slow file system. Tensors are streamed, so the model need not fit into memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from neuron_accel.checkpoint.format.files import Files, Written, read_bytes
from neuron_accel.checkpoint.format.index import Index, index_checkpoint
from neuron_accel.checkpoint.format.manifest import (
    KINDS,
    NAME,
    FileEntry,
    Manifest,
    check_file,
    folder_of,
    kind_of,
    locate,
    read_manifest,
    replicas_in,
)
from neuron_accel.checkpoint.format.ranges import FileRanges
from neuron_accel.checkpoint.format.source import SourceTensor
from neuron_accel.checkpoint.format.tensorfile import described_header, places_of, read_header
from neuron_accel.checkpoint.state.snapshot import Item, RankFacts
from neuron_accel.checkpoint.tools.consolidate import Progress, blocks_of, checkpoint_folder
from neuron_accel.checkpoint.tools.output import Output
from neuron_accel.engine.plan.mesh import AxisKind, Mesh
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import Location


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a model and its optimizer state are sharded over a mesh.

    Args:
        mesh: the mesh. Parameters are replicated along its axes of samples and positions.
        layouts: layouts of parameters over the model axes, by FQN; parameters that are missing are replicated.
        stages: index of the first pipeline stage that holds a parameter or buffer, by FQN; 0 for those that are
            missing. The mesh has one axis of stages at most.
        shard_optimizer: whether optimizer state is sharded over data-parallel ranks, as with ZeRO-1.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)
    shard_optimizer: bool = False

    def degrees(self) -> dict[str, int]:
        """Returns the degree of each axis of the mesh."""
        return {axis.name: axis.degree for axis in self.mesh.axes}

    def layout_of(self, source: SourceTensor) -> Layout:
        """Returns the layout of a stored tensor on the mesh.

        Raises:
            CheckpointError: if the tensor has another shape than in ``layouts``.
        """
        full = Layout(shape=source.layout.shape, dtype=source.layout.dtype)
        wanted = next((self.layouts[name] for name in _names(source) if name in self.layouts), None)
        if wanted is None or source.form != "parameter":
            return full
        if wanted.shape != full.shape:
            raise CheckpointError(
                f"{source.name!r} has shape {full.shape} in the checkpoint and {wanted.shape} in the model.",
                why="the configuration beside the checkpoint is that of another model",
            )
        return replace(wanted, dtype=full.dtype)

    def stage_of(self, source: SourceTensor) -> int:
        """Returns the index of the first stage that holds a stored tensor."""
        return min((self.stages[name] for name in _names(source) if name in self.stages), default=0)


def _names(source: SourceTensor) -> tuple[str, ...]:
    return (source.name, *source.aliases)


@dataclass(frozen=True)
class StoredShard:
    """A shard, or a run of its elements, that is written to a file."""

    source: SourceTensor
    item: Item


Coordinates = tuple[int, ...]
"""Coordinates of a rank: indices along the axes of the mesh, outer to inner."""


def reshard(
    folder: Location,
    output: Location,
    sharding: Sharding,
    *,
    progress: Progress = lambda done, total: None,
    files: Files | None = None,
) -> None:
    """Writes a checkpoint as the ranks of another mesh would have saved it.

    Args:
        folder: the checkpoint.
        output: the folder to create; if it exists, it must be empty, but for what an earlier call that was interrupted
            has left, which is removed.
        sharding: the mesh, and how tensors are sharded over it.
        progress: is called with the bytes written so far and the total.
        files: performs the operations on files.

    Raises:
        CheckpointError: if the checkpoint is damaged, the output is not empty, or another process writes it.
    """
    files = files or Files()
    folder = checkpoint_folder(folder)
    manifest = read_manifest(folder)
    for relative, entry in manifest.files.items():
        check_file(folder, relative, entry)
    copies = [_copy(folder, manifest, number) for number in range(replicas_in(manifest))]
    count = _counter(copies, progress)
    contents: dict[str, tuple[str, list[StoredShard], dict[str, int]]] = {}  # by file: kind, shards, coordinates
    for replica, index in enumerate(copies):
        for (kind, rank), shards in sorted(_files_of_ranks(index, sharding).items()):
            at = dict(zip(sharding.mesh.axis_names, rank, strict=True))
            named = {axis: i for axis, i in at.items() if sharding.mesh.degree(axis) > 1}
            named |= {"replica": replica} if len(copies) > 1 else {}
            relative = f"{folder_of(kind)}/{RankFacts(coordinates=named).file_name('')}"
            contents[relative] = (kind_of(kind, replica), shards, at)
    copied = {name: e.kind for name, e in manifest.files.items() if e.kind.partition("@")[0] not in KINDS}
    if both := contents.keys() & copied.keys():
        raise CheckpointError(f"The checkpoint has two files {min(both)!r}.", where=str(folder))
    inside = {"model", "optimizer", *(c.partition(".")[0] for index in copies for c in index.collections)}
    folders = [output / folder_of(kind) for kind in sorted(inside)]
    with Output(output, files) as out:
        if out.contents():
            raise CheckpointError(f"{str(output)!r} is not empty.", where=str(output), fix="name a new folder")
        out.announce([*contents, *copied, NAME])
        for path in folders:
            files.make_folder(path)
        entries: dict[str, FileEntry] = {}
        for relative, (kind, shards, at) in contents.items():
            entries[relative] = _entry(files.write(output / relative, _parts(shards, at, count)), kind)
        for relative, kind in copied.items():
            written = files.write(output / relative, [read_bytes(locate(folder, relative))])
            entries[relative] = _entry(written, kind)
        for path in (*folders, output):
            files.sync_folder(path)
        made = replace(manifest, files=entries, generation=0, info={**manifest.info, "resharded": sharding.degrees()})
        files.replace(output / NAME, made.to_bytes())


def _entry(written: Written, kind: str) -> FileEntry:
    return FileEntry(size=written.size, checksums=written.checksums, kind=kind)


def _copy(folder: Location, manifest: Manifest, replica: int) -> Index:
    """Returns the index of one replica's tensors. Plugin state that is kept for all replicas belongs to the first."""
    index = index_checkpoint(folder, manifest, ("model", "optimizer"), replica)
    for relative in sorted(manifest.of_kind(kind_of("plugin", replica))):
        path = locate(folder, relative)
        index.add(path, read_header(path))
    return index


def _files_of_ranks(index: Index, sharding: Sharding) -> dict[tuple[str, Coordinates], list[StoredShard]]:
    """Returns the contents of each rank's files, by kind and rank. The work is distributed over data-parallel ranks."""
    contents: dict[tuple[str, Coordinates], list[StoredShard]] = {}
    loads: dict[Coordinates, int] = {}
    for collection in sorted(index.collections):
        kind = collection.partition(".")[0]
        for source in sorted(index.tensors(collection), key=lambda s: (-s.nbytes, s.name)):
            source.check()
            for rank, shard in _stored_shards(source, collection, sharding, loads):
                contents.setdefault((kind, rank), []).append(shard)
    return contents


def _stored_shards(
    source: SourceTensor, collection: str, sharding: Sharding, loads: dict[Coordinates, int]
) -> Iterator[tuple[Coordinates, StoredShard]]:
    """Yields the ranks that write one tensor, and the shard or run of elements that each writes. ``loads`` has the
    bytes that each rank writes already, and is updated."""
    mesh, layout = sharding.mesh, sharding.layout_of(source)
    stages = dict.fromkeys(mesh.names(AxisKind.STAGE), sharding.stage_of(source))
    item = Item(
        collection=collection,
        name=source.name,
        aliases=source.aliases,
        layout=layout,
        tensor=torch.empty(0, device="meta"),
        form=source.form,
        buffer=source.buffer,
        position=source.position,
    )
    numel, ranks = math.prod(layout.local_shape), mesh.size(mesh.gradient_axes)
    sharded = sharding.shard_optimizer and item.kind == "optimizer" and source.form == "parameter" and numel >= ranks
    for place in places_of(layout):
        at = stages | dict(place)
        if sharded:
            bounds = [numel * index // ranks for index in range(ranks + 1)]
            for index, rank in enumerate(_ranks(mesh, at, mesh.gradient_axes)):
                run = replace(item, start=bounds[index], stop=bounds[index + 1])
                yield rank, StoredShard(source, run)
            continue
        equal = [name for name in mesh.axis_names if name not in at]
        rank = min(_ranks(mesh, at, equal), key=lambda rank: (loads.get(rank, 0), rank))
        loads[rank] = loads.get(rank, 0) + source.nbytes + 1
        yield rank, StoredShard(source, item)


def _ranks(mesh: Mesh, at: Mapping[str, int], along: Sequence[str]) -> Iterator[Coordinates]:
    """Yields the ranks at coordinates ``at`` with all indices along the axes ``along``, and index 0 along all
    others."""
    for indices in itertools.product(*(range(mesh.degree(axis)) for axis in along)):
        here = {**at, **dict(zip(along, indices, strict=True))}
        yield tuple(here.get(axis, 0) for axis in mesh.axis_names)


def _parts(shards: list[StoredShard], at: dict[str, int], count: Callable[[int], None]) -> Iterator[bytes | memoryview]:
    def described(item: Item) -> tuple[str, str, tuple[int, ...], Mapping[str, Any]]:
        shape = item.layout.local_shape if item.start is None else ((item.stop or 0) - item.start,)
        return item.key, item.layout.dtype, shape, item.describe(at)

    yield described_header(described(shard.item) for shard in shards)
    with FileRanges() as source:
        for shard in shards:
            item = shard.item
            for block in blocks_of(shard.source, source, item.layout, at, item.start or 0, item.stop):
                yield block
                count(len(block))


def _counter(copies: list[Index], progress: Progress) -> Callable[[int], None]:
    total = sum(tensor.nbytes for index in copies for name in index.collections for tensor in index.tensors(name))
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done = min(total, done + size)  # padding is written but not counted in the total
        progress(done, total)

    return count
