# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint on any mesh.

First everything is checked: the manifest, the checksums of all files (distributed over the ranks), that all needed
tensors are complete, and that the other state fits the objects. Nothing is changed before the checks have passed on
every rank.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.checkpoint.format.files import in_order, number_of_blocks, threads_of
from neuron_accel.checkpoint.format.index import Index, index_checkpoint, index_pretrained, is_pretrained, models_of
from neuron_accel.checkpoint.format.manifest import (
    Manifest,
    check_block,
    check_size,
    locate,
    read_manifest,
    replicas_in,
)
from neuron_accel.checkpoint.format.published import ConvertedTensor
from neuron_accel.checkpoint.format.ranges import FileRanges
from neuron_accel.checkpoint.format.source import SourceTensor, words
from neuron_accel.checkpoint.format.tensorfile import (
    master_collection,
    model_collection,
    plugin_collection,
    read_header,
)
from neuron_accel.checkpoint.state.full_state import is_of_transformers
from neuron_accel.checkpoint.state.matching import match_models
from neuron_accel.checkpoint.state.restore import Restored
from neuron_accel.checkpoint.state.save import STATE
from neuron_accel.checkpoint.state.snapshot import buffers_of, pieces_of
from neuron_accel.checkpoint.state.training import TrainingObjects
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError, did_you_mean
from neuron_accel.lazy.context import lazy_load_for_parallelism
from neuron_accel.lazy.filling import Origin
from neuron_accel.lazy.slices import Boxes
from neuron_accel.storage import Location, RemotePath

if TYPE_CHECKING:
    from neuron_accel.engine.optim.state import StatePiece
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Need:
    """A tensor that this rank reads.

    Args:
        source: the stored tensor.
        layout: its layout in this run.
        start, stop: range of elements of this rank's flattened shard.
        target: the tensor to write to, with conversion to its dtype; may have padding at its end.
        sink: is called with the values as a flat tensor, which has the memory of ``target`` or is a new tensor on the
            CPU.
    """

    source: SourceTensor
    layout: Layout
    start: int
    stop: int
    target: torch.Tensor | None = None
    sink: Callable[[torch.Tensor], None] | None = None

    @property
    def _direct(self) -> bool:
        """Whether the bytes of the file can be read directly into ``target``."""
        target = self.target
        return (
            target is not None
            and target.device.type == "cpu"
            and target.dtype == self._dtype
            and target.numel() == self.stop - self.start
            and target.is_contiguous()
        )

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.source.layout.dtype)

    def read(self, files: FileRanges, coordinates: dict[str, int]) -> torch.Tensor:
        """Returns the values as a flat tensor, in the memory of ``target`` if they can be read directly.
        Thread-safe."""
        if self._direct and self.target is not None:
            flat = self.target.detach().reshape(-1)
        else:
            flat = torch.empty(self.stop - self.start, dtype=self._dtype)
        if flat.numel():
            size = self.source.item_size
            out = flat.view(_WORDS[size]).numpy().view(words(size))
            self.source.read(files, self.layout, coordinates, out, self.start, self.stop)
        return flat

    def put(self, flat: torch.Tensor) -> None:
        """Writes the values that :meth:`read` returned to ``target``, or passes them to ``sink``."""
        if self.sink is not None:
            self.sink(flat)
        elif not self._direct and self.target is not None:
            with torch.no_grad():
                self.target.copy_(filled_up(flat, self.target.shape))


def filled_up(flat: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns ``flat`` in a shape that may have more elements, padded with zeros. On lazy devices shards of parameters
    have padding at their end."""
    missing = math.prod(shape) - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)).view(shape) if missing else flat.view(shape)


def load(
    training: TrainingObjects, folder: Location, *, verify: bool = True
) -> tuple[dict[str, int], Mapping[str, Any]]:
    """Loads a checkpoint, or the weights of an unsharded folder of transformers. Collective.

    Args:
        training: the objects to restore.
        folder: the checkpoint.
        verify: whether to compare all files with their checksums first.

    Returns:
        The saved counters, and what the manifest says of the run that saved; both empty for a folder of transformers.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or does not fit; nothing is changed then.
    """
    run = training.run

    def opened(manifest: Manifest) -> tuple[Index, Restored, list[Need]]:
        # If the number of replicas has changed, the copies are assigned to replicas in turn.
        replica = run.mesh.replica(run.backend.rank) % replicas_in(manifest)
        index = index_checkpoint(folder, manifest, replica=replica)
        numbers = match_models(training.models, index, models_of(manifest))
        restored = _restored(training, folder, manifest, files, numbers, replica)
        return index, restored, [*_all_needs(training, index, numbers), *_plugin_needs(restored, index, run)]

    def read(needs: list[Need], index: Index, restored: Restored) -> None:
        _reset_states(training, index, restored)
        fulfil(needs, files, run, threads_of(run, folder))

    with FileRanges() as files:
        if (manifest := agreed(run, lambda: _checked(folder, run, checksums=verify))) is None:
            if (main := training.main_model()) is not None:
                load_weights(main, folder, run)
            refresh_masters(training.optimizers, run)
            for hook in run.hooks["load"]:
                hook({}, run)
            return {}, {}
        index, restored, needs = agreed(run, lambda: opened(manifest))
        agreed(run, lambda: read(needs, index, restored))
    refresh_masters(training.optimizers, run, index)
    restored.apply()
    return restored.counters, manifest.info


def load_weights(
    model: PreparedModel, folder: Location, run: Run, among: Sequence[PreparedModel | None] | None = None
) -> None:
    """Loads the weights of one model from a checkpoint or a folder of transformers. Collective.

    Parameters that a strategy added to the model keep their values if the folder has none for them.

    Args:
        model: the prepared model.
        folder: the checkpoint.
        run: the run.
        among: the models that are saved with it, with None for others of the run; by default the model alone.

    Raises:
        CheckpointError: on every rank, if the weights are damaged or do not fit; nothing is changed then.
    """

    models = [model] if among is None else among

    def needed(manifest: Manifest | None) -> list[Need]:
        if manifest is None:
            index, number = pretrained_index(model, folder), 0
        else:
            index = index_checkpoint(folder, manifest, ("model",))
            numbers = match_models(models, index, models_of(manifest))
            number = numbers.get(next(i for i, each in enumerate(models) if each is model), 0)
        return list(_model_needs(model, index, number, may_lack_added=True))

    manifest = agreed(run, lambda: _checked(folder, run))
    needs = agreed(run, lambda: needed(manifest))
    with FileRanges() as files:
        agreed(run, lambda: fulfil(needs, files, run, threads_of(run, folder)))


def pretrained_index(model: PreparedModel, folder: Location) -> Index:
    """Returns the tensors of a folder of transformers under the names of ``model``. Where transformers converts what it
    loads, as it stacks the experts of a mixture, they are those that it makes of the tensors in the folder.

    Raises:
        CheckpointError: if they would have to be converted, and are in object storage.
    """
    index = named_as(index_pretrained(folder), model)
    collection = model_collection(0)
    tensors = index.collections[collection]
    known = {name for record in model.parameters for name in record.names}.union(*buffers_of(model))
    original: Any = model.original
    if tensors.keys() <= known or not is_of_transformers(original):
        return index
    if not isinstance(folder, Path):
        if all(any(name in tensors for name in record.names) for record in model.parameters):
            return index
        raise CheckpointError(
            "The weights have other names than those of the model.",
            where=str(folder),
            why="transformers converts published weights when it loads them, which it does from a disk only",
            fix="copy the folder to a disk, and load it from there",
        )
    dtypes = {tensor.layout.dtype for tensor in tensors.values()}
    with lazy_load_for_parallelism():
        loaded, said = type(original).from_pretrained(
            folder,
            config=copy.deepcopy(original.config),
            dtype=getattr(torch, dtypes.pop()) if len(dtypes) == 1 else torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    origin = Origin.of(loaded)
    if origin is None or said["unexpected_keys"]:
        return index
    absent = {*said["missing_keys"], *(name for name, *_ in said["mismatched_keys"])}
    boxes = {id(recording): Boxes(recording, None) for recording in origin.recordings}
    return Index(
        {
            collection: {
                name: ConvertedTensor(
                    name=name,
                    layout=Layout(shape=view.size, dtype=str(view.dtype).removeprefix("torch.")),
                    recording=recording,
                    view=view,
                    boxes=boxes[id(recording)],
                    mapped=True,
                )
                for name, (recording, view) in origin.views.items()
                if name in known and name not in absent
            }
        }
    )


def _checked(folder: Location, run: Run, *, checksums: bool = True) -> Manifest | None:
    """Returns the manifest, after the sizes of the files, and the ``checksums`` of the blocks, that are assigned to
    this rank have been checked; None for a folder of transformers."""
    if is_pretrained(folder):
        return None
    manifest = read_manifest(folder)
    entries, threads = sorted(manifest.files.items()), threads_of(run, folder)
    sized = entries[run.world.index :: run.world.size]
    for _ in in_order(lambda e: check_size(folder, *e), sized, threads if isinstance(folder, RemotePath) else 1):
        pass
    count = number_of_blocks if checksums else lambda size: 0
    blocks = [(relative, entry, b) for relative, entry in entries for b in range(count(entry.size))]
    for _ in in_order(lambda b: check_block(folder, *b), blocks[run.world.index :: run.world.size], threads):
        pass
    return manifest


def _restored(
    training: TrainingObjects,
    folder: Location,
    manifest: Manifest,
    files: FileRanges,
    numbers: Mapping[int, int],
    replica: int,
) -> Restored:
    paths = manifest.of_kind("state")
    if len(paths) != 1:
        raise CheckpointError(f"The checkpoint names {len(paths)} files of training state.", where=str(folder))
    path = locate(folder, paths[0])
    header = read_header(path)
    try:
        state = json.loads(header.metadata[STATE])
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The training state cannot be read: {error!r}.", where=str(path)) from error

    unread = set(header.tensors)

    def tensor(key: str) -> torch.Tensor:
        if key not in unread:  # a key may occur once only; otherwise a small file could require any amount of memory
            raise KeyError(key)
        unread.remove(key)
        stored = header.tensors[key]
        result = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
        if stored.nbytes:
            files.read(path, stored.offset, result.reshape(-1).view(torch.uint8).numpy())
        return result

    return Restored(training, state, tensor, manifest.info, numbers, replica)


def fulfil(needs: list[Need], files: FileRanges, run: Run, threads: int) -> None:
    """Reads what this rank needs, with several threads."""
    for need, flat in in_order(lambda need: need.read(files, run.coordinates), needs, threads):
        need.put(flat)


def _all_needs(training: TrainingObjects, index: Index, numbers: Mapping[int, int]) -> list[Need]:
    needs: list[Need] = []
    for position, model in training.numbered_models():
        needs += _model_needs(model, index, numbers.get(position, position))
    for number, optimizer in enumerate(training.optimizers):
        needs += optimizer_needs(optimizer, number, index, training.run)
    return needs


def _plugin_needs(restored: Restored, index: Index, run: Run) -> Iterator[Need]:
    """Yields the state of this run's plugins that is sharded like the parameters."""
    present = {plugin.spec.name for plugin in run.plan.plugins}
    for plugin, keys in restored.plugin_forms.items():
        for key, form in keys.items() if plugin in present else ():
            position = restored.positions.get(form["model"])
            if form["model"] is None or (position is None and not index.tensors(plugin_collection(plugin, key))):
                continue
            if position is None:
                raise CheckpointError(
                    f"The checkpoint has state of a plugin for model {form['model']}, which was not prepared.",
                    where=f"plugin {plugin!r}, {key!r}",
                    fix="prepare the same models as when the checkpoint was saved",
                )
            into = restored.sharded.setdefault((plugin, key), {})
            for record in run.models[position].parameters:
                source = index.find(plugin_collection(plugin, key), record.names)
                if record.current is None or source is None:
                    continue
                _check_shape(source, record.layout.shape, f"state {key!r} of plugin {plugin!r}")

                def sink(flat: torch.Tensor, record: ParameterRecord = record, into: Any = into) -> None:
                    into[record.fqn] = filled_up(flat, record.layout.local_shape)

                stop = math.prod(record.layout.local_shape)
                yield Need(source=source, layout=record.layout, start=0, stop=stop, sink=sink)


# ---- models ----------------------------------------------------------------------------------------------------------
def _model_needs(model: PreparedModel, index: Index, number: int, *, may_lack_added: bool = False) -> Iterator[Need]:
    collection = model_collection(number)
    known = {name for record in model.parameters for name in record.names}
    strangers = [t for t in index.tensors(collection) if not t.buffer and known.isdisjoint((t.name, *t.aliases))]
    buffers = buffers_of(model)
    strangers = [t for t in strangers if t.name not in {name for names in buffers for name in names}]
    if strangers:
        raise CheckpointError(
            f"The checkpoint has a weight {strangers[0].name!r}, which the model does not have.",
            where=f"{type(model.original).__name__}; {len(strangers)} such weights",
            why="it is the checkpoint of another model",
            fix=did_you_mean(strangers[0].name, known),
        )
    for record in model.parameters:
        lacks = may_lack_added and record.added and index.find(collection, record.names) is None
        if record.current is not None and not lacks:
            source = _found(index, collection, record.names, record.layout.shape)
            shard = record.weights
            yield Need(
                source=source,
                layout=record.layout,
                start=0 if shard is None else shard.start,
                stop=record.current.numel() if shard is None else shard.stop,
                target=record.current.data if shard is None else shard.tensor,
            )
            if shard is not None:
                shard.changed()
    for names, value in buffers.items():
        source = _found(index, collection, names, tuple(value.shape))
        yield Need(source=source, layout=Layout.of(value), start=0, stop=value.numel(), target=value.data)


def _found(index: Index, collection: str, names: tuple[str, ...], shape: tuple[int, ...]) -> SourceTensor:
    source = index.find(collection, names)
    if source is None:
        raise CheckpointError(
            f"The checkpoint has no {names[0]!r}.",
            where=collection,
            why="it is the checkpoint of another model",
            fix=did_you_mean(names[0], index.collections.get(collection, {})),
        )
    if source.layout.shape != shape:
        raise CheckpointError(
            f"{names[0]!r} has shape {source.layout.shape} in the checkpoint and {shape} in the model.",
            where=collection,
            fix="build the model with the configuration that it was saved with",
        )
    source.check()
    return source


# ---- optimizers ------------------------------------------------------------------------------------------------------
def optimizer_needs(optimizer: Any, number: int, index: Index, run: Run) -> Iterator[Need]:
    for piece in pieces_of(optimizer, run):
        record = piece.record
        if piece.master:
            master = index.find(master_collection(number), record.names)
            if master is not None:
                _check_shape(master, record.layout.shape, "master weight")
                yield Need(
                    source=master,
                    layout=record.layout,
                    start=piece.start,
                    stop=piece.stop,
                    target=piece.parameter.data,
                )
        yield from _state_needs(optimizer, piece, index.entries(number, record.names), run)


def _state_needs(optimizer: Any, piece: StatePiece, entries: dict[str, SourceTensor], run: Run) -> Iterator[Need]:
    layout, parameter = piece.record.layout, piece.parameter
    options = optimizer.param_groups[piece.group]
    on_device = bool(options.get("capturable") or options.get("fused"))

    def put(entry: str, shape: tuple[int, ...]) -> Callable[[torch.Tensor], None]:
        # The same rule as in torch.optim: a step counter is on the CPU unless the optimizer is capturable or fused.
        place = "cpu" if entry == "step" and not on_device else parameter.device

        def sink(flat: torch.Tensor) -> None:
            piece.read_state(optimizer)[entry] = filled_up(flat, shape).to(place)

        return sink

    for entry, source in entries.items():
        if source.form == "own":
            source.check()
            full, shape = source.layout, source.layout.shape
            yield Need(source=source, layout=full, start=0, stop=math.prod(shape), sink=put(entry, shape))
            continue
        _check_shape(source, layout.shape, f"optimizer state {entry!r}")
        if piece.whole:
            of, shape = Layout(shape=layout.shape, dtype=layout.dtype), layout.shape
            start, stop = 0, math.prod(shape)
        else:
            of, shape = layout, tuple(parameter.shape)
            start, stop = piece.start, piece.stop
        present = _usable(piece.read_state(optimizer).get(entry), shape, source)
        yield Need(source=source, layout=of, start=start, stop=stop, target=present, sink=put(entry, shape))


def _usable(present: Any, shape: tuple[int, ...], source: SourceTensor) -> torch.Tensor | None:
    """Returns an existing entry of the state if values can be read directly into it, else None."""
    fits = (
        isinstance(present, torch.Tensor)
        and present.device.type == "cpu"
        and tuple(present.shape) == shape
        and present.dtype == getattr(torch, source.layout.dtype)
        and present.is_contiguous()
    )
    return present if fits else None


def _reset_states(training: TrainingObjects, index: Index, restored: Restored) -> None:
    """Restores the values of the optimizers that are not tensors, and allocates the tensors."""
    for number, optimizer in enumerate(training.optimizers):
        values = restored.optimizers[number]["values"]
        for piece in pieces_of(optimizer, training.run):
            names = piece.record.names
            mine: Mapping[str, Any] = next((values[name] for name in names if name in values), {})
            if mine or index.entries(number, names):
                piece.new_state(optimizer).update(mine)
            else:
                piece.drop_state(optimizer)


def _check_shape(source: SourceTensor, shape: tuple[int, ...], what: str) -> None:
    if source.layout.shape != shape:
        raise CheckpointError(
            f"The {what} of {source.name!r} has shape {source.layout.shape}, the parameter {shape}.",
            why="it is the checkpoint of another model",
        )
    source.check()


def refresh_masters(optimizers: Any, run: Run, index: Index | None = None) -> None:
    """Sets master weights of optimizers from the model's weights, unless ``index`` has stored master weights for
    them."""
    for number, optimizer in enumerate(optimizers):
        for piece in pieces_of(optimizer, run):
            names = piece.record.names
            if piece.master and index is not None and index.find(master_collection(number), names) is not None:
                continue
            piece.take_weights(run)


# ---- Names in folders of transformers that differ from the model's ---------------------------------------------------
# In the folder of a model without a head, names lack the prefix that they have in a model with a head, and vice versa.
# Older folders also contain tables that models now compute. Both are handled here as in transformers.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.attn\.masked_bias$")
"""Names of tables that all families of models compute, whether their class declares them or not."""


def named_as(index: Index, model: PreparedModel) -> Index:
    """Returns the tensors of a folder under the names of ``model``, without those that the model's class ignores."""
    module = model.original
    known = {name for record in model.parameters for name in record.names} | set(module.state_dict(keep_vars=True))
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    declared = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [re.compile(pattern) for pattern in (*declared, *_COMPUTED)]
    tensors = {}
    for name, tensor in index.collections[model_collection(0)].items():
        candidates = (name, prefix + name, name.removeprefix(prefix))
        found = next((candidate for candidate in candidates if candidate in known), None)
        if found is not None:
            tensor.name = found
            tensors[found] = tensor
        elif not any(pattern.search(name) for pattern in ignored):
            tensors[name] = tensor
    return Index({model_collection(0): tensors})
