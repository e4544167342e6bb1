# SPDX-License-Identifier: Apache-2.0
"""Index of the tensors in a folder: a checkpoint of any mesh, or a folder of transformers."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neuron_accel.checkpoint.format.files import failure, in_order, read_bytes
from neuron_accel.checkpoint.format.manifest import KINDS, MODEL_FOLDER, Manifest, has_manifest, kind_of, locate
from neuron_accel.checkpoint.format.pickled import read_pickled
from neuron_accel.checkpoint.format.source import Chunk, SourceTensor
from neuron_accel.checkpoint.format.tensorfile import METADATA, Header, model_collection, read_header, state_collection
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
        if source.layout != layout or stored.dtype != layout.dtype:
            raise ValueError(f"{name!r} has two different descriptions")
        numel = math.prod(layout.local_shape)
        start, stop = map(operator.index, description.get("range") or (0, numel))  # raises for floats, also for 1.0
        if not (0 <= start <= stop <= numel) or stored.numel != stop - start:
            raise ValueError(f"{name!r} has a range that does not fit")
        if math.prod(cut.degree for cut in layout.cuts) > MOST_RANKS:
            raise ValueError(f"{name!r} is sharded over more ranks than there can be")
        place = tuple((cut.axis, operator.index(description["at"][cut.axis])) for cut in layout.cuts)
        source.parts.setdefault(place, []).append(Chunk(start=start, stop=stop, path=path, offset=stored.offset))


def _check_types(description: Mapping[str, Any]) -> None:
    names = (description["collection"], description["name"], *description.get("aliases", ()))
    if not all(isinstance(name, str) for name in names) or isinstance(description.get("aliases"), str):
        raise ValueError("a name is not text")
    if description.get("form", "parameter") not in ("parameter", "own"):
        raise ValueError(f"its form is {description['form']!r}")


def index_checkpoint(folder: Location, manifest: Manifest, kinds: tuple[str, ...] = KINDS, replica: int = 0) -> Index:
    """Returns the index of a checkpoint. Reads only the headers of files.

    Args:
        folder, manifest: the checkpoint.
        kinds: kinds of the files to index.
        replica: the replica whose copy to index. State that plugins keep for all replicas is included for each.

    Raises:
        CheckpointError: if a file is missing or invalid.
    """
    index = Index()
    relatives = (relative for kind in kinds for relative in sorted(manifest.of_kind(kind_of(kind, replica))))
    paths = (locate(folder, relative) for relative in relatives)
    for path, header in in_order(read_header, paths, THREADS if isinstance(folder, RemotePath) else 1):
        index.add(path, header)
    if replica and "plugin" in kinds:
        for collection, tensors in index_checkpoint(folder, manifest, ("plugin",)).collections.items():
            index.collections.setdefault(collection, tensors)
    return index


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
