# SPDX-License-Identifier: Apache-2.0
"""Index of the tensors in a folder: a checkpoint of any mesh, or a folder of transformers."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuron_accel.checkpoint.format.files import failure, in_order, read_bytes
from neuron_accel.checkpoint.format.manifest import KINDS, MODEL_FOLDER, Manifest, has_manifest, kind_of, locate
from neuron_accel.checkpoint.format.pickled import read_pickled
from neuron_accel.checkpoint.format.source import Chunk, ChunkRun, SourceTensor
from neuron_accel.checkpoint.format.tensorfile import (
    METADATA,
    Header,
    Place,
    model_collection,
    read_header,
    state_collection,
    unique_keys,
)
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError, LayoutError
from neuron_accel.storage import THREADS, Location, RemotePath

MOST_RANKS = 2**20
"""Largest number of ranks over which a tensor may be sharded, so that a forged file cannot cause a very long loop."""


def models_of(manifest: Manifest) -> list[Mapping[str, Any] | None]:
    """Returns what a manifest says of the models, by number; None for one that is not in the checkpoint. Entries that
    are not of this form are left out: they only help to tell models apart."""
    described = manifest.info.get("models")
    entries = described if isinstance(described, list) else []
    return [entry if isinstance(entry, Mapping) else None for entry in entries]


def described_model(described: Sequence[Mapping[str, Any] | None], number: int) -> Mapping[str, Any]:
    """Returns what a manifest says of one model; empty if it says nothing."""
    return (described[number] if number < len(described) else None) or {}


def model_in_words(entry: Mapping[str, Any]) -> str:
    """Returns a model's class, and whether it is only evaluated."""
    return f"{entry.get('class', 'unknown class')}{'' if entry.get('trains', True) else ', only evaluated'}"


def name_models(numbers: Iterable[int], described: Sequence[Mapping[str, Any] | None]) -> str:
    """Returns models of a checkpoint in words, such as ``0 (Teacher, only evaluated), 1 (Student)``."""
    return ", ".join(f"{n} ({model_in_words(described_model(described, n))})" for n in numbers)


def trained_models(numbers: Sequence[int], described: Sequence[Mapping[str, Any] | None]) -> list[int]:
    """Returns the numbers of the models that are trained, or of which the manifest says nothing."""
    return [n for n in numbers if described_model(described, n).get("trains", True)]


@dataclass
class Index:
    """Stored tensors by collection and name. A tied tensor is listed under each of its names."""

    collections: dict[str, dict[str, SourceTensor]] = field(default_factory=dict)

    def find(self, collection: str, names: tuple[str, ...]) -> SourceTensor | None:
        """Returns the tensor stored under one of ``names``, or None."""
        tensors = self.collections.get(collection, {})
        return next((tensors[name] for name in names if name in tensors), None)

    def entries(self, optimizer: int, names: tuple[str, ...]) -> dict[str, SourceTensor]:
        """Returns the optimizer's state of one parameter, by entry."""
        prefix = state_collection(optimizer, "")
        found = {
            collection.removeprefix(prefix): self.find(collection, names)
            for collection in self.collections
            if collection.startswith(prefix)
        }
        return {entry: tensor for entry, tensor in found.items() if tensor is not None}

    def models(self) -> list[int]:
        """Returns the numbers of the models, in order."""
        prefix = model_collection(0).removesuffix("0")
        numbers = (name.removeprefix(prefix) for name in self.collections if name.startswith(prefix))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def tensors(self, collection: str) -> list[SourceTensor]:
        """Returns the tensors of a collection, each once."""
        return list({id(t): t for t in self.collections.get(collection, {}).values()}.values())

    def add(self, path: Location, header: Header) -> None:
        """Adds the tensors of one file of a checkpoint.

        Raises:
            CheckpointError: if the description of the file's tensors is missing or invalid.
        """
        try:
            described = json.loads(header.metadata[METADATA])["tensors"]
            if set(described) != set(header.tensors):
                raise ValueError("it describes other tensors than it contains")
            for key, description in described.items():
                self._add(path, header, key, description)
        except (KeyError, TypeError, ValueError, AttributeError, LayoutError, RecursionError) as error:
            raise CheckpointError(
                f"{path.name!r} does not describe its tensors: {error}",
                where=str(path),
                why="it was not written by `save_state`, or by another version",
            ) from error

    def _add(self, path: Location, header: Header, key: str, description: Mapping[str, Any]) -> None:
        stored = header.tensors[key]
        source, place = self._described(description)
        numel = math.prod(source.layout.local_shape)
        start, stop = map(operator.index, description.get("range") or (0, numel))  # raises for floats, also for 1.0
        if not (0 <= start <= stop <= numel) or stored.numel != stop - start:
            raise ValueError(f"{source.name!r} has a range that does not fit")
        if stored.dtype != source.layout.dtype:
            raise ValueError(f"{source.name!r} has two different descriptions")
        source.parts.setdefault(place, []).append(Chunk(start=start, stop=stop, path=path, offset=stored.offset))

    def _described(self, description: Mapping[str, Any]) -> tuple[SourceTensor, Place]:
        """Returns a described tensor, and which shard of it is meant."""
        _check_types(description)
        layout = Layout.from_dict(description["layout"])
        name, aliases = description["name"], tuple(description.get("aliases", ()))
        tensors = self.collections.setdefault(description["collection"], {})
        source = tensors.get(name)
        if source is None:
            source = SourceTensor(
                name=name,
                aliases=aliases,
                layout=layout,
                form=description.get("form", "parameter"),
                buffer=bool(description.get("buffer", False)),
                position=None if description.get("position") is None else operator.index(description["position"]),
            )
            for alias in (name, *aliases):
                tensors[alias] = source
        if source.layout != layout:
            raise ValueError(f"{name!r} has two different descriptions")
        if math.prod(cut.degree for cut in layout.cuts) > MOST_RANKS:
            raise ValueError(f"{name!r} is sharded over more ranks than there can be")
        return source, tuple((cut.axis, operator.index(description["at"][cut.axis])) for cut in layout.cuts)

    def add_runs(self, described: Described, ranks: RankFiles) -> None:
        """Adds runs of chunks of one shard, which are in files of ``ranks``.

        Raises:
            ValueError, KeyError, TypeError: if the description is invalid.
        """
        description, runs = described
        source, place = self._described(description)
        for run in runs:
            first, step, count, start, size, offset = map(operator.index, run)
            stop, end = start + count * size, offset + size * source.item_size
            if not (0 <= start <= stop <= math.prod(source.layout.local_shape)) or min(size, offset) < 0:
                raise ValueError(f"{source.name!r} has a range that does not fit")
            if not ranks.have(first, step, count, end):
                raise ValueError(f"{source.name!r} is said to be where files have ended")
            part = ChunkRun(start=start, size=size, count=count, first=first, step=step, offset=offset, file=ranks)
            source.parts.setdefault(place, []).append(part)


def _check_types(description: Mapping[str, Any]) -> None:
    names = (description["collection"], description["name"], *description.get("aliases", ()))
    if not all(isinstance(name, str) for name in names) or isinstance(description.get("aliases"), str):
        raise ValueError("a name is not text")
    if description.get("form", "parameter") not in ("parameter", "own"):
        raise ValueError(f"its form is {description['form']!r}")


def index_checkpoint(folder: Location, manifest: Manifest, kinds: tuple[str, ...] = KINDS, replica: int = 0) -> Index:
    """Returns the index of a checkpoint: what its own file says, or, in one of an earlier version, what the headers of
    all files do.

    Args:
        folder, manifest: the checkpoint.
        kinds: kinds of the files to index.
        replica: the replica whose copy to index. State that plugins keep for all replicas is included for each.

    Raises:
        CheckpointError: if a file is missing or invalid.
    """
    index = Index()
    wanted = [kind_of(kind, replica) for kind in kinds]
    own = manifest.of_kind(INDEX)
    if own:
        _read_index(index, folder, manifest, own, wanted)
    else:
        paths = (locate(folder, relative) for kind in wanted for relative in sorted(manifest.of_kind(kind)))
        for path, header in in_order(read_header, paths, THREADS if isinstance(folder, RemotePath) else 1):
            index.add(path, header)
    if replica and "plugin" in kinds:
        for collection, tensors in index_checkpoint(folder, manifest, ("plugin",)).collections.items():
            index.collections.setdefault(collection, tensors)
    return index


# ---- The index of a checkpoint in a file of its own ------------------------------------------------------------------
# It says of each shard of each tensor in which ranks' files it is. A row of ranks of which each has the next equal part
# at the same place of its file is one run: six numbers, however many ranks there are.
INDEX, INDEX_FILE = "index", "tensor_index"
"""Kind of the file, and the beginning of its name."""

Run = Sequence[int]
"""Rank of the first file, how much higher each following one's is, number of chunks, first element, elements of a
chunk, and offset of a chunk after the header of its file."""
Described = tuple[Mapping[str, Any], Sequence[Run]]


class RankFiles:
    """The files of one kind in a checkpoint, by rank: ``files(rank)`` is a file's path and the size of its header.

    Args:
        folder: the checkpoint.
        files: relative path, size of the header and size of each file, by rank.
    """

    def __init__(self, folder: Location, files: Mapping[int, tuple[str, int, int]]) -> None:
        if not all(0 <= rank < MOST_RANKS for rank in files):
            raise ValueError("a rank is impossible")
        self._folder, self._files = folder, files
        self._located: dict[int, Location] = {}
        self._room = [-1] * (max(files, default=-1) + 1)
        for rank, (_, header, size) in files.items():
            self._room[rank] = size - header

    def __call__(self, rank: int) -> tuple[Location, int]:
        relative, header, _ = self._files[rank]
        if rank not in self._located:
            self._located[rank] = locate(self._folder, relative)
        return self._located[rank], header

    def have(self, first: int, step: int, count: int, end: int) -> bool:
        """Whether each rank of a run has a file with ``end`` bytes after its header."""
        if not 0 <= first < MOST_RANKS or not 1 <= count <= MOST_RANKS or not (0 < step < MOST_RANKS or count == 1):
            return False
        room = self._room[first : first + (count - 1) * step + 1 : step or 1]
        return len(room) == count and end <= min(room)


class IndexPart:
    """What some ranks write of a checkpoint: the files, and where which shard is. Those of all ranks, merged, are the
    contents of the index.

    Attributes:
        files: kind, rank and size of the header of each file, by relative path.
        runs: the runs of each shard, by its description as JSON.
    """

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, int, int]] = {}
        self.runs: dict[str, list[Run]] = {}

    def add(self, kind: str, rank: int, description: Mapping[str, Any], numel: int, offset: int) -> None:
        """Adds a tensor of a file, with the description that the file has of it."""
        rest = {name: value for name, value in description.items() if name != "range"}
        start, stop = description.get("range") or (0, numel)
        key = json.dumps([kind, rest], separators=(",", ":"))
        self.runs.setdefault(key, []).append((rank, 0, 1, start, stop - start, offset))

    def merge(self, other: IndexPart) -> IndexPart:
        """Adds what higher ranks write."""
        self.files.update(other.files)
        for key, runs in other.runs.items():
            self.runs[key] = _joined([*self.runs.get(key, ()), *runs])
        return self

    def to_bytes(self, named: Callable[[str], str] = str) -> bytes:
        """Returns the contents of the index.

        Args:
            named: maps the relative paths to those in the checkpoint.
        """
        rows = [[*json.loads(key), runs] for key, runs in sorted(self.runs.items())]
        body = {"version": 1, "files": {named(path): of for path, of in self.files.items()}, "tensors": rows}
        return json.dumps(body, separators=(",", ":")).encode()


def _joined(runs: Iterable[Run]) -> list[Run]:
    result: list[Run] = []
    for run in sorted(runs, key=lambda run: (run[3], run[0])):
        if result and (longer := _continued(result[-1], run)) is not None:
            result[-1] = longer
        else:
            result.append(run)
    return result


def _continued(run: Run, after: Run) -> Run | None:
    """Returns both as one run; None if they are not."""
    first, step, count, start, size, offset = run
    ahead = after[0] - first - (count - 1) * step
    follows = tuple(after[3:]) == (start + count * size, size, offset) and ahead > 0
    if not follows or (count > 1 and step != ahead) or (after[2] > 1 and after[1] != ahead):
        return None
    return first, ahead, count + after[2], start, size, offset


def _read_index(index: Index, folder: Location, manifest: Manifest, own: list[str], kinds: list[str]) -> None:
    """Adds the tensors in files of ``kinds``."""
    path = locate(folder, own[0])
    try:
        body = json.loads(read_bytes(path).decode(), object_pairs_hook=unique_keys)
        if len(own) != 1 or body["version"] != 1:
            raise ValueError("it is of another version")
        if body["files"].keys() != {relative for relative, e in manifest.files.items() if _has_tensors(e.kind)}:
            raise ValueError("it names other files than the manifest")
        files: dict[str, dict[int, tuple[str, int, int]]] = {kind: {} for kind in kinds}
        for relative, (kind, rank, header) in body["files"].items():
            entry = manifest.files[relative]
            if kind != entry.kind or type(header) is not int or not 0 <= header <= entry.size:
                raise ValueError(f"it says of {relative!r} what cannot be")
            if kind in files:
                files[kind][operator.index(rank)] = (relative, header, entry.size)
        ranks = {kind: RankFiles(folder, each) for kind, each in files.items()}
        for kind, description, runs in body["tensors"]:
            if kind in ranks:
                index.add_runs((description, runs), ranks[kind])
    except OSError as error:
        raise failure("read", path, error) from error
    except (KeyError, TypeError, ValueError, AttributeError, LayoutError, RecursionError) as error:
        raise CheckpointError(
            f"The index of the checkpoint cannot be used: {error or type(error).__name__}.",
            where=str(path),
            why="it was changed after it was saved, or written by another version",
            fix="restore the file from a copy, or use another checkpoint",
        ) from error


def _has_tensors(kind: str) -> bool:
    return kind.partition("@")[0] in KINDS


def is_pretrained(folder: Location) -> bool:
    """Returns whether ``folder`` is a folder of transformers with weights, and not a complete or interrupted
    checkpoint."""
    if has_manifest(folder) or (folder / MODEL_FOLDER).exists():
        return False
    return any((folder / name).is_file() for name in (*_SAFE, *_PICKLED))


UNFINISHED = ".unfinished.json"
"""Name of the list of files that `consolidate` is writing into a folder; removed when the folder is
complete."""
_SAFE = ("model.safetensors.index.json", "model.safetensors")
_PICKLED = ("pytorch_model.bin.index.json", "pytorch_model.bin")


def index_pretrained(folder: Location) -> Index:
    """Returns the index of a folder of transformers, with its tensors as those of the first model. Safetensors are
    preferred to pickled weights, of which only tensors are unpickled.

    Raises:
        CheckpointError: if a file is missing or damaged, or reading it would run code.
    """
    if (folder / UNFINISHED).exists():
        raise CheckpointError(
            "The folder is incomplete.",
            where=str(folder),
            why="`neuron-accel consolidate` writes it at the moment, or was interrupted",
            fix="wait until it is complete, or run it again, which removes the incomplete files and starts over",
        )
    index = Index()
    tensors = index.collections.setdefault(model_collection(0), {})
    for path in pretrained_files(folder, _SAFE):
        for name, stored in read_header(path).tensors.items():
            chunk = Chunk(start=0, stop=stored.numel, path=path, offset=stored.offset)
            layout = Layout(shape=stored.shape, dtype=stored.dtype)
            tensors[name] = SourceTensor(name=name, layout=layout, parts={(): [chunk]})
    for path in [] if tensors else pretrained_files(folder, _PICKLED):
        for name, value in read_pickled(path).items():
            chunk = Chunk(start=0, stop=value.numel(), path=path, offset=0, key=name)
            tensors[name] = SourceTensor(name=name, layout=Layout.of(value), parts={(): [chunk]})
    return index


def pretrained_files(folder: Location, names: tuple[str, str] = _SAFE) -> list[Location]:
    """Returns the paths of the weight files of a folder of transformers; empty if it has none of this kind.

    Args:
        folder: the folder.
        names: names of the listing of several files, and of a single file.

    Raises:
        CheckpointError: if the listing cannot be read or is invalid.
    """
    listing, single = folder / names[0], folder / names[1]
    if not listing.is_file():
        return [single] if single.is_file() else []
    try:
        weight_map = json.loads(read_bytes(listing).decode())["weight_map"]
        files = sorted(set(weight_map.values()))
        if any(Path(file).name != file for file in files):
            raise ValueError("it names a file in another folder")
    except OSError as error:
        raise failure("read", listing, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{listing.name!r} is not an index of weights: {error}", where=str(listing)) from error
    return [folder / file for file in files]
