# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a checkpoint: its tensors, which of them it writes, and its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from neuron_accel.checkpoint.format.files import checksums_of
from neuron_accel.checkpoint.format.tensorfile import (
    described_header,
    encode_header,
    item_size,
    master_collection,
    model_collection,
    place_of,
    plugin_collection,
    state_collection,
)
from neuron_accel.engine.optim.state import HasStatePieces, ShardedState, StatePiece
from neuron_accel.engine.plan.mesh import AxisKind
from neuron_accel.engine.runtime.run import agreed
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


@dataclass(frozen=True, kw_only=True)
class Item:
    """A tensor on this rank.

    Args:
        collection: the collection of the checkpoint that it belongs to.
        name: FQN.
        aliases: further names of a tied parameter.
        layout: the layout of the full tensor over the mesh.
        tensor: this rank's shard.
        start, stop: range of elements of the flattened shard, if ``tensor`` is only a part of it; else None.
        form: ``"parameter"`` or ``"own"``, see :class:`~neuron_accel.checkpoint.format.source.SourceTensor`.
        axes: axes along which ranks hold other shards, besides those of the layout.
        leads: axes along which all ranks hold the same values, and the first rank writes them.
        buffer: whether it is a buffer, of which the first rank that has it writes its values.
        position: of a parameter among those of its model.
        record: the parameter.
    """

    collection: str
    name: str
    aliases: tuple[str, ...]
    layout: Layout
    tensor: torch.Tensor
    start: int | None = None
    stop: int | None = None
    form: str = "parameter"
    axes: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    buffer: bool = False
    position: int | None = None
    record: ParameterRecord | None = None

    @property
    def numel(self) -> int:
        """Number of elements that are stored. On a lazy device ``tensor`` may have padding after them."""
        if self.start is not None and self.stop is not None:
            return self.stop - self.start
        return math.prod(self.layout.local_shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored; flat if only a part of the shard is stored."""
        return tuple(self.tensor.shape) if self.tensor.numel() == self.numel else (self.numel,)

    @property
    def nbytes(self) -> int:
        return self.numel * self.tensor.element_size()

    @property
    def key(self) -> str:
        """Key in a file. For the first model it is the FQN, so that other programs can read the file; other keys begin
        with the collection, since a second model may have the same FQNs."""
        if self.collection == "model.0":
            return self.name
        return f"{self.collection}/{self.name}" + (f"@{self.start}" if self.start is not None else "")

    @property
    def kind(self) -> str:
        return self.collection.partition(".")[0]

    def describe(self, coordinates: dict[str, int]) -> dict[str, Any]:
        """Returns the description of the tensor for the metadata of the file."""
        result: dict[str, Any] = {
            "collection": self.collection,
            "name": self.name,
            "layout": self.layout.to_dict(),
            "at": dict(place_of(self.layout, coordinates)),
        }
        if self.aliases:
            result["aliases"] = list(self.aliases)
        if self.start is not None:
            result["range"] = [self.start, self.stop]
        if self.form != "parameter":
            result["form"] = self.form
        if self.buffer:
            result["buffer"] = True
        if self.position is not None:
            result["position"] = self.position
        return result


def buffers_of(model: PreparedModel) -> dict[tuple[str, ...], torch.Tensor]:
    """Returns persistent buffers by their names; a shared buffer has several."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, value in model.inner.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and name not in model.parameters:
            names.setdefault(value, []).append(name)
    return {tuple(group): value for value, group in names.items()}


def items_of_model(model: PreparedModel, index: int) -> list[Item]:
    """Returns the parameters and persistent buffers of one model on this rank."""
    collection = model_collection(index)
    items = []
    for position, record in enumerate(model.parameters):
        if record.current is not None and (item := _weight_item(record, record.current, collection)) is not None:
            items.append(replace(item, position=position))
    for names, value in buffers_of(model).items():
        items.append(
            Item(
                collection=collection,
                name=names[0],
                aliases=names[1:],
                layout=Layout.of(value),
                tensor=value.detach(),
                buffer=True,
            )
        )
    return items


def _weight_item(record: ParameterRecord, parameter: torch.nn.Parameter, collection: str) -> Item | None:
    """What this rank holds of a parameter's values; None if nothing."""
    shard, tensor = record.weights, parameter.detach()
    partial = shard is not None and shard.stop - shard.start < parameter.numel()
    if shard is not None:
        if shard.start == shard.stop and partial:
            return None
        tensor = shard.tensor if partial else shard.tensor.view(parameter.shape)
    return Item(
        collection=collection,
        name=record.fqn,
        aliases=record.aliases,
        layout=_typed(record.layout, tensor),
        tensor=tensor,
        start=shard.start if shard is not None and partial else None,
        stop=shard.stop if shard is not None and partial else None,
        axes=shard.axes if shard is not None else (),
        record=record,
    )


def pieces_of(optimizer: Any, run: Run) -> list[StatePiece]:
    """Returns the parameters, or ranges of elements of them, that an optimizer updates on this rank.

    Args:
        optimizer: the optimizer below Accelerate's wrapper.
        run: the run.

    Raises:
        CheckpointError: if a parameter belongs to no prepared model.
    """
    if isinstance(optimizer, HasStatePieces):
        return optimizer.state_pieces()
    pieces = []
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            record = run.find_parameter(parameter)
            if record is None:
                raise CheckpointError(
                    f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} of no prepared "
                    "model.",
                    where=f"param_groups[{index}]",
                    why="its state could not be assigned to a parameter when the checkpoint is loaded",
                )
            pieces.append(StatePiece(record=record, parameter=parameter, start=0, stop=parameter.numel(), group=index))
    return pieces


def items_of_optimizer(optimizer: Any, index: int, run: Run) -> tuple[list[Item], dict[str, dict[str, Any]]]:
    """Returns an optimizer's state on this rank.

    Returns:
        The tensors; and the values that are not tensors, by FQN and entry.

    Raises:
        CheckpointError: if an entry does not have the shape of its parameter, and the parameter is sharded.
    """
    items: list[Item] = []
    values: dict[str, dict[str, Any]] = {}
    for piece in pieces_of(optimizer, run):
        if piece.start == piece.stop and math.prod(piece.record.layout.local_shape) > 0:
            continue  # on lazy devices every rank has a shard of every parameter, and some consist of padding only
        if piece.master:
            items.append(_state_item(master_collection(index), piece, piece.parameter.detach(), "parameter", False))
        for entry, value in piece.read_state(optimizer).items():
            if isinstance(value, torch.Tensor):
                form = form_of(value, piece)
                if form == "own" and piece.start:
                    continue  # only the rank with the first shard of the parameter saves it
                everywhere = form == "own" or piece.whole
                items.append(_state_item(state_collection(index, entry), piece, value.detach(), form, everywhere))
            elif not piece.start:
                values.setdefault(piece.record.fqn, {})[entry] = value
    return items, values


def form_of(value: torch.Tensor, piece: StatePiece) -> str:
    """Returns ``"parameter"`` if an entry of the state is sharded like its parameter, or ``"own"`` if it has another
    shape.

    Raises:
        CheckpointError: if the entry has another shape and the parameter is sharded, or is made of other tensors, as
            quantized state is.
    """
    if is_traceable_wrapper_subclass(value):
        raise CheckpointError(
            f"The optimizer's state of {piece.record.fqn!r} cannot be saved: an entry is a {type(value).__name__}.",
            why="it is made of tensors whose relation to the parameter is unknown",
            fix="train with an optimizer whose state is plain tensors, or save only the model, by `save_model`",
        )
    shape = piece.record.layout.shape if piece.whole else tuple(piece.parameter.shape)
    if tuple(value.shape) == shape and value.dim() > 0:
        return "parameter"
    if value.dim() == 0 or piece.whole:
        return "own"
    whole = not piece.record.layout.axes and piece.stop - piece.start == math.prod(piece.record.layout.shape)
    if not whole:
        raise CheckpointError(
            f"The optimizer's state of {piece.record.fqn!r} cannot be saved: an entry has shape "
            f"{tuple(value.shape)}, the parameter's shard on this rank has {tuple(piece.parameter.shape)}.",
            where=f"a parameter that is sharded over {', '.join(piece.record.layout.axes) or 'data-parallel'} ranks",
            why="the relation between this entry of a shard and the full parameter is unknown",
            fix="train with an optimizer whose state has the parameter's shape, or without sharding parameters",
        )
    return "own"


def _state_item(collection: str, piece: StatePiece, value: torch.Tensor, form: str, everywhere: bool) -> Item:
    """Returns the item of one entry. ``everywhere``: whether it is equal on all ranks along the parameter's sharded
    axes."""
    record = piece.record
    partial = not everywhere and piece.stop - piece.start < math.prod(record.layout.local_shape)
    return Item(
        collection=collection,
        name=record.fqn,
        aliases=record.aliases,
        layout=Layout.of(value) if everywhere else _typed(record.layout, value),
        tensor=value,
        start=piece.start if partial else None,
        stop=piece.stop if partial else None,
        form=form,
        axes=piece.axes,
        leads=record.layout.axes if everywhere else (),
        record=record,
    )


def items_of_plugin(plugin: str, key: str, state: ShardedState, run: Run, *, per_replica: bool) -> list[Item]:
    """Returns the state of a plugin on this rank that is sharded like the parameters.

    Raises:
        CheckpointError: if a tensor has another shape than this rank's shard of the parameter, or there is no such
            parameter.
    """
    where = f"plugin {plugin!r}, save()[{key!r}]"
    if not 0 <= state.model < len(run.models):
        raise CheckpointError(
            f"There is no prepared model {state.model}.", where=where, fix="give a position in run.models"
        )
    records = {name: record for record in run.models[state.model].parameters for name in record.names}
    items = []
    for fqn, tensor in state.tensors.items():
        record = records.get(fqn)
        if record is None or record.current is None:
            raise CheckpointError(
                f"{fqn!r} is not a parameter that this rank holds.",
                where=where,
                why="a ShardedState is sharded like the parameters of its names",
                fix="leave it out on this rank" if record else did_you_mean(fqn, records),
            )
        if tuple(tensor.shape) != record.layout.local_shape:
            raise CheckpointError(
                f"The tensor for {fqn!r} has shape {tuple(tensor.shape)}, the parameter has "
                f"{record.layout.local_shape} on this rank.",
                where=where,
                fix="give it the shape of the parameter, or save it as a plain tensor that is equal on all ranks",
            )
        items.append(
            Item(
                collection=plugin_collection(plugin, key),
                name=record.fqn,
                aliases=record.aliases,
                layout=_typed(record.layout, tensor),
                tensor=tensor.detach(),
                leads=() if per_replica else run.mesh.replica_axes,
                record=record,
            )
        )
    return items


def _typed(layout: Layout, tensor: torch.Tensor) -> Layout:
    return replace(layout, dtype=str(tensor.dtype).removeprefix("torch."))


def written_here(items: Iterable[Item], run: Run) -> list[Item]:
    """Returns those of ``items`` that this rank writes. Every shard is written once, and the work is balanced.

    Each rank decides without communication, since ranks that hold the same shards list them in the same order.
    Collective over pipeline stages, for buffers.
    """
    items = list(items)
    stages = run.mesh.names(AxisKind.STAGE)
    elsewhere = _buffers_before(items, stages, run) if stages else set()
    coordinates = run.coordinates
    loads: dict[tuple[str, ...], list[int]] = {}
    result = []
    for item in sorted(items, key=lambda i: (-i.nbytes, i.collection, i.name)):
        if (item.buffer and item.name in elsewhere) or not _speaks(item, coordinates):
            continue
        axes = _axes_of_equals(item, run, stages)
        load = loads.setdefault(axes, [0] * math.prod(run.mesh.degree(axis) for axis in axes))
        writer = 0 if item.buffer else min(range(len(load)), key=lambda i: (load[i], i))
        load[writer] += max(1, item.nbytes)
        if writer == run.mesh.position(run.backend.rank, axes):
            result.append(item)
    return result


def _axes_of_equals(item: Item, run: Run, stages: Sequence[str]) -> tuple[str, ...]:
    """Returns the axes along which all ranks hold the same values, so that any of them may write the item."""
    holders = stages if item.record is None else item.record.holders
    apart = {*item.axes, *item.leads, *item.layout.axes, *holders, *run.mesh.replica_axes}
    return tuple(axis.name for axis in run.mesh.axes if axis.name not in apart)


def check_equal(items: Sequence[Item], run: Run) -> None:
    """Checks that values that only one rank writes are equal on all ranks that hold them. Collective.

    Ranks along axes of samples and positions are compared. Buffers are not, since they may differ. On the CPU the
    values' checksums are compared. On a device the sum and the sum of squares are compared, so that only a few bytes
    are copied. A lazy device would compile and execute a graph for this, so there values are copied to the CPU and
    their checksums compared.

    Raises:
        CheckpointError: on every rank, naming the first tensor that differs.
    """
    mesh = run.mesh
    samples = (*mesh.replica_axes, *mesh.gradient_axes)
    group = run.group(*samples)
    held: dict[Any, tuple[int, Any, tuple[Any, ...]]] = {}
    if group.size > 1:
        stages, here, rank = mesh.names(AxisKind.STAGE), run.coordinates, run.backend.rank
        for item in items:
            equal = {*_axes_of_equals(item, run, stages), *item.leads}
            if not item.buffer and item.record is not None and not equal.isdisjoint(samples):
                at = tuple(here[axis] for axis in samples if axis not in equal)
                held[item.key, at] = rank, _digest(item, run), (item.kind, item.collection, item.name)
        if on_device := [key for key, (_, digest, _) in held.items() if isinstance(digest, torch.Tensor)]:
            values = run.backend.to_host(torch.stack([held[key][1] for key in on_device]))
            for key, value in zip(on_device, values, strict=True):
                held[key] = rank, tuple(value.view(torch.int32).tolist()), held[key][2]
    differs = run.backend.gather_object((held, None), group, _joined) if group.size > 1 else None
    agreed(run, lambda: _refuse(*differs[1]) if differs is not None and differs[1] else None)


def _digest(item: Item, run: Run) -> Any:
    if item.tensor.device.type == "cpu" or run.backend.is_lazy:
        return checksums_of(bytes_of(item.tensor.detach().cpu())[: item.nbytes])
    values = item.tensor.detach().reshape(-1)[: item.numel].float()
    return torch.stack([values.sum(), (values * values).sum()])


_Held = tuple[dict[Any, tuple[int, Any, tuple[Any, ...]]], Any]
"""By value: the first rank that has it, its digest there and what it is; and two ranks that differ, with what in."""


def _joined(one: _Held, other: _Held) -> _Held:
    """Joins the digests of ranks with those of higher ranks, in the first."""
    held, differs = one[0], one[1]
    for key, (rank, digest, of) in other[0].items():
        first, expected, _ = held.setdefault(key, (rank, digest, of))
        if digest != expected and differs is None:
            differs = first, rank, *of
    return held, differs or other[1]


def _refuse(other: int, rank: int, kind: str, collection: str, name: str) -> NoReturn:
    what = {"model": "parameter", "optimizer": "the optimizer's state of parameter"}.get(kind, collection)
    raise CheckpointError(
        f"Ranks {other} and {rank} have different values of {what} {name!r}, and a checkpoint keeps one.",
        where="save_state",
        why="the ranks took steps without reducing gradients: inside `no_sync`, or because the plugin that "
        "owns gradient_reduction does not reduce at every step; the values of different ranks would not "
        "belong together",
        fix="make them equal before saving (a plugin: in `save`), let the plugin add an axis of "
        "kind AxisKind.REPLICA, for which a checkpoint has a copy of each replica, or call "
        "`save_state(check_equal=False)` to save without this check",
    )


def _buffers_before(items: list[Item], stages: tuple[str, ...], run: Run) -> set[str]:
    """Returns the names of buffers that an earlier stage also has, and therefore writes."""
    group = run.group(*stages)
    names = [item.name for item in items if item.buffer]
    return {name for held in run.backend.all_gather_object(names, group)[: group.index] for name in held}


def _speaks(item: Item, coordinates: dict[str, int]) -> bool:
    """Returns whether this rank is the first that holds this shard along the axes of stages, of ``leads`` and of
    replicated cuts."""
    holders = {} if item.record is None else item.record.holders
    if any(coordinates.get(axis, 0) != indices[0] for axis, indices in holders.items()):
        return False
    return not any(coordinates.get(axis, 0) for axis in item.leads) and all(
        coordinates.get(cut.axis, 0) % cut.replicas == 0 for cut in item.layout.cuts if cut.parts > 1
    )


# ---- files ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """The rank that writes a file.

    Args:
        coordinates: its coordinates along the axes of the mesh that have more than one rank.
        replica: the number of its replica.
    """

    coordinates: dict[str, int]
    replica: int = 0

    def file_name(self, suffix: str) -> str:
        parts = [f"{axis}_rank_{index:02d}" for axis, index in self.coordinates.items()] or ["rank_00"]
        return "_".join(parts) + suffix + ".safetensors"


def file_header(items: Sequence[Item], coordinates: dict[str, int]) -> bytes:
    """Returns the header of a file that contains ``items``, which follow one after another."""
    return described_header(
        (item.key, _dtype_name(item.tensor), item.shape, item.describe(coordinates)) for item in items
    )


def file_parts(header: bytes, items: Iterable[Item]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a file: its header, then one tensor after another."""
    yield header
    for item in items:
        yield bytes_of(item.tensor)[: item.nbytes]


def tensors_header(tensors: Iterable[tuple[str, torch.Tensor]], metadata: dict[str, str]) -> bytes:
    return encode_header([(key, _dtype_name(tensor), tuple(tensor.shape)) for key, tensor in tensors], metadata)


def _dtype_name(tensor: torch.Tensor) -> str:
    """Returns torch's name of the dtype. Raises CheckpointError if safetensors does not support it."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    item_size(dtype)
    return dtype


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor on the CPU, without a copy if it is contiguous there."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
