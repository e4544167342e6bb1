"""The lock of a save: who holds it, and when it is left over."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from neuron_accel.checkpoint.format.files import Files
from neuron_accel.checkpoint.state import lock as lock_module
from neuron_accel.checkpoint.state.lock import NAME, SaveLock, this_process
from neuron_accel.errors import CheckpointError
from neuron_accel.storage import location
from tests.object_store import contents_of, make_bucket, register

OTHER = {"host": "another", "pid": 7, "namespace": "", "token": "other"}


def taken(folder):
    """What is said if a save cannot have the lock; else it is released again."""
    lock = SaveLock(folder, Files())
    try:
        lock.acquire()
    except CheckpointError as error:
        return str(error)
    finally:
        lock.release()
    assert list(folder.iterdir()) == []
    return None


def cannot_lock(*_):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.fixture(params=["locked by the system", "not locked", "object store"])
def folder(request, tmp_path, monkeypatch):
    """A folder on each kind of file system."""
    monkeypatch.setattr(lock_module, "RENEW_S", 0.1)
    monkeypatch.setattr(lock_module, "WAIT_S", 0.5)
    if request.param == "not locked":
        monkeypatch.setattr(fcntl, "flock", cannot_lock)
    if request.param != "object store":
        yield tmp_path
        return
    register()
    yield location(f"{make_bucket(tmp_path)[1]}/c")
    register()


@pytest.fixture
def clock(monkeypatch):
    """The clock by which a lock waits: it advances when the lock sleeps, and waiting takes no time."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep, strftime=time.strftime, gmtime=time.gmtime)
    monkeypatch.setattr(lock_module, "time", fake)
    return now


def leave(folder, **changes):
    """Writes the mark of another process."""
    mark = json.dumps({**OTHER, **changes}).encode()
    path = folder / NAME
    path.write_bytes(mark) if hasattr(path, "write_bytes") else path.put(mark)


@contextmanager
def renewed(folder, **changes):
    """The mark of another machine, whose process lives."""
    over = threading.Event()

    def renew():
        number = 0
        while not over.wait(0.02):
            number += 1
            leave(folder, **changes, time=number)

    leave(folder, **changes)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def hold(folder, pipe):
    SaveLock(folder, Files()).acquire()
    pipe.send(True)
    time.sleep(60)


@contextmanager
def held(folder):
    """Another process of this machine, which holds the lock."""
    mine, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(folder, theirs))
    process.start()
    assert mine.recv()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def test_another_process_is_told_who_saves_until_that_one_is_gone(folder, monkeypatch):
    with held(folder) as process:
        assert f"process {process.pid} on {this_process()['host']} is saving into this folder" in taken(folder)
        assert (folder / NAME).exists()
        process.kill()
        process.join()
        assert (folder / NAME).exists()
        monkeypatch.setattr(lock_module, "WAIT_S", 1e6)  # beyond the time limit of a test
        assert taken(folder) is None


def test_on_one_machine_one_process_at_a_time_has_it_whatever_the_mark_says(tmp_path, monkeypatch, clock):
    """Not by its process id, which others get once it has ended, and not by the age of the mark."""
    leave(tmp_path, **this_process())
    assert taken(tmp_path) is None
    with held(tmp_path):
        os.utime(tmp_path / NAME, (1, 1))
        monkeypatch.setenv("NEURON_ACCEL_RUN", "this")
        (tmp_path / NAME).write_bytes(b"")
        assert "is saving into this folder" in taken(tmp_path)
    assert clock.seconds == 0.0


def test_a_child_that_outlives_the_process_that_saved_does_not_keep_the_lock(tmp_path):
    def save(pipe):
        SaveLock(tmp_path, Files()).acquire()
        if child := os.fork():
            pipe.send(child)
            os._exit(1)
        time.sleep(60)

    mine, theirs = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=save, args=(theirs,))
    process.start()
    child = mine.recv()
    process.join()
    try:
        assert taken(tmp_path) is None
    finally:
        os.kill(child, 9)


def test_the_mark_of_another_machine_that_is_renewed_is_respected(folder):
    with renewed(folder):
        assert "process 7 on another is saving into this folder" in taken(folder)
        assert (folder / NAME).exists()


def test_the_mark_of_another_machine_that_is_not_renewed_costs_a_wait(folder, clock):
    leave(folder)
    assert taken(folder) is None
    assert clock.seconds >= lock_module.WAIT_S


def test_a_file_server_that_keeps_the_lock_of_a_lost_machine_costs_the_same_wait(tmp_path, clock):
    with held(tmp_path):  # by another open file, which the system has locked
        leave(tmp_path)
        assert taken(tmp_path) is None
        assert clock.seconds >= lock_module.WAIT_S


def test_a_mark_that_is_removed_meanwhile_costs_no_wait(folder, monkeypatch, clock):
    leave(folder)
    states = SaveLock._state

    def removed(lock):  # after the first look
        found = states(lock)
        (folder / NAME).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(SaveLock, "_state", removed)
    assert taken(folder) is None
    assert clock.seconds < lock_module.WAIT_S


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}"])
def test_a_mark_that_names_nobody_is_left_over(tmp_path, content):
    (tmp_path / NAME).write_bytes(content)
    assert taken(tmp_path) is None


def test_the_mark_of_a_lost_machine_of_this_run_is_taken_over_at_once(folder, monkeypatch, clock):
    monkeypatch.setenv("NEURON_ACCEL_RUN", "this")
    leave(folder, run="this")
    assert taken(folder) is None
    assert clock.seconds == 0.0


def test_it_is_renewed_while_it_is_held_and_then_removed_by_the_one_who_made_it(folder):
    lock = SaveLock(folder, Files())
    lock.release()  # not acquired
    lock.acquire()
    before = lock._state()
    while lock._state() == before:  # for ever, if it is not renewed
        time.sleep(0.05)
    lock.confirm()
    SaveLock(folder, Files()).release()
    assert (folder / NAME).exists()
    leave(folder)
    with pytest.raises(CheckpointError, match="taken this folder over"):
        lock.confirm()
    time.sleep(0.3)
    lock.release()
    assert json.loads((folder / NAME).read_bytes()) == OTHER


def test_of_two_that_begin_in_the_same_instant_one_may_write_the_manifest(folder):
    """Neither has seen the other's mark."""
    locks = [SaveLock(folder, Files()) for _ in range(2)]
    for lock in locks:
        lock._write()
    with pytest.raises(CheckpointError, match="taken this folder over"):
        locks[0].confirm()
    locks[1].confirm()


def test_a_folder_is_being_saved_while_its_lock_is_held(folder):
    newest = folder / "manifest.json"
    newest.write_bytes(b"") if hasattr(newest, "write_bytes") else newest.put(b"")

    def is_held():
        return SaveLock(folder, Files()).is_held(newest)

    assert not is_held()
    with held(folder) as process:
        assert is_held()
        process.kill()
        process.join()
        assert not is_held()
    leave(folder)
    assert is_held()
    assert (folder / NAME).exists()
    time.sleep(2 * lock_module.WAIT_S + 0.1)
    newest.write_bytes(b"") if hasattr(newest, "write_bytes") else newest.put(b"")
    assert not is_held()


def test_the_lock_is_the_only_object_at_a_url(tmp_path):
    register()
    bucket, url = make_bucket(tmp_path)
    lock = SaveLock(location(f"{url}/c"), Files())
    lock.acquire()
    assert list(contents_of(bucket)) == [f"c/{NAME}"]
    lock.release()
    assert contents_of(bucket) == {}
