"""The compile cache on disk: listing entries, and evicting those that exceed a limit but none that is in use."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import importlib.util
import json
import multiprocessing
import os
import shlex
import threading
import time
import uuid

import fsspec
import pytest

from neuron_accel.cli.main import main
from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.neuron import cache_store
from neuron_accel.neuron.cache_remote import explained, remote_entries
from neuron_accel.neuron.cache_store import entries, open_folder, prune, register_job, running_jobs

NOW = time.time()
DAY = 86400.0


def make(folder, name, *, size=1000, days=1.0, compiler="2.24.5133", neff=True, lock=False):
    """An entry as the compiler's wrapper writes it, last used ``days`` ago."""
    path = folder / f"neuronxcc-{compiler}" / f"MODULE_{name}+4eb52b03"
    path.mkdir(parents=True, exist_ok=True)
    (path / "compile_flags.json").write_bytes(b"x" * 10)
    (path / "model.hlo_module.pb").write_bytes(b"x" * (size - 10 if not neff else 20))
    if neff:
        (path / "model.neff").write_bytes(b"x" * (size - 30))
        (path / "model.done").touch()
    if lock:
        (path / "model.hlo_module.pb.lock").touch()
    for file in path.iterdir():
        os.utime(file, (NOW - days * DAY, NOW - days * DAY))
    return path


def names(found):
    return [entry.name.partition("_")[2].partition("+")[0] for entry in found]


@pytest.fixture
def cache(tmp_path):
    """Five entries, e5 the least recently used, 1000 bytes each."""
    for days in range(1, 6):
        make(tmp_path, f"e{days}", days=days)
    return tmp_path


def test_what_is_there(cache):
    found = entries(cache)
    assert names(found) == ["e5", "e4", "e3", "e2", "e1"]
    assert {entry.size for entry in found} == {1000}
    assert {entry.compiler for entry in found} == {"2.24.5133"}
    assert {entry.state for entry in found} == {"done"}
    assert found[0].last_used == pytest.approx(NOW - 5 * DAY, abs=1)


def test_reading_counts_as_use(cache):
    neff = next(cache.glob("*/MODULE_e5+*")) / "model.neff"
    os.utime(neff, (NOW, neff.stat().st_mtime))  # what the file system does when somebody reads
    assert names(entries(cache))[-1] == "e5"


def test_states(tmp_path):
    make(tmp_path, "begun", neff=False, lock=True)
    failed = make(tmp_path, "failed", neff=False)
    (failed / "model.done").touch()
    assert {name: e.state for name, e in zip(names(entries(tmp_path)), entries(tmp_path), strict=True)} == {
        "begun": "incomplete",
        "failed": "failed",
    }


@pytest.mark.parametrize(
    ("limits", "gone"),
    [
        ({"max_bytes": 5000}, []),
        ({"max_bytes": 4999}, ["e5"]),
        ({"max_bytes": 2000}, ["e5", "e4", "e3"]),
        ({"max_bytes": 0}, ["e5", "e4", "e3", "e2", "e1"]),
        ({"ttl_seconds": 3.5 * DAY}, ["e5", "e4"]),
        ({"ttl_seconds": 9 * DAY}, []),
        ({"ttl_seconds": 4.5 * DAY, "max_bytes": 3000}, ["e5", "e4"]),
    ],
)
def test_least_recently_used_entries_go_first(cache, limits, gone):
    done = prune(cache, **limits, dry_run=True, now=NOW)
    assert names(e for e, _ in done.evicted) == gone
    assert len(entries(cache)) == 5
    done = prune(cache, **limits, now=NOW)
    assert names(e for e, _ in done.evicted) == gone
    assert done.left == 1000 * (5 - len(gone)) == sum(entry.size for entry in entries(cache))
    assert names(entries(cache)) == [name for name in ("e5", "e4", "e3", "e2", "e1") if name not in gone]


def hold(path, ready, how):
    with open(path, "a+b") as file:
        (fcntl.flock if how == "flock" else fcntl.lockf)(file, fcntl.LOCK_EX)
        ready.set()
        time.sleep(60)


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_a_locked_entry_stays_and_a_lock_left_behind_does_not_keep_it(cache, how):
    lock = make(cache, "e6", days=6, lock=True) / "model.hlo_module.pb.lock"
    ready = multiprocessing.Event()
    holder = multiprocessing.Process(target=hold, args=(lock, ready, how))
    holder.start()
    try:
        assert ready.wait(10)
        done = prune(cache, max_bytes=0)
        assert [(names([e])[0], why) for e, why in done.kept] == [("e6", "locked")]
        assert names(entries(cache)) == ["e6"]
    finally:
        holder.kill()
        holder.join()
    assert names(e for e, _ in prune(cache, max_bytes=0).evicted) == ["e6"]


def test_an_entry_that_is_being_compiled_stays(cache):
    make(cache, "begun", days=9, neff=False, lock=True)
    done = prune(cache, max_bytes=0)
    assert [(names([e])[0], why) for e, why in done.kept] == [("begun", "being compiled")]
    assert done.left == 1000


def test_an_open_entry_stays(cache):
    with next(cache.glob("*/MODULE_e5+*/model.neff")).open() as _:
        done = prune(cache, max_bytes=0)
    assert [(names([e])[0], why) for e, why in done.kept] == [("e5", "open")]
    assert names(entries(cache)) == ["e5"]


def job(folder, ready, entry):
    with register_job(folder):
        os.utime(entry)
        ready.set()
        time.sleep(60)


def test_what_a_running_job_has_used_stays(cache):
    ready = multiprocessing.Event()
    running = multiprocessing.Process(target=job, args=(cache, ready, next(cache.glob("*/MODULE_e5+*")) / "model.neff"))
    running.start()
    try:
        assert ready.wait(10)
        (known,) = running_jobs(cache)
        assert known["pid"] == running.pid
        done = prune(cache, max_bytes=0)
        ((entry, why),) = done.kept
        assert names([entry]) == ["e5"]
        assert f"process {running.pid}" in why
    finally:
        running.kill()  # without a word: the kernel lets go of its lock
        running.join()
    assert running_jobs(cache) == []
    assert names(e for e, _ in prune(cache, max_bytes=0).evicted) == ["e5"]


def test_a_job_leaves_nothing_behind(cache):
    with register_job(cache):
        assert len(running_jobs(cache)) == 1
    assert list((cache / ".neuron_accel" / "jobs").iterdir()) == []


def test_an_entry_that_is_used_between_the_decision_and_the_deed_stays(cache):
    decided = entries(cache)
    used = [decided[1], decided[3]]
    for entry in used:
        os.utime(entry.path / "model.neff")
    gone = cache_store._evict(decided, cache)
    assert gone == {decided[0], decided[2], decided[4]}
    assert {entry.path for entry in entries(cache)} == {entry.path for entry in used}
    assert all((entry.path / "model.neff").stat().st_size == 970 for entry in used)


def test_an_entry_that_is_just_begun_stays(cache):
    """A job creates the folder before its lock."""
    begun = cache / "neuronxcc-2.24.5133" / "MODULE_new+4eb52b03"
    begun.mkdir()
    done = prune(cache, max_bytes=0)
    assert [(names([entry]), why) for entry, why in done.kept] == []  # nothing in it: no limit concerns it
    (begun / "model.hlo_module.pb").write_bytes(b"x" * 20)
    ((entry, why),) = prune(cache, max_bytes=0).kept
    assert (names([entry]), why) == (["new"], "just created")
    assert begun.exists()


def test_others_go_in_the_place_of_what_has_to_stay(cache):
    with next(cache.glob("*/MODULE_e5+*/model.neff")).open() as _:
        done = prune(cache, max_bytes=3000)
    assert names(entry for entry, _ in done.kept) == ["e5"]
    assert names(entry for entry, _ in done.evicted) == ["e4", "e3"]
    assert names(entries(cache)) == ["e5", "e2", "e1"]
    assert done.left == 3000


def test_two_evictions_do_not_meet(cache):
    with cache_store._alone(cache), pytest.raises(UsageError, match="running"):
        prune(cache, max_bytes=0)


def test_what_an_interrupted_eviction_left_is_taken_away(cache):
    left = cache / ".neuron_accel" / "trash" / "MODULE_x"
    left.mkdir(parents=True)
    prune(cache, max_bytes=10**9)
    assert not left.exists()
    assert len(entries(cache)) == 5


def write_as_a_job_does(folder, name, days):
    """An entry as the compiler's wrapper writes one: the folder, its lock, and the rest while the lock is held."""
    path = folder / "neuronxcc-2.24.5133" / f"MODULE_{name}+4eb52b03"
    path.mkdir(parents=True, exist_ok=True)
    with (path / "model.hlo_module.pb.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(folder, name, days=days)
    return path / "model.neff"


def test_evicting_beside_jobs_that_read_and_write(tmp_path):
    """While entries are evicted, writers are not disturbed, and readers see a complete entry or none."""
    stop, broken, written = threading.Event(), [], []

    def work(number):
        for count in range(1, 10**6):
            if stop.is_set():
                return
            try:
                neff = write_as_a_job_does(tmp_path, f"w{number}n{count}", days=count)
                written.append(neff)
                with contextlib.suppress(FileNotFoundError), neff.open("rb") as file:  # evicted before it is opened
                    if len(file.read()) != 970:
                        broken.append(neff)
            except OSError as error:
                broken.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for worker in workers:
        worker.start()
    evicted = 0
    try:
        while evicted < 30 and not broken:
            evicted += len(prune(tmp_path, max_bytes=3000).evicted)
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert broken == []
    assert len(entries(tmp_path)) == len(written) - evicted


def test_the_command_lists_counts_and_prunes(cache, capsys, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--cache_dir={cache}")
    make(cache, "old", compiler="2.23.6484", days=40)
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["MODULE_old+4eb52b03", "2.23.6484", "1000", "B"]
    assert "40 d ago" in lines[2]
    assert main(["cache", "stats"]) == 0
    assert "6 (6 done, 0 failed, 0 incomplete)" in capsys.readouterr().out
    assert main(["cache", "stats", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["compilers"]["2.23.6484"] == {"entries": 1, "bytes": 1000}
    assert main(["cache", "prune", "--ttl", "30d", "--dry-run"]) == 0
    assert "1 entries, 1000 B would be evicted; 4.9 KiB remain" in capsys.readouterr().out
    assert main(["cache", "prune", "--ttl", "30d", "--max-size", "3kB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["entry"][7:9], row["reason"]) for row in report["evicted"]] == [
        ("ol", "ttl"),
        ("e5", "size"),
        ("e4", "size"),
    ]
    assert report["bytes_left"] == 3000
    assert list((cache / "neuronxcc-2.23.6484").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["list", "--cache-dir", "/nowhere/at/all"], "no compile cache in /nowhere/at/all"),
        (["list", "--cache-dir", ""], "no compile cache in"),
        (["list", "--cache-dir", "/tmp/" + "x" * 300], "no compile cache in /tmp/xxx"),
        (["list", "--cache-dir", "s3://B"], "not a valid S3 address"),
        (["prune", "--ttl", "3d", "--cache-dir", "s3://B"], "not a valid S3 address"),
        (["prune", "--ttl", "3d", "--cache-dir", "memory://cache"], "lifecycle rule"),
        (["list", "--cache-dir", "nosuch://bucket"], "Protocol not known: nosuch"),
        (["list", "--cache-dir", "memory://nowhere"], "no compile cache at memory://nowhere"),
        (["prune"], "prune needs a limit"),
        (["prune", "--ttl", "soon"], "not a duration"),
        (["list", "--ttl", "3d"], "--ttl has no effect here"),
    ],
)
def test_what_the_command_refuses(cache, capsys, monkeypatch, arguments, words):
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(cache))
    assert main(["cache", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_cache_that_may_not_be_changed(cache, monkeypatch):
    (cache / ".neuron_accel").write_text("a file where a folder has to be")
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        prune(cache, max_bytes=0)
    with register_job(cache):
        assert running_jobs(cache) == []
    assert open_folder(str(cache)) == cache


# ---- at an address ---------------------------------------------------------------------------------------------------
@pytest.fixture
def remote():
    """The URL of a cache in memory, as on S3, with three entries written one after the other."""
    store, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}/cache"
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    objects = {
        "neuronxcc-2.23.6484/MODULE_failed+1/model.hlo_module.pb": 20,
        "neuronxcc-2.23.6484/MODULE_failed+1/model.done": 0,
        "neuronxcc-2.24.5133/MODULE_done+1/model.neff": 900,
        "neuronxcc-2.24.5133/MODULE_done+1/compile_flags.json": 100,
        "neuronxcc-2.24.5133/MODULE_done+1/model.done": 0,
        "neuronxcc-2.24.5133/MODULE_begun+1/model.hlo_module.pb": 30,
        "neuronxcc-2.24.5133/MODULE_begun+1/model.hlo_module.pb.lock": 1,
        "neuronxcc-2.24.5133/MODULE_locked+1/model.hlo_module.pb.lock": 1,
        "neuronxcc-2.24.5133/notes.txt": 5,
        "datasets/large": 10**6,
    }
    for day, (name, size) in enumerate(objects.items()):
        store.pipe(f"{root}/{name}", b"x" * size)
        store.store[f"{root}/{name}"].modified = begin + datetime.timedelta(days=day)
    yield f"memory:/{root}"
    store.rm(root.rpartition("/")[0], recursive=True)


def test_what_is_at_an_address(remote, capsys):
    found = remote_entries(remote)
    assert [(entry.name, entry.state, entry.size, entry.compiler) for entry in found] == [
        ("MODULE_failed+1", "failed", 20, "2.23.6484"),
        ("MODULE_done+1", "done", 1000, "2.24.5133"),
        ("MODULE_begun+1", "incomplete", 30, "2.24.5133"),
    ]
    assert found[1].last_written == datetime.datetime(2026, 1, 5, tzinfo=datetime.timezone.utc).timestamp()
    assert main(["cache", "list", "--cache-dir", remote]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["entry", "compiler", "size", "written", "state"]
    assert lines[3].split()[:3] == ["MODULE_done+1", "2.24.5133", "1000"]
    assert main(["cache", "list", "--cache-dir", remote, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)[0]
    assert (row["entry"], row["bytes"], row["last_written"]) == ("MODULE_failed+1", 20, found[0].last_written)
    assert row["path"].endswith("/cache/neuronxcc-2.23.6484/MODULE_failed+1")


def test_what_an_address_holds_in_all(remote, capsys):
    assert main(["cache", "stats", "--cache-dir", f"{remote}/"]) == 0
    text = capsys.readouterr().out
    assert "3 (1 done, 1 failed, 1 incomplete)" in text
    assert "1.0 KiB" in text
    assert main(["cache", "stats", "--cache-dir", remote, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compilers"]["2.24.5133"] == {"entries": 2, "bytes": 1030}
    assert report["address"] == remote


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError("The specified bucket does not exist"), "There is no compile cache at s3://models/cache"),
        (PermissionError("Access Denied"), "was denied: Access Denied"),
        (RuntimeError("Unable to locate credentials"), "cannot be read: Unable to locate credentials"),
        (ConnectionError(), "cannot be read: no reason given"),
    ],
)
def test_why_an_address_cannot_be_read(error, words):
    with pytest.raises(ConfigurationError, match=words) as caught, explained("s3://models/cache"):
        raise error
    assert caught.value.where
    assert caught.value.why
    assert isinstance(error, FileNotFoundError) or "s3:ListBucket" in caught.value.fix


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is not None, reason="s3fs is installed")
def test_what_reads_s3_is_named_where_it_is_missing(capsys):
    assert main(["cache", "list", "--cache-dir", "s3://models/cache"]) == 2
    assert "pip install 'neuron-accel[s3]'" in capsys.readouterr().err


def test_a_cache_on_s3_is_left_to_its_own_rules(capsys, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", "--cache_dir=s3://models/neuron/cache/")
    assert main(["cache", "prune", "--ttl", "36h"]) == 2
    error = capsys.readouterr().err
    assert "not when they were last read" in error
    command = shlex.split(next(line for line in error.splitlines() if "put-bucket-lifecycle" in line))
    assert command[command.index("--bucket") + 1] == "models"
    (rule,) = json.loads(command[-1])["Rules"]
    assert rule["Filter"] == {"Prefix": "neuron/cache/neuronxcc-"}
    assert rule["Expiration"] == {"Days": 2}
    assert "replaces all rules" in error
