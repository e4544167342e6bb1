"""The lock of a save: who holds it, and when it is left over."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from urllib.parse import quote

import psutil
import pytest

from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.state import lock as lock_module
from neuron_accel.checkpoint.state.lock import (
    NAME,
    STALE_S,
    Lease,
    SaveLock,
    is_being_saved,
    is_this_process,
    lock_of,
    this_process,
)
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import location
from tests.object_store import contents_of, make_bucket, register


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


def test_the_lock_of_a_lost_machine_of_this_run_is_taken_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NEURON_ACCEL_RUN", "this")
    for run, others in (
        ("this", None),
        ("another", "is saving into this folder"),
        (None, "is saving into this folder"),
    ):
        (tmp_path / NAME).write_text(json.dumps({"host": "another", "pid": 1, "namespace": "", "run": run}))
        assert (others is None) is (taken(tmp_path) is None)


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


def test_a_folder_is_being_saved_while_its_lock_is_held(tmp_path):
    assert not is_being_saved(tmp_path)
    lock = lock_of(tmp_path, Files())
    assert isinstance(lock, SaveLock)
    lock.acquire()
    lock.confirm()
    assert is_being_saved(tmp_path)
    (tmp_path / NAME).write_text(json.dumps({"host": "another", "pid": 7, "namespace": ""}))
    assert is_being_saved(tmp_path)
    with pytest.raises(CheckpointError, match="taken this folder over"):
        lock.confirm()
    os.utime(tmp_path / NAME, (time.time() - STALE_S - 5,) * 2)
    assert not is_being_saved(tmp_path)
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


# ---- leases, at URLs -------------------------------------------------------------------------------------------------
@pytest.fixture
def bucket(tmp_path):
    register()
    folder, url = make_bucket(tmp_path)
    yield folder, location(f"{url}/c")
    register()


def lease_of(folder, **changes):
    """Writes the lease of another process."""
    path = folder / f".saving.{len(list(folder.iterdir()))}.json"
    path.put(json.dumps({**this_process(), "token": "other", **changes}).encode())
    return path


def age(bucket, path, seconds):
    when = time.time() - seconds
    os.utime(bucket / quote(f"c/{path.name}", safe=""), (when, when))


def test_a_lease_is_removed_when_it_is_released_and_confirmed_as_long_as_it_is_there(bucket):
    folder, url = bucket
    lease = lock_of(url, Files())
    assert isinstance(lease, Lease)
    lease.release()  # not acquired
    lease.acquire()
    assert len(contents_of(folder)) == 1
    assert is_being_saved(url)
    lease.confirm()
    next(iter(url.iterdir())).unlink()
    with pytest.raises(CheckpointError, match="taken this folder over"):
        lease.confirm()
    lease.release()
    assert contents_of(folder) == {}
    assert not is_being_saved(url)


def test_leases_of_processes_that_have_ended_are_removed_and_others_are_respected(bucket):
    folder, url = bucket
    other_host = {"host": "another", "pid": 7}
    gone = [lease_of(url, started=this_process()["started"] - 100), lease_of(url, **other_host)]
    age(folder, gone[1], STALE_S + 5)
    lease = lock_of(url, Files())
    lease.acquire()
    assert not any(path.exists() for path in gone)
    lease.release()
    for changes in ({}, other_host):
        fresh, lease = lease_of(url, **changes), lock_of(url, Files())
        with pytest.raises(CheckpointError, match="is saving into this folder"):
            lease.acquire()
        assert list(contents_of(folder)) == [f"c/{fresh.name}"]
        assert is_being_saved(url)
        assert not [name for name in contents_of(folder) if ".probe" in name]
        fresh.unlink()


def test_of_leases_that_are_acquired_at_the_same_time_one_at_most_is_held(bucket):
    _, url = bucket
    held, at_once, most, together = [], 0, 0, threading.Lock()

    def work():
        nonlocal at_once, most
        for _ in range(4):
            lease = lock_of(url, Files())
            try:
                lease.acquire()
            except CheckpointError:
                continue
            with together:
                at_once += 1
                most = max(most, at_once)
                held.append(lease)
            time.sleep(0.05)
            with together:
                at_once -= 1
            lease.release()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert held


def test_a_lease_is_renewed_but_not_made_again_after_another_run_has_removed_it(bucket, monkeypatch):
    folder, url = bucket
    monkeypatch.setattr(lock_module, "TOUCH_S", 0.05)
    lease = lock_of(url, Files())
    lease.acquire()
    age(folder, lease._path, STALE_S + 5)
    deadline = time.monotonic() + 10
    while time.time() - lease._path.stat().st_mtime_ns / 1e9 > 5:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lease._path.unlink()
    lease._thread.join(10)
    assert not lease._thread.is_alive()
    assert contents_of(folder) == {}
    with pytest.raises(CheckpointError, match="taken this folder over"):
        lease.confirm()
    lease.release()
