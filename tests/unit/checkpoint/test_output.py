"""The folder that consolidate writes: what is removed after an interruption, and what is not."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import save_file

from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.format.index import UNFINISHED, index_pretrained
from neuron_accel.checkpoint.state.lock import NAME as LOCK
from neuron_accel.checkpoint.state.lock import SaveLock
from neuron_accel.checkpoint.tools.consolidate import _write_beside
from neuron_accel.checkpoint.tools.output import Output
from neuron_accel.errors import CheckpointError


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write(folder, *files, fails=False):
    with Output(folder, Files()) as output:
        output.announce(files)
        for name in files:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("new")
        assert set(names(folder)) >= {UNFINISHED, LOCK, *files}
        if fails:
            raise ValueError


def left(folder, *files, listed=None):
    """What a process that was killed leaves."""
    folder.mkdir(exist_ok=True)
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("left")
    (folder / UNFINISHED).write_text(json.dumps(list(files)) if listed is None else listed)


def test_a_folder_that_is_complete_has_neither_list_nor_lock(tmp_path):
    write(tmp_path / "out", "a", "b/c")
    assert names(tmp_path / "out") == ["a", "b/c"]


def test_what_was_written_before_a_failure_is_removed_and_the_folder_if_it_is_new(tmp_path):
    with pytest.raises(ValueError):
        write(tmp_path / "out", "a", "b/c", fails=True)
    assert not (tmp_path / "out").exists()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("mine")
    with pytest.raises(ValueError):
        write(tmp_path / "own", "a", "config.json", fails=True)
    assert names(tmp_path / "own") == ["config.json"]


def test_a_configuration_that_is_there_is_replaced(tmp_path):
    source, output = tmp_path / "source", tmp_path / "out"
    source.write_text("new")
    output.mkdir()
    (output / "config.json").write_text("old")
    _write_beside({"config.json": source, "inside/tokenizer.json": source}, output, Files())
    assert {name: (output / name).read_text() for name in names(output)} == {
        "config.json": "new",
        "inside/tokenizer.json": "new",
    }


def test_what_an_interrupted_run_has_left_is_removed_and_nothing_else(tmp_path):
    left(tmp_path, "a", "b/c")
    for name in ("mine", "b/mine", ".a.tensors", "b/.c.new", f".{UNFINISHED}.new"):
        (tmp_path / name).write_text("")
    with Output(tmp_path, Files()):
        assert names(tmp_path) == sorted([LOCK, "b/mine", "mine"])
    assert names(tmp_path) == ["b/mine", "mine"]


@pytest.mark.parametrize("listed", ["", "{}", "[1]", '["../x"]', '["/x"]', '["a/../../x"]', '["a"'])
def test_a_list_that_is_damaged_or_leads_outside_is_an_error_and_removes_nothing(tmp_path, listed):
    (tmp_path / "x").write_text("")
    left(tmp_path / "out", "a", listed=listed)
    with pytest.raises(CheckpointError, match="is damaged"), Output(tmp_path / "out", Files()):
        pass
    assert (tmp_path / "x").exists()
    assert names(tmp_path / "out") == [UNFINISHED, "a"]


def test_a_second_process_that_writes_the_folder_is_told(tmp_path):
    child = os.fork()
    if child == 0:
        SaveLock(tmp_path, Files()).acquire()
        time.sleep(60)
        os._exit(0)
    try:
        while not (tmp_path / LOCK).exists():
            time.sleep(0.01)
        time.sleep(0.1)  # it has been written
        with pytest.raises(CheckpointError, match=f"process {child} on .* is saving into this folder"):
            write(tmp_path, "a")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    write(tmp_path, "a")
    assert names(tmp_path) == ["a"]


def test_weights_that_are_being_written_are_not_loaded(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    assert index_pretrained(tmp_path).collections
    (tmp_path / UNFINISHED).write_text('["model.safetensors"]')
    with pytest.raises(CheckpointError, match="The folder is incomplete"):
        index_pretrained(tmp_path)
