"""A checkpoint resharded for another mesh, whose ranks then read only their own files. With the optimizer; streaming.

Loading never needs this: any mesh loads any checkpoint. It saves reading across files where many ranks load often, or
from a slow file system.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from neuron_accel.checkpoint.format.files import Files, Written, read_bytes
from neuron_accel.checkpoint.format.index import KINDS, METADATA, Index, index_checkpoint, kind_of, replicas_in
from neuron_accel.checkpoint.format.manifest import NAME, FileEntry, Manifest, check_file, locate, read_manifest
from neuron_accel.checkpoint.format.source import Bytes, SourceTensor, places_of
from neuron_accel.checkpoint.format.tensorfile import encode_header, read_header
from neuron_accel.checkpoint.state.snapshot import Item, RankFacts, folder_of
from neuron_accel.checkpoint.tools.consolidate import Progress, blocks_of, checkpoint_folder
from neuron_accel.engine.plan.mesh import AxisKind, Mesh
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a model and its optimizer are sharded over a mesh.

    Args:
        mesh: the mesh. Ranks along its axes of samples and positions hold the same parameters.
        layouts: layouts of parameters over its model axes, by FQN; parameters that are missing are replicated.
        stages: index along its axis of stages, of which there is one at most, of the first rank that holds a parameter
            or buffer, by FQN; by default 0.
        divide_optimizer: whether the optimizer's state is sharded over data-parallel ranks, as under ZeRO-1.
    """

    mesh: Mesh
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)
    divide_optimizer: bool = False

    def degrees(self) -> dict[str, int]:
        return {axis.name: axis.degree for axis in self.mesh.axes}

    def layout_of(self, source: SourceTensor) -> Layout:
        whole = Layout(shape=source.layout.shape, dtype=source.layout.dtype)
        wanted = next((self.layouts[name] for name in _names(source) if name in self.layouts), None)
        if wanted is None or source.form != "parameter":
            return whole
        if wanted.shape != whole.shape:
            raise CheckpointError(
                f"{source.name!r} has shape {whole.shape} in the checkpoint and {wanted.shape} in the model.",
                why="the configuration beside the checkpoint is that of another model",
            )
        return replace(wanted, dtype=whole.dtype)

    def stage_of(self, source: SourceTensor) -> int:
        return min((self.stages[name] for name in _names(source) if name in self.stages), default=0)


def _names(source: SourceTensor) -> tuple[str, ...]:
    return (source.name, *source.aliases)


@dataclass(frozen=True)
class Portion:
    """What a file will hold of a tensor."""

    source: SourceTensor
    item: Item


Rank = tuple[int, ...]
"""Indices along the axes of the mesh, outer to inner."""


def reshard(
    folder: Path,
    output: Path,
    division: Division,
    *,
    progress: Progress = lambda done, total: None,
    files: Files | None = None,
) -> None:
    """Writes a checkpoint as the ranks of another mesh would have saved it.

    Args:
        folder: the checkpoint.
        output: is made; must be empty.
        division: the mesh, and what its ranks hold.
        progress: called with the progress.
        files: how files are written.

    Raises:
        CheckpointError: if the checkpoint is damaged, or the output is not empty.
    """
    files = files or Files()
    folder = checkpoint_folder(folder)
    manifest = read_manifest(folder)
    for relative, entry in manifest.files.items():
        check_file(folder, relative, entry)
    if output.exists() and any(output.iterdir()):
        raise CheckpointError(f"{str(output)!r} is not empty.", where=str(output), fix="name a new folder")
    copies = [_copy(folder, manifest, number) for number in range(replicas_in(manifest))]
    inside = {"model", "optimizer", *(c.partition(".")[0] for index in copies for c in index.collections)}
    folders = [output / folder_of(kind) for kind in sorted(inside)]
    for path in (output, *folders):
        files.make_folder(path)
    count = _counter(copies, progress)
    entries: dict[str, FileEntry] = {}
    for replica, index in enumerate(copies):
        for (kind, rank), portions in sorted(_shares(index, division).items()):
            at = dict(zip(division.mesh.axis_names, rank, strict=True))
            named = {axis: i for axis, i in at.items() if division.mesh.degree(axis) > 1}
            named |= {"replica": replica} if len(copies) > 1 else {}
            relative = f"{folder_of(kind)}/{RankFacts(coordinates=named).file_name(0)}"
            written = files.write(output / relative, _parts(portions, at, count))
            kind = kind_of(kind, replica)
            entries[relative] = FileEntry(size=written.size, checksums=written.checksums, kind=kind)
    for relative, entry in manifest.files.items():
        if entry.kind.partition("@")[0] not in KINDS:
            if relative in entries:
                raise CheckpointError(f"The checkpoint has two files {relative!r}.", where=str(folder))
            copied: Written = files.write(output / relative, [read_bytes(locate(folder, relative))])
            entries[relative] = FileEntry(size=copied.size, checksums=copied.checksums, kind=entry.kind)
    for path in (*folders, output):
        files.sync_folder(path)
    made = replace(manifest, files=entries, generation=0, info={**manifest.info, "resharded": division.degrees()})
    files.replace(output / NAME, made.to_bytes())


def _copy(folder: Path, manifest: Manifest, replica: int) -> Index:
    """The tensors that one replica has of its own; the first also what plugins keep for all."""
    index = index_checkpoint(folder, manifest, ("model", "optimizer"), replica)
    for relative in sorted(manifest.of_kind(kind_of("plugin", replica))):
        path = locate(folder, relative)
        index.add(path, read_header(path))
    return index


def _shares(index: Index, division: Division) -> dict[tuple[str, Rank], list[Portion]]:
    """The contents of each rank's files, by kind and rank; data-parallel ranks divide the work."""
    shares: dict[tuple[str, Rank], list[Portion]] = {}
    loads: dict[Rank, int] = {}
    for collection in sorted(index.collections):
        kind = collection.partition(".")[0]
        for source in sorted(index.tensors(collection), key=lambda s: (-s.nbytes, s.name)):
            source.check()
            for rank, portion in _portions(source, collection, division, loads):
                shares.setdefault((kind, rank), []).append(portion)
    return shares


def _portions(
    source: SourceTensor, collection: str, division: Division, loads: dict[Rank, int]
) -> Iterator[tuple[Rank, Portion]]:
    """Which ranks write which slices of one tensor. ``loads``: how much each has to write already."""
    mesh, layout = division.mesh, division.layout_of(source)
    stages = dict.fromkeys(mesh.names(AxisKind.STAGE), division.stage_of(source))
    item = Item(
        collection=collection,
        name=source.name,
        aliases=source.aliases,
        layout=layout,
        tensor=torch.empty(0, device="meta"),
        form=source.form,
        buffer=source.buffer,
    )
    numel, ranks = math.prod(layout.local_shape), mesh.size(mesh.gradient_axes)
    sharded = division.divide_optimizer and item.kind == "optimizer" and source.form == "parameter" and numel >= ranks
    for place in places_of(layout):
        at = stages | dict(place)
        if sharded:
            bounds = [numel * index // ranks for index in range(ranks + 1)]
            for index, rank in enumerate(_ranks(mesh, at, mesh.gradient_axes)):
                run = replace(item, start=bounds[index], stop=bounds[index + 1])
                yield rank, Portion(source, run)
            continue
        equal = [name for name in mesh.axis_names if name not in at]
        rank = min(_ranks(mesh, at, equal), key=lambda rank: (loads.get(rank, 0), rank))
        loads[rank] = loads.get(rank, 0) + source.nbytes + 1
        yield rank, Portion(source, item)


def _ranks(mesh: Mesh, at: Mapping[str, int], along: Sequence[str]) -> Iterator[Rank]:
    """The ranks at ``at`` with every index along further axes; 0 along those that are not named."""
    for indices in itertools.product(*(range(mesh.degree(axis)) for axis in along)):
        here = {**at, **dict(zip(along, indices, strict=True))}
        yield tuple(here.get(axis, 0) for axis in mesh.axis_names)


def _parts(portions: list[Portion], at: dict[str, int], count: Callable[[int], None]) -> Iterator[bytes | memoryview]:
    described, header = {}, []
    for portion in portions:
        item = portion.item
        shape = item.layout.local_shape if item.start is None else ((item.stop or 0) - item.start,)
        header.append((item.key, item.layout.dtype, shape))
        described[item.key] = item.describe(at)
    metadata = {"format": "pt", METADATA: json.dumps({"version": 1, "tensors": described}, separators=(",", ":"))}
    yield encode_header(header, metadata)
    with Bytes() as source:
        for portion in portions:
            item = portion.item
            for block in blocks_of(portion.source, source, item.layout, at, item.start or 0, item.stop):
                yield block
                count(len(block))


def _counter(copies: list[Index], progress: Progress) -> Callable[[int], None]:
    total = sum(tensor.nbytes for index in copies for name in index.collections for tensor in index.tensors(name))
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done = min(total, done + size)  # padding and replicas come on top
        progress(done, total)

    return count
