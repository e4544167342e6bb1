# SPDX-License-Identifier: Apache-2.0
"""Inspects and verifies checkpoints. Needs neither torch nor numpy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from neuron_accel.checkpoint.format.files import read_bytes
from neuron_accel.checkpoint.format.index import INDEX, Index, index_checkpoint
from neuron_accel.checkpoint.format.manifest import Manifest, check_file, locate, read_manifest, replicas_in
from neuron_accel.checkpoint.format.source import SourceTensor
from neuron_accel.checkpoint.format.tensorfile import model_collection
from neuron_accel.errors import CheckpointError, NeuronAccelError
from neuron_accel.storage import Location


def inspect(folder: Location) -> dict[str, Any]:
    """Returns a description of the contents of a checkpoint, as plain data. Reads no tensors.

    Raises:
        CheckpointError: if the checkpoint is incomplete, or its index or a header is damaged.
    """
    manifest = read_manifest(folder)
    index = index_checkpoint(folder, manifest)
    info = manifest.info
    _check_info(info, folder)
    return {
        "folder": str(folder),
        "saved": info.get("saved"),
        "mesh": {axis["name"]: axis["degree"] for axis in info.get("mesh", [])},
        "world_size": info.get("world_size"),
        "replicas": replicas_in(manifest),
        "plugins": info.get("plugins", {}),
        "libraries": info.get("libraries", {}),
        "models": info.get("models", []),
        "optimizers": info.get("optimizers", []),
        "counters": info.get("counters", {}),
        "files": {
            path: {"size": entry.size, "kind": entry.kind, "checksums": list(entry.checksums)}
            for path, entry in manifest.files.items()
        },
        "collections": {
            collection: [_tensor(tensor) for tensor in _in_order(index, collection)]
            for collection in sorted(index.collections)
        },
    }


def _check_info(info: Mapping[str, Any], folder: Location) -> None:
    """Checks the types of the values that are shown."""
    try:
        known = {
            "saved": (str, type(None)),
            "mesh": list,
            "world_size": (int, type(None)),
            "plugins": dict,
            "libraries": dict,
            "models": list,
            "optimizers": list,
            "counters": dict,
        }
        wrong = [name for name, kinds in known.items() if name in info and not isinstance(info[name], kinds)]  # type: ignore[arg-type]
        for axis in [] if wrong else info.get("mesh", []):
            wrong += [] if isinstance(axis["name"], str) and type(axis["degree"]) is int else ["mesh"]
        for model in [] if wrong else info.get("models", []):
            wrong += [] if model is None or isinstance(model["class"], str) else ["models"]
        wrong += [] if wrong or all(isinstance(name, str) for name in info.get("optimizers", [])) else ["optimizers"]
    except (TypeError, KeyError) as error:
        wrong = [f"{error!r}"]
    if wrong:
        raise CheckpointError(
            f"The manifest has an invalid description of the run that saved the checkpoint: {wrong[0]}.",
            where=str(folder),
            why="it was not written by `save_state`, or by another version",
        )


def _in_order(index: Index, collection: str) -> list[SourceTensor]:
    """Returns the tensors of a collection in the order of the model's parameters, and others after them by name."""
    models = (tensor for name in index.collections if name.startswith("model.") for tensor in index.tensors(name))
    places = {tensor.name: tensor.position for tensor in models if tensor.position is not None}
    return sorted(index.tensors(collection), key=lambda t: (places.get(t.name, math.inf), _by_number(t.name)))


def _by_number(name: str) -> list[Any]:
    """Sort key of names that orders numbers in them numerically: ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def _tensor(tensor: SourceTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "aliases": list(tensor.aliases),
        "shape": list(tensor.layout.shape),
        "dtype": tensor.layout.dtype,
        "bytes": tensor.nbytes,
        "cuts": [
            {"dim": cut.dim, "axis": cut.axis, "degree": cut.degree, "blocks": list(cut.blocks), "padded": cut.padded}
            for cut in tensor.layout.cuts
        ],
        "pieces": sum(part.count for parts in tensor.parts.values() for part in parts),
    }


def verify(folder: Location, progress: Callable[[str], None] = lambda path: None) -> list[str]:
    """Returns descriptions of everything that is wrong with a checkpoint; an empty list if nothing is.

    Compares every file with its checksums, and checks that the shards of every tensor are complete and that weights
    have the shapes of the model's configuration.

    Args:
        folder: the checkpoint.
        progress: is called with the relative path of each file before it is read.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    wrong = []
    for relative, entry in sorted(manifest.files.items()):
        progress(relative)
        try:
            check_file(folder, relative, entry)
        except CheckpointError as error:
            wrong.append(str(error))
    if wrong:  # an index, or headers, of damaged files are not examined
        return wrong
    try:
        copies = [index_checkpoint(folder, manifest, replica=number) for number in range(replicas_in(manifest))]
    except NeuronAccelError as error:
        return [str(error)]
    for index in copies:
        for collection in index.collections:
            for tensor in index.tensors(collection):
                try:
                    tensor.check()
                except CheckpointError as error:
                    wrong.append(str(error))
    for number, other in enumerate(copies[1:], start=1):
        held = {(c, t.name) for c in copies[0].collections for t in copies[0].tensors(c)}
        lacking = sorted(held - {(c, t.name) for c in other.collections for t in other.tensors(c)})
        wrong += [f"Replica {number} has no copy of {name!r} in {collection}." for collection, name in lacking]
    if manifest.of_kind(INDEX):
        wrong += [
            line for number, copy in enumerate(copies) for line in _against_headers(folder, manifest, copy, number)
        ]
    index = copies[0]
    return wrong + _against_model(index) + _against_config(folder, manifest, index)


def _against_headers(folder: Location, manifest: Manifest, index: Index, replica: int) -> list[str]:
    """Checks that the index says of each tensor what the headers of the files do."""
    files = {relative: entry for relative, entry in manifest.files.items() if entry.kind != INDEX}
    try:
        headers = index_checkpoint(folder, replace(manifest, files=files), replica=replica)
    except NeuronAccelError as error:
        return [str(error)]
    said, held = _places(index), _places(headers)
    return [
        f"The index says of {name!r} in {collection} what the headers of the files do not."
        for collection, name in sorted(said.keys() | held.keys())
        if said.get((collection, name)) != held.get((collection, name))
    ]


def _places(index: Index) -> dict[tuple[str, str], Any]:
    """Layout and chunks of each tensor, by collection and name."""
    return {
        (collection, tensor.name): (
            tensor.layout,
            {
                (place, each.start, each.stop, str(each.path), each.offset)
                for place, parts in tensor.parts.items()
                for part in parts
                for each in part.within(0, math.prod(tensor.layout.local_shape))
            },
        )
        for collection in index.collections
        for tensor in index.tensors(collection)
    }


def _against_model(index: Index) -> list[str]:
    """Checks that optimizer state belongs to parameters of the models."""
    names = {name for c, tensors in index.collections.items() if c.startswith("model.") for name in tensors}
    return [
        f"{collection} has an entry for {tensor.name!r}, which no model has."
        for collection in index.collections
        if collection.startswith("optimizer.")
        for tensor in index.tensors(collection)
        if tensor.name not in names
    ]


_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


def _against_config(folder: Location, manifest: Manifest, index: Index) -> list[str]:
    """Compares weights with the configuration of transformers: shape of the embedding, and number of layers."""
    if "config.json" not in manifest.of_kind("auxiliary"):
        return []
    try:
        config = json.loads(read_bytes(locate(folder, "config.json")).decode())
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError, RecursionError) as error:
        return [f"config.json cannot be read: {error}"]
    tensors = index.tensors(model_collection(0))
    wrong = []
    expected = (config.get("vocab_size"), config.get("hidden_size", config.get("n_embd")))
    for tensor in tensors:
        if _EMBEDDINGS.search(tensor.name) and None not in expected and tensor.layout.shape != expected:
            wrong.append(f"{tensor.name!r} has shape {tensor.layout.shape}; config.json says {expected}.")
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    found = {int(match.group(1)) for t in tensors if (match := _LAYER.search(t.name))}
    if isinstance(layers, int) and found and found != set(range(layers)):
        wrong.append(f"There are weights of the layers {sorted(found)}; config.json says {layers} layers.")
    return wrong
