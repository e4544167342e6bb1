"""Folders of pickled weights: tensors are read in slices, and no code in a pickle is run."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_accel.checkpoint.format.index import index_pretrained, is_pretrained
from neuron_accel.checkpoint.format.pickled import is_mapped, read_pickled
from neuron_accel.checkpoint.format.ranges import FileRanges
from neuron_accel.checkpoint.format.source import words
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.errors import CheckpointError

WEIGHTS = {
    "a": torch.arange(24, dtype=torch.float32).reshape(6, 4),
    "turned": torch.arange(24, dtype=torch.float32).reshape(4, 6).t(),
    "part": torch.arange(100, dtype=torch.bfloat16)[10:34].reshape(6, 4),
    "scalar": torch.tensor(3, dtype=torch.int64),
}


def rows(tensor, index):
    """Returns the half of a tensor's rows that one of two ranks reads."""
    layout = Layout(
        shape=tensor.layout.shape, dtype=tensor.layout.dtype, cuts=(Cut(dim=0, axis="tp", degree=2, size=6),)
    )
    out = np.zeros(12, dtype=words(tensor.item_size))
    tensor.check()
    with FileRanges() as files:
        tensor.read(files, layout, {"tp": index}, out)
    return out


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_slices_of_pickled_weights(tmp_path, zipped):
    torch.save(WEIGHTS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert is_pretrained(tmp_path)
    index = index_pretrained(tmp_path)
    for name in ("a", "turned", "part"):
        expected = WEIGHTS[name].contiguous()[3:]
        found = rows(index.find("model.0", (name,)), 1)
        assert found.tobytes() == expected.reshape(-1).view(torch.uint8).numpy().tobytes(), name
    assert index.find("model.0", ("scalar",)).layout.shape == ()


def test_reading_a_slice_takes_no_memory_for_the_rest(tmp_path):
    """The file is memory-mapped: reading a small slice of a large tensor does not copy the tensor."""
    torch.save({"big": torch.zeros(6, 1 << 20)}, tmp_path / "pytorch_model.bin")
    value = read_pickled(tmp_path / "pytorch_model.bin")["big"]
    address = value.data_ptr()
    ranges = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = [fields for fields in ranges if fields[-1].endswith("pytorch_model.bin")]
    assert any(int(low, 16) <= address < int(high, 16) for low, high in (f[0].split("-") for f in mapped))


def test_an_index_of_several_files(tmp_path):
    names = {"a": "pytorch_model-00001-of-00002.bin", "turned": "pytorch_model-00002-of-00002.bin"}
    for name, file in names.items():
        torch.save({name: WEIGHTS[name]}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    index = index_pretrained(tmp_path)
    assert set(index.collections["model.0"]) == {"a", "turned"}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere.bin"}}))
    with pytest.raises(CheckpointError, match="names a file in another folder"):
        index_pretrained(tmp_path)


class Touch:
    """An object whose unpickling creates a file, as malicious code would."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, zipped):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": WEIGHTS["a"], "x": Touch(str(tmp_path / "run"))}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="contains more than tensors") as caught:
        index_pretrained(tmp_path)
    assert str(path) in str(caught.value)
    assert "save_pretrained" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("contents", "match"),
    [
        (WEIGHTS["a"], "contains a Tensor"),
        ({"a": 1}, "'a' in it is a int"),
        ({1: WEIGHTS["a"]}, "1 in it"),
        ({"a": WEIGHTS["a"].to_sparse()}, "not a dense tensor"),
    ],
)
def test_what_is_no_weights_by_name(tmp_path, contents, match):
    torch.save(contents, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=match):
        index_pretrained(tmp_path)


def test_compressed_records_are_refused(tmp_path):
    """Memory-mapped, the compressed bytes would be taken for weights."""
    torch.save(WEIGHTS, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as plain,
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for record in plain.infolist():
            packed.writestr(record.filename, plain.read(record))
    with pytest.raises(CheckpointError, match="compressed"):
        index_pretrained(tmp_path)


def test_an_archive_of_several_disks_is_damaged(tmp_path):
    """Looking whether it is an archive already raises an error of zipfile."""
    path = tmp_path / "pytorch_model.bin"
    torch.save(WEIGHTS, path)
    contents = bytearray(path.read_bytes())
    disks = contents.rindex(b"PK\x06\x07") + 16
    contents[disks : disks + 4] = (2).to_bytes(4, "little")
    path.write_bytes(contents)
    assert not is_mapped(path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        index_pretrained(tmp_path)


def outcome(function, *arguments):
    """Returns what a function returns, or the CheckpointError that it raises."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        return error


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_an_error_or_tensors(tmp_path_factory, zipped, data):
    path = tmp_path_factory.mktemp("fuzz") / "pytorch_model.bin"
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=zipped)
    contents = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        contents[data.draw(st.integers(0, len(contents) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(contents[: data.draw(st.integers(len(contents) - 40, len(contents)))])
    found = outcome(read_pickled, path)
    if isinstance(found, CheckpointError):
        assert str(path) in str(found)
    else:
        assert all(isinstance(value, torch.Tensor) for value in found.values())
