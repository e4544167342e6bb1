"""Tensors stored under one layout are read under any other: random layouts, runs, blocks, units and padding."""

from __future__ import annotations

import errno
import itertools
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_accel.checkpoint.format.files import Extent, Files
from neuron_accel.checkpoint.format.index import Index, IndexPart, index_checkpoint
from neuron_accel.checkpoint.format.manifest import FileEntry, Manifest
from neuron_accel.checkpoint.format.ranges import FileRanges
from neuron_accel.checkpoint.format.source import words
from neuron_accel.checkpoint.format.tensorfile import read_header
from neuron_accel.checkpoint.state.snapshot import Item, bytes_of, file_header
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.errors import CheckpointError


@st.composite
def shapes(draw):
    """Draws a shape whose dims consist of blocks of units, with the blocks and units."""
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        unit = draw(st.integers(1, 3))
        blocks = tuple(unit * draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3))))
        dims.append((blocks, unit))
    return dims


@st.composite
def layouts(draw, dims):
    shape = tuple(sum(blocks) for blocks, _ in dims)
    axes = draw(st.permutations(["tp", "ep"]))
    cuts = []
    for dim, (blocks, unit) in enumerate(dims):
        if axes and draw(st.booleans()):
            replicas = draw(st.sampled_from([1, 1, 2]))
            degree = replicas * draw(st.integers(1, 4))
            cuts.append(
                Cut(
                    dim=dim,
                    axis=axes.pop(),
                    degree=degree,
                    size=shape[dim],
                    blocks=blocks,
                    unit=unit,
                    replicas=replicas,
                    padded=True,
                )
            )
    return Layout(shape=shape, dtype="int32", cuts=tuple(cuts))


def places(layout):
    """Returns the coordinates of every rank along the axes of the cuts."""
    ranges = [[(cut.axis, index) for index in range(cut.degree)] for cut in layout.cuts]
    return [dict(place) for place in itertools.product(*ranges)]


def store(folder, full, layout, runs, by_index=False):
    """Writes the shards of ``full`` under ``layout`` to several files, each shard split into ``runs`` runs of
    elements; ``by_index``: a file of its own says which."""
    index, part, entries = Index(), IndexPart(), {}
    for number, at in enumerate(places(layout)):
        if not all(at[cut.axis] % cut.replicas == 0 for cut in layout.cuts):
            continue
        flat = layout.shard(full, at).reshape(-1)
        bounds = [round(i * flat.numel() / runs) for i in range(runs + 1)]
        for start, stop in itertools.pairwise(bounds):
            item = Item(
                collection="optimizer.0.state.x",
                name="w",
                aliases=(),
                layout=layout,
                tensor=flat[start:stop] if runs > 1 else flat.view(layout.local_shape),
                start=start if runs > 1 else None,
                stop=stop if runs > 1 else None,
            )
            path = folder / f"{number}-{start}-{stop}.safetensors"
            if not path.exists():
                header = file_header([item], at)
                written = Files().write(path, [header, bytes_of(item.tensor)])
                index.add(path, read_header(path))
                one = IndexPart()
                one.files[path.name] = ("optimizer", len(entries), len(header))
                one.add("optimizer", len(entries), item.describe(at), item.numel, 0)
                part.merge(one)
                entries[path.name] = FileEntry(size=written.size, checksums=written.checksums, kind="optimizer")
    if by_index:
        written = Files().write(folder / "index.json", [part.to_bytes()])
        entries["index.json"] = FileEntry(size=written.size, checksums=written.checksums, kind="index")
        index = index_checkpoint(folder, Manifest(files=entries))
    source = index.find("optimizer.0.state.x", ("w",))
    source.check()
    return source


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dims=shapes(), runs=st.integers(1, 3), of=st.integers(1, 3), by_index=st.booleans())
def test_reading_equals_slicing_the_full_tensor(tmp_path_factory, data, dims, runs, of, by_index):
    folder = tmp_path_factory.mktemp("store")
    stored, wanted = data.draw(layouts(dims)), data.draw(layouts(dims))
    full = torch.arange(1, math.prod(stored.shape) + 1, dtype=torch.int32).reshape(stored.shape)
    source = store(folder, full, stored, runs, by_index)
    with FileRanges() as files:
        for at in places(wanted):
            expected = wanted.shard(full, at).reshape(-1)
            bounds = [round(i * expected.numel() / of) for i in range(of + 1)]
            for start, stop in itertools.pairwise(bounds):
                out = np.full(stop - start, 77, dtype=words(4))
                source.read(files, wanted, at, out, start, stop)
                assert out.astype(np.int64).tolist() == expected[start:stop].tolist()


@settings(max_examples=150, deadline=None)
@given(data=st.data(), dims=shapes(), runs=st.integers(1, 3), by_system=st.booleans(), by_index=st.booleans())
def test_extents_cover_the_full_tensor(tmp_path_factory, data, dims, runs, by_system, by_index):
    folder = tmp_path_factory.mktemp("store")
    stored = data.draw(layouts(dims))
    full = torch.arange(1, math.prod(stored.shape) + 1, dtype=torch.int32).reshape(stored.shape)
    extents = store(folder, full, stored, runs, by_index).extents()
    assert extents is not None or stored.cuts
    if extents is not None:
        with pytest.MonkeyPatch.context() as patch:
            if not by_system:
                patch.setattr(os, "copy_file_range", _another_file_system, raising=False)
            Files().assemble(folder / "out", [b"before", *extents, b"after"])
        assert (folder / "out").read_bytes() == b"before" + full.numpy().tobytes() + b"after"


def _another_file_system(*_):
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def test_rows_are_copied_by_the_system_and_columns_are_not(tmp_path):
    full = torch.arange(64, dtype=torch.int32).reshape(8, 8)
    for dim, copied in ((0, True), (1, False)):
        layout = Layout(shape=(8, 8), dtype="int32", cuts=(Cut(dim=dim, axis="tp", degree=4, size=8),))
        (folder := tmp_path / str(dim)).mkdir()
        assert (store(folder, full, layout, runs=2).extents() is not None) == copied


@pytest.mark.parametrize("by_system", [True, False])
def test_an_extent_that_ends_too_early_is_an_error(tmp_path, monkeypatch, by_system):
    (tmp_path / "x").write_bytes(b"1234")
    if not by_system:
        monkeypatch.setattr(os, "copy_file_range", _another_file_system, raising=False)
    with pytest.raises(CheckpointError, match="ends too early"):
        Files().assemble(tmp_path / "out", [Extent(tmp_path / "x", 2, 3)])


def test_large_boxes_are_read_in_several_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("neuron_accel.checkpoint.format.ranges._BUFFER", 64)
    full = torch.arange(12 * 10, dtype=torch.int32).reshape(12, 10)
    whole = Layout(shape=(12, 10), dtype="int32")
    columns = Layout(shape=(12, 10), dtype="int32", cuts=(Cut(dim=1, axis="tp", degree=2, size=10),))
    source = store(tmp_path, full, whole, runs=2)
    out = np.zeros(60, dtype=words(4))
    with FileRanges() as files:
        source.read(files, columns, {"tp": 1}, out)
    assert out.reshape(12, 5).tolist() == full[:, 5:].tolist()


def test_only_what_is_needed_is_read(tmp_path, monkeypatch):
    """A rank that needs a quarter of the rows reads a quarter of the bytes."""
    full = torch.arange(64 * 8, dtype=torch.int32).reshape(64, 8)
    source = store(tmp_path, full, Layout(shape=(64, 8), dtype="int32"), runs=1)
    rows = Layout(shape=(64, 8), dtype="int32", cuts=(Cut(dim=0, axis="tp", degree=4, size=64),))
    read = []
    plain = FileRanges.read
    monkeypatch.setattr(
        FileRanges, "read", lambda self, path, offset, out: (read.append(out.nbytes), plain(self, path, offset, out))
    )
    with FileRanges() as files:
        source.read(files, rows, {"tp": 2}, np.zeros(128, dtype=words(4)))
    assert sum(read) == full.numel() * 4 // 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "bool", "complex64", "float8_e4m3fn"])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    torch_dtype = getattr(torch, dtype)
    size = torch.empty(0, dtype=torch_dtype).element_size()
    bits = torch.randint(0, 2 if dtype == "bool" else 255, (6 * size,), dtype=torch.uint8)
    full = bits.view(torch_dtype).reshape(2, 3)
    layout = Layout(shape=(2, 3), dtype=dtype)
    source = store(tmp_path, full, layout, runs=1)
    out = np.zeros(6, dtype=words(size))
    with FileRanges() as files:
        source.read(files, Layout(shape=(2, 3), dtype=dtype), {}, out)
    assert out.tobytes() == bits.numpy().tobytes()


def test_equal_chunks_of_many_ranks_are_one_run(tmp_path):
    full = torch.arange(24 * 7, dtype=torch.int32)
    source = store(tmp_path, full, Layout(shape=(24 * 7,), dtype="int32"), 24, by_index=True)
    (run,) = source.parts[()]
    assert run.count == 24
    assert [chunk.start for chunk in run.within(13, 22)] == [7, 14, 21]


def test_a_missing_run_is_noticed(tmp_path):
    full = torch.arange(24, dtype=torch.int32)
    layout = Layout(shape=(24,), dtype="int32", cuts=(Cut(dim=0, axis="tp", degree=2, size=24),))
    source = store(tmp_path, full, layout, runs=3)
    del source.parts[(("tp", 1),)][1]
    with pytest.raises(CheckpointError, match="does not contain all of 'w': the shard of tp 1"):
        source.check()


def test_overlapping_runs_are_noticed(tmp_path):
    source = store(tmp_path, torch.arange(24, dtype=torch.int32), Layout(shape=(24,), dtype="int32"), runs=3)
    source.parts[()].append(source.parts[()][0])
    with pytest.raises(CheckpointError, match="does not contain all of 'w'"):
        source.check()
