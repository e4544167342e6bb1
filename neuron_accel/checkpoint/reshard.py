"""A checkpoint divided for another mesh: each of its ranks then reads files of its own. Optimizer included; streaming.

Loading never needs this: any mesh loads any checkpoint. It saves reading across files where many ranks load often, or
from a slow file system.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from neuron_accel.checkpoint.consolidate import Progress, blocks_of, checkpoint_folder
from neuron_accel.checkpoint.files import Files, Written
from neuron_accel.checkpoint.index import METADATA, Index, index_checkpoint
from neuron_accel.checkpoint.manifest import (
    MODEL_FOLDER,
    NAME,
    FileEntry,
    check_file,
    locate,
    read_manifest,
)
from neuron_accel.checkpoint.snapshot import Item, RankFacts
from neuron_accel.checkpoint.source import Bytes, SourceTensor
from neuron_accel.checkpoint.tensorfile import encode_header
from neuron_accel.engine.errors import CheckpointError
from neuron_accel.engine.layout import Layout


@dataclass(frozen=True)
class Portion:
    """What a file will hold of a tensor."""

    source: SourceTensor
    item: Item


def reshard(
    folder: Path,
    output: Path,
    *,
    tensor_parallel: int,
    data_parallel: int,
    layouts: Mapping[str, Layout],
    divide_optimizer: bool = False,
    progress: Progress = lambda done, total: None,
    files: Files | None = None,
) -> None:
    """Writes a checkpoint as ``tensor_parallel * data_parallel`` ranks would have saved it.

    Args:
        folder: the checkpoint.
        output: is made; must be empty.
        tensor_parallel, data_parallel: degrees of the mesh.
        layouts: how parameters lie over axis ``tp``, by FQN; those left out are whole.
        divide_optimizer: whether the optimizer's state is divided over data-parallel ranks, as under ZeRO-1.
        progress: is told how far it is.
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
    index = index_checkpoint(folder, manifest)
    shares = _shares(index, tensor_parallel, data_parallel, layouts, divide_optimizer)
    for path in (output, output / MODEL_FOLDER, output / "optimizer"):
        files.make_folder(path)
    count = _counter(index, progress)
    entries: dict[str, FileEntry] = {}
    for (kind, tp, dp), portions in sorted(shares.items()):
        at = {axis: i for axis, i, n in (("tp", tp, tensor_parallel), ("dp", dp, data_parallel)) if n > 1}
        relative = f"{MODEL_FOLDER if kind == 'model' else 'optimizer'}/{RankFacts(coordinates=at).file_name(0)}"
        written = files.write(output / relative, _parts(portions, {"tp": tp}, count))
        entries[relative] = FileEntry(size=written.size, crc32=written.crc32, kind=kind)
    for relative, entry in manifest.files.items():
        if entry.kind not in ("model", "optimizer"):
            copied: Written = files.write(output / relative, [locate(folder, relative).read_bytes()])
            entries[relative] = FileEntry(size=copied.size, crc32=copied.crc32, kind=entry.kind)
    for path in (output / MODEL_FOLDER, output / "optimizer", output):
        files.sync_folder(path)
    divided = {"tp": tensor_parallel, "dp": data_parallel}
    made = replace(manifest, files=entries, generation=0, info={**manifest.info, "resharded": divided})
    files.replace(output / NAME, made.to_bytes())


def _shares(
    index: Index, tensor_parallel: int, data_parallel: int, layouts: Mapping[str, Layout], divide_optimizer: bool
) -> dict[tuple[str, int, int], list[Portion]]:
    """What each rank's files hold, by kind and coordinates; data-parallel ranks share the work."""
    shares: dict[tuple[str, int, int], list[Portion]] = {}
    loads: dict[tuple[int, int], int] = {(t, d): 0 for t in range(tensor_parallel) for d in range(data_parallel)}
    for collection in sorted(index.collections):
        kind = collection.partition(".")[0]
        for source in sorted(index.tensors(collection), key=lambda s: (-s.nbytes, s.name)):
            source.check()
            layout = _layout(source, layouts)
            item = Item(
                collection=collection,
                name=source.name,
                aliases=source.aliases,
                layout=layout,
                tensor=torch.empty(0, device="meta"),
                form=source.form,
                buffer=source.buffer,
            )
            places = range(0, tensor_parallel, layout.cuts[0].replicas) if layout.cuts else [None]
            for place in places:
                candidates = [rank for rank in loads if place in (None, rank[0])]
                numel = math.prod(layout.local_shape)
                if kind == "optimizer" and divide_optimizer and source.form == "parameter" and numel >= data_parallel:
                    bounds = [numel * d // data_parallel for d in range(data_parallel + 1)]
                    for d in range(data_parallel):
                        run = replace(item, start=bounds[d], stop=bounds[d + 1])
                        shares.setdefault((kind, place or 0, d), []).append(Portion(source, run))
                    continue
                rank = min(candidates, key=lambda r: (loads[r], r))
                loads[rank] += source.nbytes + 1
                shares.setdefault((kind, *rank), []).append(Portion(source, item))
    return shares


def _layout(source: SourceTensor, layouts: Mapping[str, Layout]) -> Layout:
    whole = Layout(shape=source.layout.shape, dtype=source.layout.dtype)
    wanted = next((layouts[name] for name in (source.name, *source.aliases) if name in layouts), None)
    if wanted is None or source.form != "parameter":
        return whole
    if wanted.shape != whole.shape:
        raise CheckpointError(
            f"{source.name!r} has shape {whole.shape} in the checkpoint and {wanted.shape} in the model.",
            why="the configuration beside the checkpoint is that of another model",
        )
    return replace(wanted, dtype=whole.dtype)


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


def _counter(index: Index, progress: Progress) -> Callable[[int], None]:
    total = sum(tensor.nbytes for collection in index.collections for tensor in index.tensors(collection))
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done = min(total, done + size)  # padding and replicas come on top
        progress(done, total)

    return count
