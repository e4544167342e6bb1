"""The files of a checkpoint: the safetensors format and the manifest, and the errors of damaged files."""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuron_accel.checkpoint.format.files import Files, Written, checksums_of, map_range
from neuron_accel.checkpoint.format.index import Index
from neuron_accel.checkpoint.format.manifest import (
    NAME,
    FileEntry,
    Manifest,
    check_file,
    has_manifest,
    latest,
    locate,
    read_manifest,
)
from neuron_accel.checkpoint.format.tensorfile import read_header
from neuron_accel.checkpoint.state.save import prune
from neuron_accel.checkpoint.state.snapshot import bytes_of, tensors_header
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.errors import CheckpointError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "scalar": torch.tensor(7.0),
    "empty": torch.empty(0, 4),
    "flag": torch.tensor([True, False]),
}


def write(path, tensors, metadata=None):
    header = tensors_header(tensors.items(), metadata or {})
    Files().write(path, [header, *(bytes_of(t) for t in tensors.values())])


def outcome(function, *arguments):
    """Returns what a function returns, or the CheckpointError that it raises."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        return error


def test_others_read_what_we_write(tmp_path):
    write(tmp_path / "x", TENSORS, {"format": "pt"})
    found = safetensors.torch.load_file(tmp_path / "x")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in TENSORS.items())


def test_we_read_what_others_write(tmp_path):
    safetensors.torch.save_file(TENSORS, tmp_path / "x", {"format": "pt"})
    header = read_header(tmp_path / "x")
    assert header.metadata == {"format": "pt"}
    data = (tmp_path / "x").read_bytes()
    for name, value in TENSORS.items():
        stored = header.tensors[name]
        assert (stored.shape, stored.dtype) == (tuple(value.shape), str(value.dtype).removeprefix("torch."))
        assert data[stored.offset : stored.offset + stored.nbytes] == bytes(bytes_of(value))


def test_tensors_begin_at_a_cache_line():
    for keys in range(1, 20):
        header = tensors_header([("k" * keys, torch.ones(3))], {})
        assert len(header) % 64 == 0


@pytest.mark.parametrize("advice", [None, 9999], ids=["mapped", "copied"])
def test_a_range_of_a_file_in_memory(tmp_path, advice, monkeypatch):
    if advice is not None:  # as on a kernel that does not know the advice
        monkeypatch.setattr("neuron_accel.checkpoint.format.files._POPULATE_READ", advice)
    contents = os.urandom(3 * mmap.ALLOCATIONGRANULARITY + 5)
    (tmp_path / "f").write_bytes(contents)
    size = 2 * mmap.ALLOCATIONGRANULARITY
    with open(tmp_path / "f", "rb") as file:
        found = map_range(file.fileno(), mmap.ALLOCATIONGRANULARITY, size + 5, access=mmap.ACCESS_COPY)
        assert found[:] == contents[-size - 5 :]
        found[0] ^= 1
        with pytest.raises(EOFError):
            map_range(file.fileno(), mmap.ALLOCATIONGRANULARITY, size + 6)
    assert (tmp_path / "f").read_bytes() == contents


def test_written_files_are_checksummed(tmp_path):
    written = Files().write(tmp_path / "x", [b"one", memoryview(b"two")])
    assert written.size == 6
    assert written.checksums == checksums_of(b"onetwo")


def test_every_block_of_a_file_has_a_checksum(tmp_path, monkeypatch):
    """For any sizes of the writes, and for any damaged block."""
    monkeypatch.setattr("neuron_accel.checkpoint.format.files.BLOCK", 4)
    monkeypatch.setattr("neuron_accel.checkpoint.format.files._CHUNK", 3)
    data = bytes(range(14))
    for parts in ([data], [data[:5], data[5:]], [data[i : i + 1] for i in range(14)], [b"", data, b""]):
        (tmp_path / "x").unlink(missing_ok=True)  # no file is written over
        written = Files().write(tmp_path / "x", parts)
        assert written == Written(14, checksums_of(data))
    assert len(written.checksums) == 4
    assert Files().write(tmp_path / "empty", []) == Written(0, ())
    entry = FileEntry(size=14, checksums=written.checksums, kind="model")
    check_file(tmp_path, "x", entry)
    for place in range(14):
        (tmp_path / "x").write_bytes(data[:place] + b"z" + data[place + 1 :])
        with pytest.raises(CheckpointError, match="checksum does not match"):
            check_file(tmp_path, "x", entry)


def test_a_manifest_with_too_few_checksums_is_refused():
    """Otherwise the rest of a file would not be verified."""
    forged = Manifest(files={"a": FileEntry(size=1, checksums=(), kind="model")}).to_bytes()
    with pytest.raises(CheckpointError, match="number of a file's checksums"):
        Manifest.from_bytes(forged, "here")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_an_error_or_harmless(tmp_path_factory, data):
    """Random bytes in the header give a CheckpointError or offsets inside the file."""
    path = tmp_path_factory.mktemp("fuzz") / "x"
    write(path, TENSORS)
    contents = bytearray(path.read_bytes())
    length = 8 + struct.unpack("<Q", contents[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(contents)
    header = outcome(read_header, path)
    if isinstance(header, CheckpointError):
        assert str(path) in str(header)
        return
    for stored in header.tensors.values():
        assert 0 <= stored.offset <= stored.offset + stored.nbytes <= len(contents)


@settings(max_examples=200, deadline=None)
@given(text=st.binary(max_size=200))
@example(text=b"[" * 100_000)
@example(text=b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}')
@example(text=b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}')
@example(text=b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}')
@example(
    text=b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
)
@example(text=b'{"__metadata__":{"x":1}}')
@example(text=b'{"__metadata__":[]}')
@example(text=b"null")
def test_any_header_is_an_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("fuzz") / "x"
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"data")
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_header(path)


@pytest.mark.parametrize("contents", [b"", b"1234567", struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_impossible_lengths(tmp_path, contents):
    (tmp_path / "x").write_bytes(contents)
    with pytest.raises(CheckpointError, match="header is impossible"):
        read_header(tmp_path / "x")


DESCRIPTION = {
    "collection": "model.0",
    "name": "a",
    "layout": Layout(shape=(2, 3), dtype="float32", cuts=(Cut(dim=0, axis="tp", degree=2, size=2),)).to_dict(),
    "at": {"tp": 1},
    "range": [0, 3],
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def places_in(value, path=()):
    """Yields the path of every value in a nested description."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(inner, (*path, key))


def value_at(value, path):
    return value_at(value[path[0]], path[1:]) if path else value


def changed(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new)
    return copy


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_file_that_describes_its_tensors_wrongly_is_an_error_or_read_within_bounds(tmp_path_factory, data):
    """Valid JSON with matching checksums, as an attacker could write it."""
    path = tmp_path_factory.mktemp("fuzz") / "x"
    described = {"version": 1, "tensors": {"a": DESCRIPTION}}
    place = data.draw(st.sampled_from(list(places_in(described))))
    metadata = {"neuron_accel": json.dumps(changed(described, place, data.draw(json_values)))}
    write(path, {"a": torch.arange(3, dtype=torch.float32)}, metadata)
    index = Index()
    if isinstance(error := outcome(index.add, path, read_header(path)), CheckpointError):
        assert str(path) in str(error)
        return
    for tensors in index.collections.values():
        for tensor in tensors.values():
            outcome(tensor.check)
            for chunk in (c for chunks in tensor.parts.values() for c in chunks):
                assert 0 <= chunk.offset <= chunk.offset + 4 * (chunk.stop - chunk.start) <= path.stat().st_size


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1.0, "1", None], ids=repr)
def test_a_value_that_is_not_an_integer_is_refused_in_every_integer_field(tmp_path, number):
    path = tmp_path / "x"
    described = {"version": 1, "tensors": {"a": DESCRIPTION}}
    places = [place for place in places_in(described) if type(value_at(described, place)) is int and len(place) > 1]
    assert len(places) >= 10
    for place in places:
        metadata = {"neuron_accel": json.dumps(changed(described, place, number))}
        path.unlink(missing_ok=True)
        write(path, {"a": torch.arange(3, dtype=torch.float32)}, metadata)
        assert isinstance(outcome(Index().add, path, read_header(path)), CheckpointError), place


# ---- manifest --------------------------------------------------------------------------------------------------------
def manifest(folder, **files):
    entries = {}
    for name, contents in files.items():
        written = Files().write(folder / name, [contents])
        entries[name] = FileEntry(size=written.size, checksums=written.checksums, kind="model")
    made = Manifest(files=entries, generation=2, info={"mesh": []})
    Files().replace(folder / NAME, made.to_bytes())
    return made


def test_a_manifest_comes_back(tmp_path):
    made = manifest(tmp_path, a=b"1", b=b"22")
    assert read_manifest(tmp_path) == made
    assert not list(tmp_path.glob(".*"))


def test_every_changed_byte_of_a_manifest_is_noticed_or_means_nothing(tmp_path):
    made = manifest(tmp_path, a=b"1", b=b"22")
    contents = (tmp_path / NAME).read_bytes()
    noticed = 0
    for position in range(len(contents)):
        for bit in (0, 3, 7):
            damaged = bytearray(contents)
            damaged[position] ^= 1 << bit
            try:
                assert Manifest.from_bytes(bytes(damaged), "here") == made  # white space
            except CheckpointError:
                noticed += 1
    assert noticed > 2 * len(contents)


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", "a\\b", "a//b", "./a", "a\0b"])
def test_paths_that_leave_the_folder_are_refused(path):
    forged = Manifest(files={path: FileEntry(size=1, checksums=("0",), kind="model")}).to_bytes()
    with pytest.raises(CheckpointError, match="is not one of a file in the folder"):
        Manifest.from_bytes(forged, "here")


def test_links_that_leave_the_folder_are_refused(tmp_path):
    (tmp_path / "outside").write_bytes(b"1")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "a").symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="outside of the folder"):
        locate(tmp_path / "inside", "a")


@pytest.mark.parametrize(
    ("contents", "message"), [(None, "'a' is missing"), (b"1", "has 1 bytes"), (b"xy", "checksum does not match")]
)
def test_a_changed_file_is_named(tmp_path, contents, message):
    made = manifest(tmp_path, a=b"12")
    (tmp_path / "a").unlink()
    if contents is not None:
        (tmp_path / "a").write_bytes(contents)
    with pytest.raises(CheckpointError, match=message) as caught:
        check_file(tmp_path, "a", made.files["a"])
    assert str(tmp_path / "a") in str(caught.value)


def test_another_version_is_refused(tmp_path):
    body = json.loads(Manifest(files={}).to_bytes())
    body["version"] = 99
    with pytest.raises(CheckpointError, match="checksum"):
        Manifest.from_bytes(json.dumps(body).encode(), "here")


def test_a_folder_without_manifest_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path)


# ---- retention -------------------------------------------------------------------------------------------------------
def numbered(folder, *complete, unfinished=()):
    for number in (*complete, *unfinished):
        (folder / f"checkpoint_{number}").mkdir()
    for number in complete:
        manifest(folder / f"checkpoint_{number}", a=b"1")


def test_a_failing_file_system_is_not_taken_for_one_without_a_manifest(tmp_path, monkeypatch):
    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    assert not has_manifest(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stale)
        with pytest.raises(OSError, match="Stale"):
            has_manifest(tmp_path)


def test_the_latest_is_the_newest_complete_one(tmp_path):
    assert latest(tmp_path / "nothing") is None
    numbered(tmp_path, 2, 9, 10, unfinished=[11])
    assert latest(tmp_path).name == "checkpoint_10"
    (tmp_path / "checkpoint_10" / NAME).write_bytes(b"{}")
    assert latest(tmp_path).name == "checkpoint_9"


def test_pruning_keeps_the_newest_and_what_is_not_ours(tmp_path):
    numbered(tmp_path, 1, 2, 10, unfinished=[3, 11])
    (tmp_path / "checkpoint_old").mkdir()
    prune(tmp_path, 2, Files())
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint_2", "checkpoint_10", "checkpoint_11", "checkpoint_old"}


def test_pruning_removes_the_manifest_first(tmp_path):
    numbered(tmp_path, 1, 2)

    class Crash(BaseException):
        pass

    class Crashing(Files):
        def operation(self, name, path):
            if name == "remove" and path.name == "checkpoint_1":
                raise Crash

    with pytest.raises(Crash):
        prune(tmp_path, 1, Crashing())
    assert latest(tmp_path).name == "checkpoint_2"
    assert not (tmp_path / "checkpoint_1" / NAME).exists()
