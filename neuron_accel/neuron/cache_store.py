"""The entries of a compile cache in a folder: what there is, what is in use, and evicting what is not needed.

Safe beside running jobs. An entry is left alone while its lock is held, while it is begun or being compiled, while a
process of this machine has one of its files open, and while a job that registered itself (:func:`register_job`, which
``neuron-accel launch`` does) runs that began before the entry was last used. What is evicted is renamed first, which no
reader can see half of, looked at once more, and put back if a job came meanwhile. Two evictions never run at a time.
The folders of compiler versions stay, even empty: a job may be about to make an entry in one.

When an entry was last used is the latest time that one of its files was read or written, as far as the file system
knows: Linux notes reading once a day by default (relatime), and never on file systems mounted with noatime.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from neuron_accel.errors import ConfigurationError, UsageError

OWN_FOLDER = ".neuron_accel"
"""Of this project, in a cache: registered jobs, the lock of evictions, and what is on its way out."""

BEGUN_SECONDS = 600.0
"""How long an entry without a lock and a result counts as begun: a job makes the folder first and its lock a moment
later, and the clocks of machines that share a cache differ a little."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One compiled graph, or one that failed to compile or is being compiled.

    Args:
        path: its folder.
        compiler: the version that compiled it.
        size: bytes of its files.
        last_used: seconds since the epoch.
        state: "done", "failed" (the failure itself is remembered) or "incomplete".
        locks: its lock files.
    """

    path: Path
    compiler: str
    size: int
    last_used: float
    state: str
    locks: tuple[Path, ...]

    @property
    def name(self) -> str:
        return self.path.name


def open_folder(location: str) -> Path:
    """The folder of the cache.

    Raises:
        ConfigurationError: if there is none, or it may not be read.
    """
    folder = Path(location)
    if not location or not os.path.isdir(folder):
        raise ConfigurationError(
            f"There is no compile cache in {location}.",
            where="--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL",
            fix="name the folder that jobs use; it is made by the first one",
        )
    try:
        os.listdir(folder)
    except OSError as error:
        raise ConfigurationError(
            f"The compile cache cannot be read: {error.strerror}.",
            where=location,
            fix="run this as a user who may read there",
        ) from None
    return folder


def entries(folder: Path) -> list[Entry]:
    """All entries, least recently used first. One that vanishes meanwhile is left out."""
    found = []
    for path in folder.glob("neuronxcc-*/MODULE_*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found.append(_read(path))
    return sorted(found, key=lambda entry: (entry.last_used, str(entry.path)))


def _read(path: Path) -> Entry:
    files = [file for file in path.rglob("*") if file.is_file()]
    content = [file for file in files if file.suffix != ".lock"]
    stats = [file.stat() for file in content] or [path.stat()]
    names = {file.name for file in content if file.stat().st_size}
    state = "done" if any(name.endswith(".neff") for name in names) else "incomplete"
    if state == "incomplete" and "model.done" in {file.name for file in content}:
        state = "failed"
    return Entry(
        path=path,
        compiler=path.parent.name.removeprefix("neuronxcc-"),
        size=sum(file.stat().st_size for file in content),
        last_used=max(max(stat.st_atime, stat.st_mtime) for stat in stats),
        state=state,
        locks=tuple(file for file in files if file.suffix == ".lock"),
    )


# ---- who uses what ---------------------------------------------------------------------------------------------------
@contextmanager
def register_job(folder: Path) -> Iterator[None]:
    """While inside, entries used since now are left alone by every eviction, on any machine that shares the folder.

    The lock is held by the kernel and released when a job dies. A folder that cannot be written to
    needs no registration: nothing can be evicted there either.
    """
    own = folder / OWN_FOLDER / "jobs"
    path = own / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
    try:
        own.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running_jobs(folder: Path) -> list[dict]:
    """The registered jobs that run: ``{"began": seconds, "host": ..., "pid": ...}`` each.

    When one began is the time of its file: the clock that dates what it uses. That of a process is another one, a few
    milliseconds ahead, or any time on a file system of another machine.
    """
    found = []
    for path in sorted((folder / OWN_FOLDER / "jobs").glob("*.json")):
        with contextlib.suppress(OSError, ValueError), path.open() as file:
            if _is_held(file):
                found.append({"began": os.fstat(file.fileno()).st_mtime, **json.load(file)})
    return found


def _is_held(file) -> bool:
    """Whether another process holds the file's lock: flock's, or the older one of lockf."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_UN)
    except OSError:
        return True
    return False


def open_files(folder: Path) -> set[Path]:
    """Files below ``folder`` that processes of this machine have open or mapped, as far as this user may look."""
    root = os.path.realpath(folder) + os.sep
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(os.readlink(descriptor))
        with contextlib.suppress(OSError):
            found.update(line.split(None, 5)[-1].strip() for line in (process / "maps").open() if root in line)
    return {Path(path) for path in found if path.startswith(root)}


def in_use(entry: Entry, jobs: Iterable[dict], opened: Iterable[Path]) -> str | None:
    """Why ``entry`` has to stay, or None."""
    for lock in entry.locks:
        with contextlib.suppress(OSError), lock.open() as file:
            if _is_held(file):
                return "locked"
    if entry.state == "incomplete" and entry.locks:
        return "being compiled"
    if entry.state == "incomplete" and time.time() - entry.last_used < BEGUN_SECONDS:
        return "begun just now"
    real = Path(os.path.realpath(entry.path))
    if any(real in path.parents for path in opened):
        return "open"
    for job in jobs:
        if entry.last_used >= job["began"]:
            return f"used by a job on {job['host']} (process {job['pid']})"
    return None


# ---- evicting --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Eviction:
    """What an eviction did, or would do.

    Args:
        evicted: entries that went, least recently used first, each with the reason.
        kept: entries that had to stay although a limit would have them go, each with the reason.
        left: bytes of the entries that remain.
    """

    evicted: tuple[tuple[Entry, str], ...]
    kept: tuple[tuple[Entry, str], ...]
    left: int


def prune(
    folder: Path,
    *,
    max_bytes: int | None = None,
    ttl_seconds: float | None = None,
    dry_run: bool = False,
    now: float | None = None,
) -> Eviction:
    """Evicts entries that were not used for ``ttl_seconds``, then the least recently used until ``max_bytes`` remain.

    Raises:
        UsageError: if another eviction is under way.
        ConfigurationError: if the folder cannot be written to.
    """
    now = time.time() if now is None else now
    with contextlib.nullcontext() if dry_run else _alone(folder):
        if not dry_run:
            _empty_trash(folder)
        jobs, opened = running_jobs(folder), open_files(folder)
        waiting = entries(folder)
        left = sum(entry.size for entry in waiting)
        evicted: list[tuple[Entry, str]] = []
        kept: list[tuple[Entry, str]] = []
        # What has to stay counts against the limit, so that others go in its place: hence more than one round.
        while due := _due(waiting, left, max_bytes, ttl_seconds, now):
            waiting = waiting[len(due) :]
            needed = {entry: in_use(entry, jobs, opened) for entry in due}
            free = [entry for entry in due if needed[entry] is None]
            gone = free if dry_run else _evict(free, folder)
            for entry, reason in due.items():
                if entry in gone:
                    evicted.append((entry, reason))
                    left -= entry.size
                else:
                    kept.append((entry, needed[entry] or "used just now"))
        return Eviction(evicted=tuple(evicted), kept=tuple(kept), left=left)


def _due(waiting: list[Entry], left: int, max_bytes: int | None, ttl: float | None, now: float) -> dict[Entry, str]:
    """The entries beyond a limit, each with the limit: the first ones of ``waiting``, which are the oldest."""
    due = {}
    for entry in waiting:
        reason = _reason(entry, left, max_bytes, ttl, now)
        if reason is None:
            break
        due[entry] = reason
        left -= entry.size
    return due


def _reason(entry: Entry, left: int, max_bytes: int | None, ttl: float | None, now: float) -> str | None:
    if ttl is not None and now - entry.last_used > ttl:
        return "time to live"
    return "size" if max_bytes is not None and left > max_bytes else None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    own = folder / OWN_FOLDER
    try:
        own.mkdir(exist_ok=True)
        file = (own / "prune.lock").open("w")
    except OSError as error:
        raise ConfigurationError(
            f"The compile cache cannot be changed: {error.strerror}.",
            where=str(folder),
            fix="run this as a user who may write there",
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "Another eviction of this cache is under way.", where=str(folder), fix="wait until it is done"
            ) from None
        yield


def _evict(chosen: list[Entry], folder: Path) -> set[Entry]:
    """Those that are gone: not the ones that a job came to use meanwhile, or that had gone before.

    All are renamed before any is looked at again: looking for open files reads about every process.
    """
    trash = folder / OWN_FOLDER / "trash"
    trash.mkdir(parents=True, exist_ok=True)
    moved = {}
    for entry in chosen:
        with contextlib.suppress(FileNotFoundError):
            moved[entry] = entry.path.rename(trash / f"{entry.name}-{uuid.uuid4().hex[:8]}")
    opened, gone = open_files(trash) if moved else set(), set()
    for entry, path in moved.items():
        again = _read(path)
        arrived = again.last_used > entry.last_used or len(again.locks) > len(entry.locks)
        if arrived or in_use(again, (), opened):
            with contextlib.suppress(OSError):  # another job has replaced it
                path.rename(entry.path)
                continue
        shutil.rmtree(path, ignore_errors=True)
        gone.add(entry)
    return gone


def _empty_trash(folder: Path) -> None:
    """What an eviction that was interrupted left behind."""
    shutil.rmtree(folder / OWN_FOLDER / "trash", ignore_errors=True)
