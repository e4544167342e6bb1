# SPDX-License-Identifier: Apache-2.0
"""The persistent compile cache: its location and options, its entries, and evicting them.

On the XLA path the compiler's wrapper keeps the cache in a folder or on S3. For each graph it contains a folder
``neuronxcc-VERSION/MODULE_<hash of the graph>+<hash of the flags>``. Since June 2023 the wrapper evicts nothing;
:func:`prune` does, in a folder. The native device keeps compiled programs in another folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron import flags
from neuron_accel.neuron.flags import VARIABLE, Flag

DEFAULT_LOCATION = "/var/tmp/neuron-compile-cache"
URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"
NATIVE_VARIABLE = "TORCH_NEURONX_NEFF_CACHE_DIR"
NATIVE_OFF_VARIABLE = "TORCH_NEURONX_NEFF_DISABLE_CACHE"

HOST = "{host}"
"""Placeholder in a location for the name of the machine."""

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "efs", "lustre", "cifs", "smb3", "ceph", "glusterfs", "beegfs", "gpfs", "wekafs"),
    *("fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.mount-s3"),
)
"""Types of network file systems in /proc/mounts. EFS has type nfs4, FSx for Lustre lustre."""

RECENT_SECONDS = 86400.0
"""Age below which an entry is not evicted: a job may be reading it. Linux records a read once a day (relatime)."""

_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?\Z")


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """The compile cache of a run.

    Args:
        location: a folder, which may begin with ``~``, or ``s3://bucket/prefix``; None: that of the environment, or the
            default. ``{host}`` is replaced by the name of this machine, so that machines that share a file system use
            different folders.
        no_cache: whether to disable the cache.
        retry_failed_compilation: whether to compile graphs again that failed to compile before. If False, a failure is
            cached.
        log_level: log level of the cache.

    Raises:
        ConfigurationError: if the location is not valid, or options contradict each other.
    """

    location: str | None = None
    no_cache: bool = False
    retry_failed_compilation: bool = False
    log_level: Literal["INFO", "WARNING", "ERROR"] | None = None

    def __post_init__(self) -> None:
        if self.location is not None:
            check_location(self.location, "CompileCache.location")
            location = os.path.expanduser(self.location).replace(HOST, socket.gethostname())
            object.__setattr__(self, "location", location)
        if self.no_cache and self.retry_failed_compilation:
            raise ConfigurationError(
                "no_cache and retry_failed_compilation contradict each other.",
                where="CompileCache",
                why="without a cache no failure is cached",
                fix="leave one of them out",
            )
        if self.log_level not in (None, *flags.VALUES["--log_level"]):
            raise ConfigurationError(
                f"log_level is {self.log_level!r}.",
                where="CompileCache",
                fix=f"pass one of {', '.join(flags.VALUES['--log_level'])}",
            )

    def flags(self) -> tuple[Flag, ...]:
        """The options as flags for NEURON_CC_FLAGS (XLA path)."""
        texts = {
            "--cache_dir": self.location,
            "--no_cache": self.no_cache,
            "--retry_failed_compilation": self.retry_failed_compilation,
            "--log_level": self.log_level,
        }
        return tuple(
            Flag(name, None if value is True else str(value), name if value is True else f"{name}={value}")
            for name, value in texts.items()
            if value
        )

    def environment(self, *, native: bool = False) -> dict[str, str]:
        """The options as environment variables other than NEURON_CC_FLAGS.

        Args:
            native: True for the native device, False for the XLA path.

        Raises:
            ConfigurationError: if the cache of the native device does not support an option.
        """
        if not native:
            return {} if self.location is None else {URL_VARIABLE: self.location}
        if is_s3(self.location or ""):
            raise ConfigurationError(
                f"{self.location} cannot be the cache of the native device.",
                where="CompileCache.location",
                why="the native device supports folders only",
                fix="pass a folder on a file system that all machines share",
            )
        for name in ("retry_failed_compilation", "log_level"):
            if getattr(self, name):
                raise ConfigurationError(
                    f"{name} has no effect on the native device.",
                    where="CompileCache",
                    why="it is an option of the cache of the XLA path",
                    fix="leave it out",
                )
        found = {} if self.location is None else {NATIVE_VARIABLE: self.location}
        return {**found, **({NATIVE_OFF_VARIABLE: "1"} if self.no_cache else {})}

    def check_writable(self, environ: Mapping[str, str]) -> None:
        """Checks that the cache can be written, unless it is disabled or on S3.

        Args:
            environ: environment variables.

        Raises:
            ConfigurationError: if it cannot be written.
        """
        place = self.location or location_of(environ)
        off = self.no_cache or any(flag.name == "--no_cache" for flag in flags.parse(environ.get(VARIABLE, "")))
        if off or is_s3(place):
            return
        folder = Path(place)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ConfigurationError(
                f"The compile cache cannot be written: {error.strerror or error}.",
                where=str(folder),
                why="every run would compile all graphs again, which takes minutes to hours",
                fix=f"make it writable, or set another location ({URL_VARIABLE}, --cache-dir)",
            ) from None


def shared_by_machines(location: str, mounts: Iterable[tuple[str, str]]) -> str | None:
    """The type of the network file system that contains a folder; None if its file system is local.

    Args:
        location: a folder, which need not exist.
        mounts: mount point and type of every file system.
    """
    if is_s3(location):
        return None
    path = Path(os.path.realpath(os.path.expanduser(location)))
    around = [(len(Path(point).parts), kind) for point, kind in mounts if path.is_relative_to(point)]
    kind = max(reversed(around), key=lambda found: found[0], default=(0, ""))[1]  # a later mount hides an earlier one
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def remark_on_place(location: str, mounts: Iterable[tuple[str, str]], host: str) -> str | None:
    """A warning if the cache is on a network file system, without the name of the machine in its path; else None.

    Args:
        location: location of the cache of the XLA path.
        mounts: as for :func:`shared_by_machines`.
        host: name of this machine.
    """
    kind = shared_by_machines(location, mounts)
    if kind is None or host in Path(location).parts:
        return None
    return (
        f"the compile cache {location} is on {kind}: machines that share one corrupt it (KeyError, truncated files); "
        f"use one for each machine with --cache-dir '{os.path.join(location, HOST)}', or use s3://bucket/prefix"
    )


def is_s3(location: str) -> bool:
    """Whether ``location`` is an S3 address."""
    return location.startswith("s3://")


def check_location(location: str, where: str) -> None:
    """Checks that ``location`` is a folder or a valid S3 address.

    Raises:
        ConfigurationError: if it is neither.
    """
    scheme, separator, _ = location.partition("://")
    if not location.strip():
        raise ConfigurationError("The location of the compile cache is empty.", where=where, fix="pass a folder")
    if is_s3(location) and not _S3.match(location):
        raise ConfigurationError(
            f"{location!r} is not a valid S3 address.",
            where=where,
            why="the name of a bucket consists of 3 to 63 lowercase letters, digits, dots and hyphens",
            fix="pass s3://bucket/prefix",
        )
    if separator and scheme != "s3":
        raise ConfigurationError(
            f"The compile cache cannot be at {location!r}.", where=where, fix="pass a folder, or s3://bucket/prefix"
        )


def location_of(environ: Mapping[str, str]) -> str:
    """The location of the XLA path's cache: ``--cache_dir`` in NEURON_CC_FLAGS, else NEURON_COMPILE_CACHE_URL, else the
    default.

    Raises:
        ConfigurationError: if NEURON_CC_FLAGS is malformed, or the location is not valid.
    """
    for flag in flags.parse(environ.get(VARIABLE, "")):
        if flag.name == "--cache_dir":
            assert flag.value is not None
            check_location(flag.value, f"--cache_dir in {VARIABLE}")
            return os.path.expanduser(flag.value)
    found = environ.get(URL_VARIABLE, "").strip().removeprefix("file://") or DEFAULT_LOCATION
    check_location(found, URL_VARIABLE)
    return os.path.expanduser(found)


# ---- entries and evicting them ---------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Entry:
    """A graph that was compiled, failed to compile, or is being compiled.

    Args:
        path: its folder.
        compiler: version of the compiler.
        size: bytes of its files.
        last_used: when one of its files was last read or written, in seconds since the epoch, according to the file
            system: with ``noatime`` reading is not recorded.
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


@dataclass(frozen=True, kw_only=True)
class Eviction:
    """The result of :func:`prune`.

    Args:
        evicted: evicted entries, least recently used first, each with the limit that it exceeded: "ttl" or "size".
        kept: entries that exceed a limit but may be in use, each with the reason.
        left: bytes of the remaining entries.
    """

    evicted: tuple[tuple[Entry, str], ...]
    kept: tuple[tuple[Entry, str], ...]
    left: int


def entries(location: str | Path) -> list[Entry]:
    """Lists all entries of a cache, least recently used first.

    Args:
        location: its folder.

    Raises:
        ConfigurationError: if it is not a folder that can be read.
    """
    if is_s3(str(location)):
        raise ConfigurationError(
            f"The compile cache at {location} is not listed or pruned.",
            where="--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL",
            why="S3 does not record when an object was read, by which entries in use are known",
            fix=f"list it with aws s3 ls --recursive {location}, and let a lifecycle rule of the bucket expire objects",
        )
    try:
        versions = [path for path in Path(location or os.devnull).iterdir() if path.name.startswith("neuronxcc-")]
    except OSError as error:
        raise ConfigurationError(
            f"There is no compile cache in {location}: {error.strerror}.",
            where="--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL",
            fix="pass the folder that jobs use; the first job creates it",
        ) from None
    found = []
    for path in (path for version in versions for path in version.glob("MODULE_*")):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # deleted in the meantime
            found.append(_read(path))
    return sorted(found, key=lambda entry: (entry.last_used, str(entry.path)))


def _read(path: Path) -> Entry:
    files = [file for file in path.rglob("*") if file.is_file()]
    content = {file: file.stat() for file in files if file.suffix != ".lock"}
    if any(file.suffix == ".neff" and stat.st_size for file, stat in content.items()):
        state = "done"
    else:
        state = "failed" if any(file.name == "model.done" for file in content) else "incomplete"
    return Entry(
        path=path,
        compiler=path.parent.name.removeprefix("neuronxcc-"),
        size=sum(stat.st_size for stat in content.values()),
        last_used=max(max(stat.st_atime, stat.st_mtime) for stat in content.values() or [path.stat()]),
        state=state,
        locks=tuple(file for file in files if file.suffix == ".lock"),
    )


def in_use(entry: Entry, now: float) -> str | None:
    """Why a job may be using an entry, as text; None if none can.

    Args:
        entry: the entry.
        now: the current time in seconds since the epoch.
    """
    if any(_is_held(lock) for lock in entry.locks):
        return "locked"
    if entry.state == "incomplete" and entry.locks:
        return "being compiled"
    return "used within a day" if now - entry.last_used < RECENT_SECONDS else None


def _is_held(path: Path) -> bool:
    """Whether a process holds a lock on the file, by flock or by lockf."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        try:
            for lock in (fcntl.flock, fcntl.lockf):
                lock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                lock(file, fcntl.LOCK_UN)
        except OSError:
            return True
    return False


def prune(
    folder: str | Path,
    *,
    max_bytes: int | None = None,
    ttl_seconds: float | None = None,
    dry_run: bool = False,
    now: float | None = None,
) -> Eviction:
    """Evicts entries that were not used for ``ttl_seconds``, then the least recently used until ``max_bytes`` remain.

    Entries that a job may be using are kept: see :func:`in_use`. An entry is renamed before it is deleted, so that no
    job finds a part of it.

    Args:
        folder: the cache.
        max_bytes: largest size of the cache; None: no limit.
        ttl_seconds: time after which an unused entry is evicted; None: never.
        dry_run: whether to evict nothing.
        now: the current time in seconds since the epoch; None: that of the system.

    Raises:
        ConfigurationError: if the folder is not a cache, or cannot be written.
    """
    now = time.time() if now is None else now
    found = entries(folder)
    left = sum(entry.size for entry in found)
    evicted, kept = [], []
    for entry in found:
        if ttl_seconds is not None and now - entry.last_used > ttl_seconds:
            limit = "ttl"
        elif max_bytes is not None and left > max_bytes:
            limit = "size"
        else:
            break
        if reason := in_use(entry, now):
            kept.append((entry, reason))
            continue
        if not dry_run:
            _delete(entry)
        evicted.append((entry, limit))
        left -= entry.size
    return Eviction(evicted=tuple(evicted), kept=tuple(kept), left=left)


def _delete(entry: Entry) -> None:
    renamed = entry.path.with_name(f".evicted-{uuid.uuid4().hex}")
    try:
        entry.path.rename(renamed)
    except FileNotFoundError:
        return  # by another eviction
    except OSError as error:
        raise ConfigurationError(
            f"The compile cache cannot be changed: {error.strerror}.",
            where=str(entry.path.parent),
            fix="run this as a user with write permission",
        ) from None
    shutil.rmtree(renamed, ignore_errors=True)
