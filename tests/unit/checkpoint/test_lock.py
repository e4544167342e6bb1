"""The lock of a save: who holds it, and when it is left over."""

from __future__ import annotations

import json
import multiprocessing
import os
import time

import psutil
import pytest

from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.state import lock as lock_module
from neuron_accel.checkpoint.state.lock import NAME, STALE_S, SaveLock, is_this_process, this_process
from neuron_accel.errors import CheckpointError


def taken(folder):
    """Whether a save can have the lock; releases it again."""
    lock = SaveLock(folder, Files())
    try:
        lock.acquire()
    except CheckpointError as error:
        return str(error)
    lock.release()
    assert list(folder.iterdir()) == []
    return None


def hold(folder, pipe):
    SaveLock(folder, Files()).acquire()
    pipe.send(True)
    time.sleep(60)


def test_another_process_is_told_who_saves_until_that_one_is_gone(tmp_path):
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path, theirs))
    process.start()
    assert mine.recv()
    assert f"process {process.pid} on {this_process()['host']} is saving into this folder" in taken(tmp_path)
    assert (tmp_path / NAME).exists()
    process.kill()
    deadline = time.monotonic() + 10
    while taken(tmp_path):  # it is a zombie at the latest
        assert time.monotonic() < deadline
    process.join()


def test_a_process_that_has_the_id_of_a_dead_one_does_not_hold_its_lock(tmp_path):
    note = {**this_process(), "started": this_process()["started"] - 100}
    (tmp_path / NAME).write_text(json.dumps(note))
    assert taken(tmp_path) is None


def test_setting_the_clock_makes_no_other_process_of_this_one(tmp_path, monkeypatch):
    """psutil reads the time at which the machine was booted anew each time, and it moves with the clock."""
    before = this_process()
    (tmp_path / NAME).write_text(json.dumps(before))
    booted = psutil.boot_time()
    for module in (psutil, psutil._psplatform):
        monkeypatch.setattr(module, "boot_time", lambda: booted + 3600)
    assert is_this_process(before)
    assert "is saving into this folder" in taken(tmp_path)
    assert not is_this_process({**before, "started": before["started"] + 3600})


@pytest.mark.parametrize("content", ['{"host": "another", "pid": 1, "time": "now"}', "", "{", "[]", '{"pid": []}'])
def test_the_lock_of_another_machine_is_left_over_once_it_is_old(tmp_path, content):
    path = tmp_path / NAME
    path.write_text(content)
    assert "is saving into this folder" in taken(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    old = time.time() - STALE_S - 5
    os.utime(path, (old, old))
    assert taken(tmp_path) is None


def test_a_lock_is_touched_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "TOUCH_S", 0.02)
    lock = SaveLock(tmp_path, Files())
    lock.acquire()
    os.utime(tmp_path / NAME, (1, 1))
    deadline = time.monotonic() + 10
    while (tmp_path / NAME).stat().st_mtime < 1000:
        assert time.monotonic() < deadline
    lock.release()


def test_a_lock_that_was_made_anew_meanwhile_is_not_taken_away(tmp_path):
    new = json.dumps({"host": "another", "token": "new"})
    (tmp_path / NAME).write_text(new)
    SaveLock(tmp_path, Files())._take_away({"host": "another", "token": "old"})
    assert (tmp_path / NAME).read_text() == new
    assert len(list(tmp_path.iterdir())) == 1


def test_only_the_one_who_made_it_removes_it(tmp_path):
    lock = SaveLock(tmp_path, Files())
    lock.acquire()
    SaveLock(tmp_path, Files()).release()
    assert (tmp_path / NAME).exists()
    (tmp_path / NAME).write_text('{"token": "of another"}')
    lock.release()
    assert (tmp_path / NAME).exists()
