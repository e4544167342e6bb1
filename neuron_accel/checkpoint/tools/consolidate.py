# SPDX-License-Identifier: Apache-2.0
"""Consolidates a checkpoint of any mesh into a standard folder of transformers, a few megabytes at a time.

Checkpoints of other libraries are read by packages, through the door ``neuron_accel.checkpoint_readers``.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import Extent, Files, failure, read_bytes
from neuron_accel.checkpoint.format.index import index_checkpoint, models_of, name_models, trained_models
from neuron_accel.checkpoint.format.manifest import (
    MODEL_FOLDER,
    Manifest,
    check_file,
    has_manifest,
    kind_of,
    locate,
    read_manifest,
    replicas_in,
)
from neuron_accel.checkpoint.format.published import published
from neuron_accel.checkpoint.format.ranges import FileRanges
from neuron_accel.checkpoint.format.source import SourceTensor, words
from neuron_accel.checkpoint.format.tensorfile import encode_header, model_collection, read_header
from neuron_accel.checkpoint.tools.foreign import find_foreign
from neuron_accel.checkpoint.tools.output import Output
from neuron_accel.engine.sharding.layout import Layout
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import Location, RemotePath

if TYPE_CHECKING:
    import torch

_WEIGHTS = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")
_FORMS = {"safetensors": ("model", ".safetensors"), "pytorch": ("pytorch_model", ".bin")}
_BLOCK = 1 << 20  # fits into a core's cache
_SIZES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
Progress = Callable[[int, int], None]
"""Is called with the number of bytes done and the total number of bytes."""


def checkpoint_folder(given: Location) -> Location:
    """Returns the folder of the checkpoint, given that folder or the folder of the model's shards in it."""
    given = given.resolve()
    if given.name == MODEL_FOLDER and not has_manifest(given) and has_manifest(given.parent):
        return given.parent
    return given


def parse_size(text: str) -> int:
    """Returns the number of bytes of a size like ``"5GB"``, ``"500MB"``, ``"2GiB"``, or of a number.

    Raises:
        CheckpointError: if ``text`` is not a positive size.
    """
    stripped = text.strip().upper()
    unit = next((u for u in sorted(_SIZES, key=len, reverse=True) if stripped.endswith(u)), "")
    try:
        size = int(float(stripped.removesuffix(unit)) * _SIZES.get(unit, 1))
    except (ValueError, OverflowError):
        size = 0
    if size < 1:
        raise CheckpointError(f"{text!r} is not a valid size.", fix="give one like 5GB or 500MB")
    return size


def consolidate(
    folder: Location,
    output: Location,
    *,
    form: str = "safetensors",
    max_shard_size: int = 5 * 10**9,
    verify: bool = True,
    replica: int = 0,
    model: int | None = None,
    config: Path | None = None,
    progress: Progress = lambda done, total: None,
    say: Callable[[str], object] = lambda text: None,
    files: Files | None = None,
) -> list[Location]:
    """Writes the model of a checkpoint with its original names and shapes. A tied weight is written once, and padding
    is removed.

    Args:
        folder: the checkpoint, or the folder of its model's shards; also one of another library, if a package
            reads it.
        output: the folder to create; if it exists, it must not contain weights, but for those of an earlier call that
            was interrupted, which are removed.
        form: ``"safetensors"`` or ``"pytorch"``.
        max_shard_size: maximum size of a file of weights in bytes; a larger tensor gets a file of its own.
        verify: whether to compare the model's files with their checksums. If they differ, the written files are
            removed. In a checkpoint of another library, whether ranks that hold the same elements must hold the same
            values.
        replica: the replica whose copy is written, if the checkpoint has a copy for each replica.
        model: number of the model to write, if the checkpoint has several; None for the only one that is trained.
        config: folder with the model's ``config.json``, for a checkpoint of another library that has none.
        progress: is called with the bytes written so far and the total.
        say: is called with a sentence if further models are left out, or weights keep their names in memory.
        files: performs the operations on files.

    Returns:
        The paths of the files of weights.

    Raises:
        CheckpointError: if the checkpoint is incomplete or damaged, the output cannot be written, or another process
            writes it.
    """
    files = files or Files()
    folder = checkpoint_folder(folder)
    if isinstance(folder, Path) and not has_manifest(folder) and (found := find_foreign(folder)):
        if model:
            raise CheckpointError(
                f"The checkpoint has no model {model}.",
                where=str(found.home),
                why="a checkpoint of another library has one model, 0",
                fix="leave the number out",
            )
        if replica:
            raise _no_replica(replica, 1, found.home)
        foreign = found.tensors(config, compare=verify)
        return _write(foreign, found.beside(config), output, form, max_shard_size, progress, files)
    manifest = read_manifest(folder)
    if config is not None:
        raise CheckpointError(
            "The checkpoint describes its own tensors; a configuration of the model is not needed.",
            where=str(folder),
            fix="leave it out: it is for checkpoints of other libraries",
        )
    for relative in manifest.of_kind("auxiliary"):
        check_file(folder, relative, manifest.files[relative])
    if not 0 <= replica < (copies := replicas_in(manifest)):
        raise _no_replica(replica, copies, folder)
    index = index_checkpoint(folder, manifest, ("model",), replica)
    numbers, described = index.models(), models_of(manifest)
    number = _chosen(numbers, model, described, folder)
    tensors = sorted(index.tensors(model_collection(number)), key=lambda tensor: tensor.name)
    for tensor in tensors:
        tensor.check()
    reserved = [name for name in manifest.of_kind("auxiliary") if _WEIGHTS.fullmatch(name)]
    if reserved:
        raise CheckpointError(
            f"The checkpoint has an auxiliary file with the name of a weight file: {reserved[0]!r}.", where=str(folder)
        )
    # The configuration in a checkpoint is that of the first model that is trained, or else of the first.
    has_config = number == [*trained_models(numbers, described), *numbers][0]
    beside = {relative: locate(folder, relative) for relative in manifest.of_kind("auxiliary") if has_config}
    if others := name_models((n for n in numbers if n != number), described):
        without = "" if has_config else ", without a configuration, which the checkpoint does not have"
        say(f"model {name_models([number], described)} is written{without}; left out: {others}")
    if "config.json" in beside:
        try:
            tensors = list(published(tensors, read_bytes(beside["config.json"])))
        except Exception as error:  # of transformers, which knows the names: without it the weights are still right
            say(f"weights keep the names that they have in memory: {type(error).__name__}: {error}")
    with checked_meanwhile(folder, manifest, (kind_of("model", replica),) if verify else ()) as check:
        return _write(tensors, beside, output, form, max_shard_size, progress, files, check)


def _chosen(
    numbers: Sequence[int], wanted: int | None, described: Sequence[Mapping[str, Any] | None], folder: Location
) -> int:
    """Returns the number of the model to write."""
    if not numbers:
        raise CheckpointError("The checkpoint contains no model.", where=str(folder))
    trained = trained_models(numbers, described)
    if wanted is None and (len(numbers) == 1 or len(trained) == 1):
        return numbers[0] if len(numbers) == 1 else trained[0]
    if wanted is not None and wanted in numbers:
        return wanted
    raise CheckpointError(
        f"The checkpoint has no model {wanted}."
        if wanted is not None
        else f"The checkpoint has {len(numbers)} models.",
        where=str(folder),
        why=f"it has {name_models(numbers, described)}",
        fix="choose one with `--model N`, or `consolidate(..., model=N)`",
    )


def _no_replica(replica: int, copies: int, folder: Location) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint has no replica {replica}.",
        where=str(folder),
        why=f"it has {copies} replicas, numbered from 0" if copies > 1 else "it has a single copy of the model",
        fix="give the number of one of them, or leave it out for the first",
    )


def _write(
    tensors: Sequence[SourceTensor],
    beside: Mapping[str, Location],
    folder: Location,
    form: str,
    max_shard_size: int,
    progress: Progress,
    files: Files,
    check: Callable[[], None] = lambda: None,
) -> list[Location]:
    """Writes the files of weights and what is beside them. If ``check`` or reading raises, they are removed: what was
    read may be damaged."""
    shards = split_by_size(tensors, max_shard_size)
    stem, suffix = _FORMS[form]
    with Output(folder, files) as output:
        held = [path.name for pattern in ("*.safetensors*", "*.bin*") for path in folder.glob(pattern)]
        if held:
            raise CheckpointError(
                f"{str(folder)!r} already contains weights: {held[0]}.", where=str(folder), fix="give a new folder"
            )
        names = [
            stem + (f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else "") + suffix
            for number in range(1, len(shards) + 1)
        ]
        listing = [f"{stem}{suffix}.index.json"] if len(shards) > 1 else []
        output.announce([*names, *listing, *beside])
        paths = [folder / name for name in names]
        _write_shards(dict(zip(paths, shards, strict=True)), form, progress, files)
        for name in listing:
            _write_listing(folder / name, dict(zip(names, shards, strict=True)), files)
        check()
        _write_beside(beside, folder, files)
    return paths


def _write_beside(beside: Mapping[str, Location], output: Location, files: Files) -> None:
    """Copies configuration and tokenizer, last, since a folder without a configuration cannot be loaded. Those that are
    there are replaced."""
    for relative, source in beside.items():
        path = output / relative
        if path.parent != output:
            files.make_folder(path.parent)
        try:
            contents = read_bytes(source)
        except OSError as error:
            raise failure("read", source, error) from error
        files.replace(path, contents)
    files.sync_folder(output)


@contextmanager
def checked_meanwhile(folder: Location, manifest: Manifest, kinds: tuple[str, ...]) -> Iterator[Callable[[], None]]:
    """Context in which files are compared with their checksums in another thread. Yields a function that waits for the
    comparison and raises CheckpointError if a file is damaged."""
    relatives = [relative for kind in kinds for relative in manifest.of_kind(kind)]
    with ThreadPoolExecutor(1, thread_name_prefix="neuron_accel-check") as pool:
        checks = [pool.submit(check_file, folder, relative, manifest.files[relative]) for relative in relatives]

        def check() -> None:
            for each in checks:
                each.result()

        try:
            yield check
        finally:
            for each in checks:
                each.cancel()


def split_by_size(tensors: Sequence[SourceTensor], limit: int) -> list[list[SourceTensor]]:
    """Splits tensors into consecutive lists of at most ``limit`` bytes, or of one larger tensor."""
    shards: list[list[SourceTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _write_shards(
    shards: Mapping[Location, Sequence[SourceTensor]], form: str, progress: Progress, files: Files
) -> None:
    """Writes the files of weights."""
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    for path, shard in shards.items():
        if form == "safetensors":
            files.assemble(path, _parts(shard, count))
        elif isinstance(path, RemotePath):
            with tempfile.TemporaryDirectory() as staging:
                local = Path(staging, path.name)
                _write_pickled(local, shard, count, files)
                files.assemble(path, [Extent(local, 0, local.stat().st_size)])
        else:
            _write_pickled(path, shard, count, files)


def _write_listing(path: Location, shards: Mapping[str, Sequence[SourceTensor]], files: Files) -> None:
    """Writes the index of several files of weights."""
    weight_map = {tensor.name: name for name, shard in shards.items() for tensor in shard}
    total = sum(tensor.nbytes for shard in shards.values() for tensor in shard)
    listing = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    files.write(path, [json.dumps(listing, indent=2).encode()])


def _parts(tensors: Sequence[SourceTensor], count: Callable[[int], None]) -> Iterator[bytes | memoryview | Extent]:
    """Yields the bytes of a safetensors file."""
    yield encode_header([(t.name, t.layout.dtype, t.layout.shape) for t in tensors], {"format": "pt"})
    with FileRanges() as source:
        for tensor in tensors:
            extents = tensor.extents()
            for part in _blocks(tensor, source) if extents is None else extents:
                yield part
                count(part.size if isinstance(part, Extent) else len(part))


def _blocks(tensor: SourceTensor, source: FileRanges) -> Iterator[memoryview]:
    """Yields the bytes of a full tensor in order, a few megabytes at a time. Each block is overwritten by the next.

    Args:
        tensor: the tensor.
        source: open files.
    """
    import numpy as np

    layout = Layout(shape=tensor.layout.shape, dtype=tensor.layout.dtype)
    numel, row = math.prod(layout.shape), max(1, math.prod(layout.shape[1:]))
    # Full rows, unless a row is large, so that each shard is read once for a block.
    step = max(1, _BLOCK // (row * tensor.item_size)) * row
    buffer = np.empty(min(step, numel), dtype=words(tensor.item_size))
    for begin in range(0, numel, step):
        end = min(begin + step, numel)
        out = buffer[: end - begin]
        tensor.read(source, layout, {}, out, begin, end)
        yield out.data.cast("B")


def _write_pickled(path: Path, tensors: Sequence[SourceTensor], count: Callable[[int], None], files: Files) -> None:
    """Writes a file for ``torch.load``. The tensors are memory-mapped from a temporary file, so that they take no
    memory."""
    import torch

    temporary = path.with_name(f".{path.name}.tensors")
    try:
        files.assemble(temporary, _parts(tensors, count))
        header = read_header(temporary)
        state = {}
        for name, stored in header.tensors.items():
            # Each tensor has its own mapping, since torch.save writes entire storages.
            bytes_ = _mapped(temporary, stored.offset, stored.nbytes)
            state[name] = bytes_.view(getattr(torch, stored.dtype)).view(stored.shape)
        files.operation("write", path)
        try:
            torch.save(state, path)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path.name!r} could not be written: {error}.", where=str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def _mapped(path: Path, offset: int, size: int) -> torch.Tensor:
    import mmap

    import torch

    if not size:
        return torch.empty(0, dtype=torch.uint8)
    page = offset - offset % mmap.ALLOCATIONGRANULARITY
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), offset - page + size, access=mmap.ACCESS_COPY, offset=page)
    return torch.frombuffer(mapped, dtype=torch.uint8, offset=offset - page, count=size)
