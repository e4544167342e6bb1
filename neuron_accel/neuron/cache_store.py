# SPDX-License-Identifier: Apache-2.0
"""Lists the entries of a compile cache in a folder, and evicts entries that are not in use.

Eviction is safe while jobs run. An entry is kept while its lock is held, while it is being compiled, while a process of
this machine has one of its files open, and while a registered job runs that began before the entry was last used
(:func:`register_job`; ``neuron-accel launch`` registers its jobs). An entry is renamed before it is deleted, which is
atomic for readers, checked again, and moved back if a job has used it in the meantime. Only one eviction runs at a
time. Empty folders of compiler versions are kept, since a job may be about to create an entry in one.

An entry was last used when one of its files was last read or written, according to the file system: by default
(relatime) Linux records a read once a day, and with noatime never.
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
"""Folder of this project in a cache: registered jobs, the lock of evictions, and entries that are being deleted."""

BEGUN_SECONDS = 600.0
"""Time for which an entry without a lock and a result is considered new: a job creates the folder before its lock, and
the clocks of machines that share a cache differ."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A graph that was compiled, failed to compile, or is being compiled.

    Args:
        path: its folder.
        compiler: version of the compiler.
        size: bytes of its files.
        last_used: when it was last used, in seconds since the epoch.
        state: "done", "failed" (a cached failure) or "incomplete".
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
    """Returns the folder of the cache as a path.

    Raises:
        ConfigurationError: if it does not exist or cannot be read.
    """
    folder = Path(location)
    if not location or not os.path.isdir(folder):
        raise ConfigurationError(
            f"There is no compile cache in {location}.",
            where="--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL",
            fix="pass the folder that jobs use; the first job creates it",
        )
    try:
        os.listdir(folder)
    except OSError as error:
        raise ConfigurationError(
            f"The compile cache cannot be read: {error.strerror}.",
            where=location,
            fix="run this as a user with read permission",
        ) from None
    return folder


def entries(folder: Path) -> list[Entry]:
    """Lists all entries, least recently used first. Entries that are deleted in the meantime are left out."""
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


# ---- entries in use --------------------------------------------------------------------------------------------------
@contextmanager
def register_job(folder: Path) -> Iterator[None]:
    """A context manager during which evictions on any machine that shares the folder keep entries used since it began.

    It holds a file lock, which the kernel releases if the job dies. For a folder that cannot be written it does
    nothing, since nothing can be evicted from it.
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
    """Lists the registered jobs that run: ``{"began": seconds, "host": ..., "pid": ...}`` each.

    ``began`` is the modification time of the job's file, since the clock of the file system, by which the use of
    entries is measured, may differ from that of the process.
    """
    found = []
    for path in sorted((folder / OWN_FOLDER / "jobs").glob("*.json")):
        with contextlib.suppress(OSError, ValueError), path.open() as file:
            if _is_held(file):
                found.append({"began": os.fstat(file.fileno()).st_mtime, **json.load(file)})
    return found


def _is_held(file) -> bool:
    """Whether another process holds a lock on the file, by flock or by lockf."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_UN)
    except OSError:
        return True
    return False


def open_files(folder: Path) -> set[Path]:
    """Files below ``folder`` that processes of this machine have open or mapped, as far as this user can see them."""
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
    """Why ``entry`` is in use, as text; None if it is not.

    Args:
        entry: the entry.
        jobs: of :func:`running_jobs`.
        opened: of :func:`open_files`.
    """
    for lock in entry.locks:
        with contextlib.suppress(OSError), lock.open() as file:
            if _is_held(file):
                return "locked"
    if entry.state == "incomplete" and entry.locks:
        return "being compiled"
    if entry.state == "incomplete" and time.time() - entry.last_used < BEGUN_SECONDS:
        return "just created"
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
    """The result of an eviction, or of a dry run.

    Args:
        evicted: evicted entries, least recently used first, each with the limit that it exceeded.
        kept: entries that exceed a limit but are in use, each with its use.
        left: bytes of the remaining entries.
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

    Args:
        folder: the cache.
        max_bytes: largest size of the cache; None: no limit.
        ttl_seconds: time after which an unused entry is evicted; None: never.
        dry_run: whether to evict nothing.
        now: the current time in seconds since the epoch; None: that of the system.

    Raises:
        UsageError: if another eviction is running.
        ConfigurationError: if the folder cannot be written.
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
        # Entries in use count towards the size, so that others are evicted instead: hence several rounds.
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
                    kept.append((entry, needed[entry] or "just used"))
        return Eviction(evicted=tuple(evicted), kept=tuple(kept), left=left)


def _due(waiting: list[Entry], left: int, max_bytes: int | None, ttl: float | None, now: float) -> dict[Entry, str]:
    """The entries at the beginning of ``waiting`` that exceed a limit, with the limit."""
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
        return "ttl"
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
            fix="run this as a user with write permission",
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                "Another eviction of this cache is running.", where=str(folder), fix="wait until it has finished"
            ) from None
        yield


def _evict(chosen: list[Entry], folder: Path) -> set[Entry]:
    """Deletes entries, except those that a job has used in the meantime; returns the deleted ones.

    All are renamed before any is checked again, since finding open files reads /proc of every process.
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
            with contextlib.suppress(OSError):  # another job has created it again
                path.rename(entry.path)
                continue
        shutil.rmtree(path, ignore_errors=True)
        gone.add(entry)
    return gone


def _empty_trash(folder: Path) -> None:
    """Deletes entries that an interrupted eviction has renamed but not deleted."""
    shutil.rmtree(folder / OWN_FOLDER / "trash", ignore_errors=True)
