"""The compile cache on disk: listing entries, and evicting those that exceed a limit but none that is in use."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shlex
import threading
import time

import pytest

from neuron_accel.cli.main import main
from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron.cache import entries, prune

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
    for number in range(1, 6):
        make(tmp_path, f"e{number}", days=number + 1)
    return tmp_path


def test_what_is_there(cache):
    found = entries(cache)
    assert names(found) == ["e5", "e4", "e3", "e2", "e1"]
    assert {entry.size for entry in found} == {1000}
    assert {entry.compiler for entry in found} == {"2.24.5133"}
    assert {entry.state for entry in found} == {"done"}
    assert found[0].last_used == pytest.approx(NOW - 6 * DAY, abs=1)


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
        ({"ttl_seconds": 4.5 * DAY}, ["e5", "e4"]),
        ({"ttl_seconds": 9 * DAY}, []),
        ({"ttl_seconds": 5.5 * DAY, "max_bytes": 3000}, ["e5", "e4"]),
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
    lock = make(cache, "e6", days=7, lock=True) / "model.hlo_module.pb.lock"
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


def test_what_a_job_may_be_using_stays_and_others_go_in_its_place(cache):
    for name in ("e5", "e3"):
        neff = next(cache.glob(f"*/MODULE_{name}+*")) / "model.neff"
        os.utime(neff, (NOW - 0.5 * DAY, neff.stat().st_mtime))
    done = prune(cache, max_bytes=1000)
    assert names(entry for entry, _ in done.evicted) == ["e4", "e2", "e1"]
    assert {(names([entry])[0], why) for entry, why in done.kept} == {(n, "used within a day") for n in ("e5", "e3")}
    assert done.left == 2000
    assert {*names(entries(cache))} == {"e5", "e3"}


def test_an_eviction_that_another_one_has_made_is_no_error(cache, monkeypatch):
    found = entries(cache)
    prune(cache, max_bytes=2000)
    monkeypatch.setattr("neuron_accel.neuron.cache.entries", lambda folder: found)
    assert names(entry for entry, _ in prune(cache, max_bytes=2000).evicted) == ["e5", "e4", "e3"]
    assert len(list(cache.glob("*/*"))) == 2


def write_as_a_job_does(folder, name, days):
    """An entry as the compiler's wrapper writes one: the folder, its lock, and the rest while the lock is held."""
    path = folder / "neuronxcc-2.24.5133" / f"MODULE_{name}+4eb52b03"
    path.mkdir(parents=True, exist_ok=True)
    with (path / "model.hlo_module.pb.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(folder, name, days=days + 1)
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
                with contextlib.suppress(FileNotFoundError):  # evicted before it is opened
                    age = neff.stat().st_mtime
                    if len(neff.read_bytes()) != 970:
                        broken.append(neff)
                    os.utime(neff, (age, age))  # as if it had been read long ago
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


def test_the_command_lists_and_prunes(cache, capsys, monkeypatch):
    monkeypatch.setenv("NEURON_CC_FLAGS", f"--cache_dir={shlex.quote(str(cache))}")
    make(cache, "old", compiler="2.23.6484", days=40)
    assert main(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["MODULE_old+4eb52b03", "2.23.6484", "1000", "B"]
    assert "40 d ago" in lines[2]
    assert lines[-1] == "6 entries, 5.9 KiB"
    assert main(["cache", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["bytes"] for row in rows if row["compiler"] == "2.23.6484"] == [1000]
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
        (["list", "--cache-dir", "s3://bucket/cache"], "aws s3 ls --recursive s3://bucket/cache"),
        (["prune", "--ttl", "3d", "--cache-dir", "s3://bucket/cache"], "lifecycle rule"),
        (["prune"], "prune needs a limit"),
        (["prune", "--ttl", "soon"], "not a duration"),
        (["list", "--ttl", "3d"], "--ttl has no effect here"),
    ],
)
def test_what_the_command_refuses(cache, capsys, monkeypatch, arguments, words):
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(cache))
    assert main(["cache", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_list_of_a_cache_that_no_job_has_made_is_empty(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "none"))
    assert main(["cache", "list"]) == 0
    assert "does not exist yet" in capsys.readouterr().out
    assert main(["cache", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may change everything")
def test_a_cache_that_may_not_be_changed(cache):
    (folder,) = cache.iterdir()
    folder.chmod(0o500)
    with pytest.raises(ConfigurationError, match="cannot be changed"):
        prune(cache, max_bytes=0)
    folder.chmod(0o700)
