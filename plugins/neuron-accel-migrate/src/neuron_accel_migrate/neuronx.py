# SPDX-License-Identifier: Apache-2.0
"""Reads the model of a checkpoint of neuronx-distributed or optimum-neuron, neither of which needs to be installed.

Each rank of a pipeline stage and of tensor parallelism has written its shards with ``torch.save``. The reader follows
the writers of neuronx-distributed 0.18 (``trainer.save_checkpoint`` and, before it, ``parallel_layers.save``) and of
optimum-neuron 0.0.21 (older layout), 0.0.22 to 0.1 and 0.2 to 0.4.5:

    TAG/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt        a dict of tensors by the names of the original model, or
    TAG/model/dp_rank_00_tp_rank_TT_pp_rank_PP.pt.tensors/tensor_N.pt    one tensor; the dict has references (xser)
    shards/                                              optimum-neuron: the tag is "shards", and beside "model" are
    shards/mp_metadata_pp_rank_P.json                    dims and fused layers of each stage (0.2 to 0.4.5), or
    shards/mp_metadata_pp_rank_P.pt                      the same pickled (0.0.22 to 0.1)
    tp_rank_TT_pp_rank_PP/checkpoint.pt                  parallel_layers.save: {"model": dict}, or, with xser,
    tp_rank_TT_pp_rank_PP, tp_rank_TT_pp_rank_PP.tensors/    in optimum-neuron 0.0.21 with the metadata in that dict

Without metadata the full shapes are those of the model's configuration, and the sharded dim is the one in which shapes
differ.

Fused layers hold, on each rank, its shard of every projection one after another. Where key/value heads are replicated
``multiplier`` times, the replicated heads are consecutive over the ranks: either all heads, again and again (on
Trainium 1, and always in optimum-neuron), or each head ``multiplier`` times (on Trainium 2). Each copy has some of the
query heads that belong to its head, in their order, and the columns of the output projection follow these.

Only what ``torch.load(weights_only=True)`` accepts is unpickled (tensors, containers, numbers, strings, dtypes and
sizes), and torch_xla's reference to a tensor, of which only the number is used. State of optimizers is not read: that
of ZeRO-1 is flat and by parameter index, in an order that only the original program knows.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import CheckpointError
from neuron_accel_migrate.files import TensorReference, check_inside, read_saved, unreadable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn

_FILE = re.compile(
    r"dp_rank_00(_ep_rank_(?P<expert>\d{2,6}))?_tp_rank_(?P<rank>\d{2,6})_pp_rank_(?P<stage>\d{2,6})\.pt"
)
_OLD = re.compile(r"tp_rank_(?P<rank>\d{2,6})_pp_rank_(?P<stage>\d{2,6})(_dp_rank_00)?")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_HEADS = re.compile(r"(?P<module>.*)\.qkv_proj\.(?P<what>weight|bias)_(?P<part>q|k|v|qkv)")
_PARTS = ("q", "k", "v", "qkv")
_SIZES = ("q", "kv", "kv")
_COMPUTED = ("rotary_emb.inv_freq",)
_OLDEST = "tensor_parallel_shards"
_LARGEST_JSON = 256 << 20
_MOST_OPEN = 512
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A tensor that one rank has written, or a range of it along one dim.

    Args:
        path: the file.
        key: its name in the dict in that file; None if the file holds the tensor alone.
        shape, dtype: of the entire tensor in the file; the name of the dtype is without prefix.
        offset: where the range begins.
        size: its length; None for all.
    """

    path: Path
    key: str | None
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    size: int | None = None

    def length(self, dim: int) -> int:
        if dim >= len(self.shape):
            raise _wrong_shape(self, f"it has no dim {dim}")
        return self.shape[dim] if self.size is None else self.size

    def part(self, dim: int, offset: int, size: int) -> Shard:
        """Returns the range of ``size`` from ``offset`` along ``dim``."""
        if offset + size > self.length(dim):
            raise _wrong_shape(self, f"{self.length(dim)} along dim {dim}, not {offset + size} or more")
        return replace(self, offset=self.offset + offset, size=size)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A range of a full tensor along its dim, and the shard that has it. ``copy``: another segment has it too."""

    shard: Shard
    start: int
    size: int
    copy: bool = False


class ShardFiles:
    """The files of shards. Dicts of tensors stay memory-mapped; of single tensors some hundred files stay open."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._dicts: dict[Path, dict[str, torch.Tensor]] = {}
        self._single: OrderedDict[Path, torch.Tensor] = OrderedDict()

    def read(self, path: Path) -> Any:
        """Returns the contents of a file: tensors, containers, and references to tensors.

        Raises:
            CheckpointError: if it is missing, is not in the folder, is damaged, or reading it would run code.
        """
        check_inside(self._home, path)
        if not path.is_file():
            raise CheckpointError(
                f"{path.name!r} is missing.",
                where=str(path),
                why="the checkpoint is incomplete, or was saved without weights (avoid_saving_lower_precision_weights)",
                fix="copy the missing file, or use another checkpoint",
            )
        return read_saved(path)

    def shards(self, path: Path, contents: Mapping[Any, Any]) -> dict[str, Shard]:
        """Returns the shards in a rank's dict of tensors or references, by name.

        Raises:
            CheckpointError: if it has anything else, or a file of a tensor is missing or not valid.
        """
        held = self._dicts.setdefault(path, {})
        result: dict[str, Shard] = {}
        for name, value in contents.items():
            if not isinstance(name, str):
                raise _invalid(path, f"it has the key {name!r}")
            source, key = path, None
            if isinstance(value, TensorReference):
                number = vars(value).get("tid")
                if type(number) is not int or number < 0:
                    raise _invalid(path, f"the reference of {name!r} is not a number")
                source = path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt"
                tensor = self._alone(source)
            else:
                key = name
                tensor = held[name] = _checked(value, path, name)
            dtype = str(tensor.dtype).removeprefix("torch.")
            result[name] = Shard(path=source, key=key, shape=tuple(tensor.shape), dtype=dtype)
        return result

    def words(self, shard: Shard) -> np.ndarray:
        """Returns the entire tensor of the shard's file as unsigned integers of the size of its elements."""
        import torch

        tensor = self._alone(shard.path) if shard.key is None else self._dicts[shard.path][shard.key]
        size = tensor.element_size()
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
        return tensor.view(integers).numpy().view(f"u{size}")

    def _alone(self, path: Path) -> torch.Tensor:
        if path not in self._single:
            self._single[path] = _checked(self.read(path), path, path.name)
            if len(self._single) > _MOST_OPEN:
                self._single.popitem(last=False)
        return self._single[path]


@dataclass(kw_only=True)
class MergedTensor:
    """A tensor of the original model that is read from the shards of several ranks.

    Args:
        name: its name in the original model.
        shape, dtype: of the full tensor; the name of the dtype is without prefix.
        dim: along which it is merged.
        segments: cover it along ``dim``; a copy comes after the segment that it repeats.
        source: the files.
        compare: whether copies must be equal.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dim: int
    segments: list[Segment]
    source: ShardFiles
    compare: bool = True

    def check(self) -> None:
        """Checks that shards have the shape and dtype that they must have, and cover the tensor.

        Raises:
            CheckpointError: if not.
        """
        end = 0
        for segment in sorted((s for s in self.segments if not s.copy), key=lambda s: s.start):
            if segment.start != end:
                break
            end = segment.start + segment.size
        if end != (self.shape or (1,))[self.dim]:
            raise CheckpointError(
                f"The shards of {self.name!r} do not add up to shape {self.shape}.",
                where=", ".join(sorted({str(segment.shard.path) for segment in self.segments})),
                fix="use another checkpoint, or the configuration of this model",
            )
        for segment in self.segments:
            expected = list(self.shape or (1,))
            expected[self.dim] = found = (segment.shard.shape or (1,))[self.dim]
            if list(segment.shard.shape or (1,)) != expected or segment.shard.offset + segment.size > found:
                raise _wrong_shape(segment.shard, f"{tuple(expected)} is needed for {self.name!r}")
            if segment.shard.dtype != self.dtype:
                raise CheckpointError(
                    f"The shards of {self.name!r} have dtypes {self.dtype} and {segment.shard.dtype}.",
                    where=str(segment.shard.path),
                )

    def read(self, out: np.ndarray, start: int) -> None:
        """Reads full rows of the full tensor.

        Args:
            out: receives elements from ``start`` on: 1-D, unsigned integers of the size of an element.
            start: number of the first element.

        Raises:
            CheckpointError: if ranks that hold the same elements hold different values.
        """
        import numpy as np

        shape = self.shape or (1,)
        row = math.prod(shape[1:])
        first = start // row
        rows = out.reshape(-1, *shape[1:])
        for segment in self.segments:
            begin, end = segment.start, segment.start + segment.size
            shift = segment.shard.offset - segment.start
            low, high = first, first + len(rows)
            if self.dim == 0:
                low, high = max(low, begin), min(high, end)
                if low >= high:
                    continue
                into, there = rows[low - first : high - first], [slice(low + shift, high + shift)]
            else:
                among = [slice(None)] * (self.dim - 1)
                box = (slice(None), *among, slice(begin, end))
                into = rows[box]
                there = [slice(low, high), *among, slice(begin + shift, end + shift)]
            stored = self.source.words(segment.shard)
            values = (stored if self.shape else stored.reshape(1))[tuple(there)]
            if not segment.copy:
                into[...] = values
            elif self.compare and not np.array_equal(into, values):
                raise CheckpointError(
                    f"Ranks that hold the same elements of {self.name!r} hold different values.",
                    where=str(segment.shard.path),
                    why="replicas, such as copies of key/value heads, must be equal; the run that saved them did not "
                    "keep them equal, or the file is damaged",
                    fix="use another checkpoint, or take the values of the first rank that has them with `--no-verify`",
                )


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How heads are distributed where key/value heads are replicated.

    Args:
        attention: number of query heads.
        key_value: number of key/value heads.
        multiplier: number of copies of each key/value head over all ranks.
        adjacent: whether copies of one head are neighbours; otherwise all heads follow one another, repeatedly.
    """

    attention: int
    key_value: int
    multiplier: int
    adjacent: bool = False

    def segments(self, shards: Sequence[Shard], dim: int, *, query: bool) -> list[Segment]:
        """Returns the segments of a projection of queries (``query``; also the output projection, along its columns)
        or of keys or values, given the shards of the ranks."""
        positions, local = self.key_value * self.multiplier, shards[0].length(dim)
        per_rank = positions // len(shards)
        uneven = positions % len(shards) or self.attention % positions or local % max(1, per_rank)
        if uneven or not math.prod(shards[0].shape):
            raise _wrong_shape(
                shards[0],
                f"{local} along dim {dim} for {self.attention} query heads and {self.key_value} key/value heads, "
                f"replicated {self.multiplier} times, on {len(shards)} ranks",
            )
        unit, result = local // per_rank, []
        for position in range(positions):
            shard = shards[position // per_rank].part(dim, position % per_rank * unit, unit)
            copy, head = divmod(position, self.key_value)
            if self.adjacent:
                head, copy = divmod(position, self.multiplier)
            start = (head * self.multiplier + copy if query else head) * unit
            result.append(Segment(shard=shard, start=start, size=unit, copy=not query and copy > 0))
        return result


@dataclass(kw_only=True)
class Merge:
    """The tensors of the original model that were found so far, over pipeline stages."""

    source: ShardFiles
    compare: bool
    tensors: dict[str, MergedTensor] = field(default_factory=dict)

    def add(self, name: str, dim: int, segments: list[Segment], shape: Sequence[int] | None = None) -> None:
        """Adds a tensor. One that an earlier stage has too must be equal.

        Raises:
            CheckpointError: if shards do not fit together, or do not have the full shape ``shape``, if given.
        """
        if not isinstance(name, str) or name == "__metadata__":
            raise _invalid(segments[0].shard.path, f"{name!r} cannot be the name of a tensor")
        found = list(segments[0].shard.shape)
        if found:
            found[dim] = max(segment.start + segment.size for segment in segments)
        if shape is not None and list(shape) != found:
            raise _wrong_shape(
                segments[0].shard, f"the shards merge to {tuple(found)}, and {name!r} has shape {tuple(shape)}"
            )
        tensor = MergedTensor(
            name=name,
            shape=tuple(found),
            dtype=segments[0].shard.dtype,
            dim=dim,
            segments=segments,
            source=self.source,
            compare=self.compare,
        )
        if before := self.tensors.get(name):
            if (before.shape, before.dtype, before.dim) != (tensor.shape, tensor.dtype, dim):
                raise _wrong_shape(segments[0].shard, f"another stage has {name!r} with shape {before.shape}")
            tensor.segments = [*before.segments, *(replace(segment, copy=True) for segment in segments)]
        tensor.check()
        self.tensors[name] = tensor


def replicated(shards: Sequence[Shard]) -> list[Segment]:
    """Segments of a tensor that is replicated on all ranks."""
    size = shards[0].shape[0] if shards[0].shape else 1
    return [Segment(shard=shard, start=0, size=size, copy=index > 0) for index, shard in enumerate(shards)]


def concatenated(shards: Sequence[Shard], dim: int) -> list[Segment]:
    """Segments of a tensor that is sharded evenly along ``dim``."""
    size = shards[0].length(dim)
    return [Segment(shard=shard, start=index * size, size=size) for index, shard in enumerate(shards)]


Stage = dict[str, list[Shard]]
"""The shards of one pipeline stage: by name, those of each rank of tensor parallelism."""


# ---- The files -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Found:
    """A checkpoint of neuronx-distributed or optimum-neuron.

    Args:
        home: folder in which all its files are, with the configuration if there is one.
        files: of each rank, by pipeline stage and rank of tensor parallelism.
        metadata: folder in which optimum-neuron puts its metadata.
    """

    home: Path
    files: Mapping[tuple[int, int], Path]
    metadata: Path

    def tensors(self, config: Path | None, *, compare: bool) -> list[MergedTensor]:
        """See :func:`tensors_of`."""
        return tensors_of(self, config, compare=compare)


def find(folder: Path) -> Found | None:
    """Returns the shards in a folder: the checkpoint, a tag in it, or the folder of shards; None if it has none.

    Raises:
        CheckpointError: if it has several checkpoints, only adapters, shards of experts, or is not complete.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        return None
    nested = ("", "model", "shards/model", _OLDEST)
    for inside in (folder / name for name in nested):
        if files := _rank_files(inside):
            root = inside.parent if inside.name == "model" else inside
            home = root.parent if root.name in ("shards", _OLDEST) else root
            if (root / "checkpoint").is_file() and not (root / "done").is_file():
                raise CheckpointError(
                    "The checkpoint is not complete: it has no file 'done'.",
                    where=str(root),
                    why="neuronx-distributed writes it last; the save was interrupted, or a file was not copied",
                    fix="use the previous checkpoint, or copy the missing file",
                )
            return Found(home=home, files=_complete(inside, files), metadata=root)
    tags = sorted(child.name for child in folder.iterdir() if _rank_files(child / "model"))
    if len(tags) > 1:
        raise CheckpointError(
            f"The folder has {len(tags)} checkpoints: {', '.join(tags[:5])}{', ...' if len(tags) > 5 else ''}.",
            where=str(folder),
            fix=f"give one of them, for example {str(folder / tags[-1])!r}",
        )
    if not tags and (adapters := sorted(child.name for child in folder.glob("adapter_*/adapter_shards"))):
        raise CheckpointError(
            f"The checkpoint has adapters only: {len(adapters)} of them.",
            where=str(folder),
            why="shards of LoRA adapters are not read",
            fix="consolidate them with `optimum-cli neuron consolidate`",
        )
    return find(folder / tags[0]) if tags else None


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """Returns the files of ranks in a folder, by stage and rank; empty if it has none."""
    result: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE.fullmatch(path.name) or _OLD.fullmatch(path.name)
        if match is None:
            continue
        if match.groupdict().get("expert") is not None:
            raise CheckpointError(
                "The checkpoint has shards of experts.",
                where=str(path),
                why="expert parallelism of neuronx-distributed is not read",
                fix="merge them with its checkpoint converter",
            )
        result[int(match["stage"]), int(match["rank"])] = path / "checkpoint.pt" if path.is_dir() else path
    return result


def _complete(folder: Path, files: dict[tuple[int, int], Path]) -> dict[tuple[int, int], Path]:
    stages, ranks = (max(key[index] for key in files) + 1 for index in (0, 1))
    for stage, rank in itertools.product(range(stages), range(ranks)):
        if (stage, rank) not in files:
            like = re.sub(r"tp_rank_\d+_pp_rank_\d+", f"tp_rank_{rank:02d}_pp_rank_{stage:02d}", _name(files))
            raise CheckpointError(
                f"{like!r} is missing.",
                where=str(folder / like),
                why=f"other files are of {ranks} ranks of tensor parallelism and {stages} pipeline stages",
                fix="copy the missing file, or use another checkpoint",
            )
    return files


def _name(files: Mapping[tuple[int, int], Path]) -> str:
    path = next(iter(files.values()))
    return f"{path.parent.name}/{path.name}" if path.name == "checkpoint.pt" else path.name


# ---- The tensors -----------------------------------------------------------------------------------------------------
def tensors_of(found: Found, config: Path | None = None, *, compare: bool = True) -> list[MergedTensor]:
    """Returns the tensors of the original model, with their original names and shapes.

    Args:
        found: the checkpoint.
        config: folder with the ``config.json`` of the model, for checkpoints without metadata; by default that of the
            checkpoint.
        compare: whether values that several ranks hold must be equal.

    Raises:
        CheckpointError: if the checkpoint is incomplete, damaged, does not fit the configuration, or has code.
    """
    source = ShardFiles(found.home)
    merge = Merge(source=source, compare=compare)
    rules: _Configuration | None = None
    listed: set[str] = set()
    seen: set[str] = set()
    count = max(stage for stage, _ in found.files) + 1
    for number in range(count):
        ranks = [(path, source.read(path)) for (stage, _), path in sorted(found.files.items()) if stage == number]
        where, metadata = _metadata(found, number, source)
        contents = [_model(path, held) for path, held in ranks]
        if metadata is None and isinstance(ranks[0][1].get("sharded_metadata"), dict):
            where, metadata = ranks[0]
        stage = _stage([(path, source.shards(path, model)) for (path, _), model in zip(ranks, contents, strict=True)])
        if metadata is None:
            rules = rules or _Configuration(config or found.home, len(stage) * count)
            rules.add(merge, stage)
            continue
        try:
            _by_metadata(merge, stage, metadata)
            listed |= metadata.get("sharded_metadata", {}).keys()
            seen |= stage.keys()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"The metadata of stage {number} cannot be used: {type(error).__name__} {error}.",
                where=str(where),
                why="it is damaged, or of a version that is not known: optimum-neuron 0.0.21 to 0.4.5 are",
            ) from error
    if _metadata(found, count, source)[1] is not None:
        raise CheckpointError(
            f"Stage {count} has metadata, but no shards.", where=str(found.metadata), fix="copy the missing files"
        )
    if missing := sorted(map(str, listed - seen)):
        raise CheckpointError(
            f"No shard has {missing[0]!r}.",
            where=str(found.metadata),
            why="the metadata lists it",
            fix="copy the missing files",
        )
    if rules is not None:
        rules.finish(merge, str(found.home))
    return list(merge.tensors.values())


def _model(path: Path, contents: Any) -> Mapping[Any, Any]:
    model = contents.get("model", contents) if isinstance(contents, Mapping) else None
    if not isinstance(model, Mapping):
        raise _invalid(path, "it has no dict of tensors")
    return model


def _stage(ranks: list[tuple[Path, dict[str, Shard]]]) -> Stage:
    first = ranks[0][1]
    for path, shards in ranks:
        if shards.keys() != first.keys():
            name = sorted(shards.keys() ^ first.keys())[0]
            raise _invalid(path, f"{name!r} is in only one of it and {ranks[0][0].name!r}")
        for name, shard in shards.items():
            if (shard.shape, shard.dtype) != (first[name].shape, first[name].dtype):
                raise _wrong_shape(
                    shard,
                    f"{name!r} is {shard.dtype} {shard.shape}, and {first[name].dtype} {first[name].shape} on rank 0",
                )
    return {name: [shards[name] for _, shards in ranks] for name in first}


def _metadata(found: Found, stage: int, source: ShardFiles) -> tuple[Path, dict[str, Any] | None]:
    pickled, path = (found.metadata / f"mp_metadata_pp_rank_{stage}{suffix}" for suffix in (".pt", ".json"))
    if pickled.is_file():
        loaded = source.read(pickled)
        path = pickled
    elif path.is_file():
        loaded = _json(found.home, path)
    else:
        return path, None
    if not isinstance(loaded, dict):
        raise _invalid(path, "it does not contain metadata")
    return path, loaded


def _json(home: Path, path: Path) -> Any:
    check_inside(home, path)
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise ValueError(f"it has more than {_LARGEST_JSON} bytes")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise _invalid(path, str(error) or type(error).__name__) from error


def _by_metadata(merge: Merge, stage: Stage, metadata: dict[str, Any]) -> None:
    """Merges a stage by the metadata of optimum-neuron."""
    pickled = "sharded_metadata" in metadata
    parameters = metadata["sharded_metadata" if pickled else "parameters"]
    done = _pickled_heads(merge, stage, metadata) if pickled else _specs(merge, stage, metadata)
    for name, entry in parameters.items():
        if name in done:
            continue
        if name not in stage and pickled:
            continue  # these list the parameters of all stages
        if name not in stage:
            raise ValueError(f"{name!r} has no shards")
        sharded = entry["kind"] == "sharded" if pickled else entry["tensor_model_parallel"]
        if not sharded:
            merge.add(name, 0, replicated(stage[name]))
            continue
        if "num_partitions" in entry and entry["num_partitions"] != len(stage[name]):
            raise ValueError(
                f"{name!r} has {entry['num_partitions']} shards, and there are files of {len(stage[name])}"
            )
        dim = _dim(entry["partition_dim"], stage[name][0])
        if entry.get("partition_stride", 1) != 1:
            raise ValueError(f"{name!r} is fused of {entry['partition_stride']} layers that are not listed")
        merge.add(name, dim, concatenated(stage[name], dim))
    unknown = [name for name in stage if name not in done and name not in parameters]
    if unknown:
        _log.warning(
            "not in the metadata of optimum-neuron and left out, as it does (buffers, tied weights): %s",
            ", ".join(unknown[:10]),
        )


def _specs(merge: Merge, stage: Stage, metadata: dict[str, Any]) -> set[str]:
    """Merges the layers that optimum-neuron 0.2 to 0.4.5 fuses; returns the names of their shards."""
    known = {"FusedLinearsSpec": _fused_spec, "GQAQKVColumnParallelLinearSpec": _heads_spec}
    done: set[str] = set()
    for group in metadata["model_weight_transformation_specs"]:
        for kind, spec in group["specs"]:
            if kind not in known:
                raise ValueError(f"{kind!r} is not a known transformation")
            for what in ("weight", "bias") if spec["bias"] else ("weight",):
                done |= known[kind](merge, stage, group["module_fully_qualified_name"], what, spec)
    return done


def _fused_spec(merge: Merge, stage: Stage, module: str, what: str, spec: dict[str, Any]) -> set[str]:
    fused = f"{module}.{spec['fused_linear_name']}.{what}"
    if spec["fuse_axis"] not in (0, "column"):
        raise ValueError(f"{fused!r} is fused along dim {spec['fuse_axis']}")
    names = [f"{module}.{name}.{what}" for name in spec["linear_names"]]
    _split_fused(merge, stage[fused], names, [_count(size) for size in spec["original_dims"]])
    return {fused}


def _heads_spec(merge: Merge, stage: Stage, module: str, what: str, spec: dict[str, Any]) -> set[str]:
    heads = _heads(spec)
    own = {part: f"{module}.{spec['gqa_qkv_projection_name']}.{what}_{part}" for part in _PARTS}
    parts = {part: stage[name] for part, name in own.items() if name in stage}
    done = {own[part] for part in parts}
    if spec["fuse_qkv"]:
        parts = _split_heads(parts["qkv"], [_count(spec[f"{each}_output_size_per_partition"]) for each in _SIZES])
    for part, each in (("q", "query"), ("k", "key"), ("v", "value")):
        name = f"{module}.{spec[f'{each}_projection_name']}.{what}"
        merge.add(name, 0, heads.segments(parts[part], 0, query=part == "q"))
    output = f"{module}.{spec['output_projection_name']}.{what}"
    if what == "weight":
        merge.add(output, 1, heads.segments(stage[output], 1, query=True))
        done.add(output)
    return done


def _heads(known: dict[str, Any]) -> Heads:
    return Heads(
        attention=_count(known["num_attention_heads"]),
        key_value=_count(known["num_key_value_heads"]),
        multiplier=_count(known["kv_size_multiplier"]),
    )


def _pickled_heads(merge: Merge, stage: Stage, metadata: dict[str, Any]) -> set[str]:
    """Merges the layers that optimum-neuron 0.0.21 to 0.1 replaces; returns the names of their shards."""
    known = metadata["gqa_qkv_metadata"]
    originals = known["original_names_to_gqa_qkv_names"]
    if not originals:
        return set()
    heads = _heads(known)
    done: set[str] = set()
    for original, name in originals.items():
        if name in stage:
            if not name.endswith(("_q", "_k", "_v")):
                raise ValueError(f"{name!r} is not a projection of queries, keys or values")
            merge.add(original, 0, heads.segments(stage[name], 0, query=name.endswith("_q")))
            done.add(name)
    for name in known["output_projections_names"]:
        if name in stage and len(stage[name][0].shape) > 1:
            merge.add(name, 1, heads.segments(stage[name], 1, query=True))
            done.add(name)
    return done


def _split_fused(merge: Merge, shards: list[Shard], names: list[str], sizes: list[int]) -> None:
    """Merges layers that are fused: each rank has its rows of each, one after another."""
    if len(names) != len(sizes) or sum(sizes) != shards[0].length(0) * len(shards):
        raise _wrong_shape(shards[0], f"{len(shards)} shards of {sizes} rows are fused in it")
    offset = 0
    for name, size in zip(names, sizes, strict=True):
        if size % len(shards):
            raise _wrong_shape(shards[0], f"{size} is not divisible by {len(shards)} ranks")
        local = size // len(shards)
        merge.add(name, 0, concatenated([shard.part(0, offset, local) for shard in shards], 0))
        offset += local


def _split_heads(shards: list[Shard], sizes: Sequence[int]) -> dict[str, list[Shard]]:
    """Splits fused projections of queries, keys and values, of which a rank has ``sizes``."""
    if sum(sizes) != shards[0].length(0):
        raise _wrong_shape(shards[0], f"{list(sizes)} along dim 0 are fused in it")
    offsets = itertools.accumulate(sizes, initial=0)
    return {
        part: [shard.part(0, offset, size) for shard in shards]
        for part, offset, size in zip("qkv", offsets, sizes, strict=False)
    }


class _Configuration:
    """Merges stages by the full shapes of the model, for neuronx-distributed, which writes no metadata."""

    def __init__(self, config: Path, most_layers: int) -> None:
        model, text = _meta_model(config, most_layers)
        self._attention = int(getattr(text, "num_attention_heads", None) or 1)
        self._key_value = int(getattr(text, "num_key_value_heads", None) or self._attention)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._alias: dict[str, str] = {}
        names: dict[int, str] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            self._alias[name] = names.setdefault(id(tensor), name)
            self._shapes[name] = tuple(tensor.shape)
        self._config = str(config)
        self._adjacent: bool | None = None

    def add(self, merge: Merge, stage: Stage) -> None:
        """Merges the shards of a stage."""
        done: set[str] = set()
        for name in stage:
            if (match := _HEADS.fullmatch(name)) and name not in self._shapes and name not in done:
                done |= self._add_heads(merge, stage, match["module"], match["what"])
        for name, shards in stage.items():
            if name in done or name.endswith(_COMPUTED):
                continue
            module, _, what = name.rpartition(".")
            parent, _, layer = module.rpartition(".")
            if name in self._shapes:
                if layer in _FUSED and len(shards) > 1:
                    raise _invalid(
                        shards[0].path, f"how the layers that are fused in {name!r} are sharded is not known"
                    )
                self._add_plain(merge, name, shards)
            elif layer in _FUSED:
                names = [f"{parent}.{each}.{what}" for each in _FUSED[layer]]
                sizes = [self._shape(each, shards[0])[0] for each in names]
                _split_fused(merge, shards, names, sizes)
            else:
                self._shape(name, shards[0])

    def finish(self, merge: Merge, where: str) -> None:
        """Checks that all tensors of the model were found.

        Raises:
            CheckpointError: if one was not.
        """
        have = {self._alias[name] for name in merge.tensors}
        for name, alias in self._alias.items():
            if alias not in have:
                raise CheckpointError(
                    f"No shard has {name!r}.",
                    where=where,
                    why=f"the model of {self._config!r} has it; files of a stage may be missing",
                    fix="give the configuration of this model with `--config`, or use another checkpoint",
                )

    def _shape(self, name: str, shard: Shard) -> tuple[int, ...]:
        if name not in self._shapes:
            raise CheckpointError(
                f"The model has no {name!r}.",
                where=str(shard.path),
                why=f"the names are compared with the model of {self._config!r}",
                fix="give the configuration of this model with `--config`; convert a model with names of its own with "
                "neuronx-distributed",
            )
        return self._shapes[name]

    def _add(self, merge: Merge, name: str, dim: int, segments: list[Segment]) -> None:
        merge.add(self._alias[name], dim, segments, self._shape(name, segments[0].shard))

    def _add_plain(self, merge: Merge, name: str, shards: list[Shard]) -> None:
        full, local = self._shapes[name], shards[0].shape
        differ = [dim for dim, sizes in enumerate(zip(full, local, strict=False)) if sizes[0] != sizes[1]]
        if len(full) == len(local) and not differ:
            self._add(merge, name, 0, replicated(shards))
        elif len(full) == len(local) and len(differ) == 1 and local[differ[0]] * len(shards) == full[differ[0]]:
            self._add(merge, name, differ[0], concatenated(shards, differ[0]))
        else:
            raise _wrong_shape(
                shards[0],
                f"a shard of {name!r}, of shape {full}, on {len(shards)} ranks does not have it; padded heads and "
                "vocabularies are not read",
            )

    def _add_heads(self, merge: Merge, stage: Stage, module: str, what: str) -> set[str]:
        """Merges the projections of queries, keys and values of one attention, and its output projection."""
        own = {part: f"{module}.qkv_proj.{what}_{part}" for part in _PARTS}
        parts = {part: stage[name] for part, name in own.items() if name in stage}
        first = next(iter(parts.values()))[0]
        names = {part: f"{module}.{part}_proj.{what}" for part in ("q", "k", "v")}
        query, key = (self._shape(names[part], first)[0] for part in ("q", "k"))
        if "qkv" in parts:
            ranks = len(parts["qkv"])
            rest = first.length(0) - query // ranks
            parts = _split_heads(parts["qkv"], (query // ranks, rest // 2, rest - rest // 2))
        elif len(parts) < 3:
            raise _invalid(first.path, f"it has not all of queries, keys and values of {module!r}")
        multiplier = parts["k"][0].length(0) * len(parts["k"]) // key
        heads = Heads(attention=self._attention, key_value=self._key_value, multiplier=max(1, multiplier))
        if self._adjacent is None and multiplier > 1:
            self._adjacent = _copies_are_adjacent(merge.source, heads, parts["k"])
        heads = replace(heads, adjacent=bool(self._adjacent))
        for part, name in names.items():
            self._add(merge, name, 0, heads.segments(parts[part], 0, query=part == "q"))
        done = set(own.values())
        output = f"{module}.o_proj.{what}"
        if what == "weight" and output in stage:
            self._add(merge, output, 1, heads.segments(stage[output], 1, query=True))
            done.add(output)
        return done


def _copies_are_adjacent(source: ShardFiles, heads: Heads, keys: list[Shard]) -> bool:
    """Returns the order of replicated key/value heads, by which of them are equal.

    Raises:
        CheckpointError: if it is neither of the known ones.
    """
    import numpy as np

    for adjacent in (False, True):
        first: dict[int, Any] = {}
        for segment in replace(heads, adjacent=adjacent).segments(keys, 0, query=False):
            shard = segment.shard
            values = source.words(shard)[shard.offset : shard.offset + segment.size]
            if not np.array_equal(first.setdefault(segment.start, values), values):
                break
        else:
            return adjacent
    raise CheckpointError(
        "Copies of key/value heads differ, in either order in which neuronx-distributed replicates them.",
        where=str(keys[0].path),
        why="the order determines which query heads a rank has; the run that saved them did not keep copies equal",
        fix="convert the checkpoint with neuronx-distributed, which takes the order as an option",
    )


def _meta_model(config: Path, most_layers: int) -> tuple[nn.Module, Any]:
    """Returns the model of the ``config.json`` in a folder, on the meta device, and the configuration of its text."""
    import torch

    fix = "give the folder of the model's config.json with `--config`"
    if not (config / "config.json").is_file():
        raise CheckpointError(
            "The checkpoint does not say how its tensors are sharded, and there is no config.json.",
            where=str(config),
            why="only optimum-neuron writes metadata; otherwise shards are compared with the full shapes of the model",
            fix=fix,
        )
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        loaded = AutoConfig.from_pretrained(config, trust_remote_code=False)
        text = loaded.get_text_config()
        if int(text.num_hidden_layers) > most_layers:
            raise ValueError(f"it has {text.num_hidden_layers} layers, and there are fewer tensors")
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(loaded, trust_remote_code=False), text
    except ImportError as error:
        raise CheckpointError("transformers is not installed.", fix="pip install transformers") from error
    except Exception as error:  # a configuration that is not valid raises various types
        raise CheckpointError(
            f"There is no model for the configuration: {str(error).splitlines()[0] if str(error) else error!r}",
            where=str(config / "config.json"),
            fix=fix,
        ) from error


def _dim(value: Any, shard: Shard) -> int:
    if type(value) is not int or not 0 <= value < len(shard.shape):
        raise ValueError(f"{value!r} is not a dim of a tensor of shape {shard.shape}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{value!r} is not a positive number")
    return value


def _checked(value: Any, path: Path, name: str) -> torch.Tensor:
    """Returns a dense tensor whose elements are all in its file."""
    import torch

    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        raise _invalid(path, f"{name!r} in it is a {type(value).__name__}, not a dense tensor")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise _invalid(path, f"{name!r} in it has shape {tuple(value.shape)}, and fewer elements are stored")
    return value.detach()


def _invalid(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name!r} is not a file of a checkpoint that can be read: {why}.",
        where=str(path),
        fix="restore the file from a copy, or use another checkpoint",
    )


def _wrong_shape(shard: Shard, why: str) -> CheckpointError:
    name = shard.key or "the tensor"
    return CheckpointError(
        f"{name!r} in {shard.path.name!r} has a shape that does not fit: {shard.shape}.",
        where=str(shard.path),
        why=why,
        fix="use the files of one checkpoint, and the configuration of its model",
    )
