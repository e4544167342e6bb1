# SPDX-License-Identifier: Apache-2.0
"""The persistent compile cache: its location and options.

On the XLA path the compiler's wrapper keeps the cache in a folder or on S3. For each graph it contains a folder
``neuronxcc-VERSION/MODULE_<hash of the graph>+<hash of the flags>``. Since June 2023 the wrapper evicts nothing;
:mod:`neuron_accel.neuron.cache_store` does. The native device keeps compiled programs in another folder.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from neuron_accel.errors import ConfigurationError
from neuron_accel.neuron import flags
from neuron_accel.neuron.flags import VARIABLE, Flag
from neuron_accel.neuron.quantities import parse_duration, parse_size

DEFAULT_LOCATION = "/var/tmp/neuron-compile-cache"
DEFAULT_NATIVE_LOCATION = "/tmp/neff_cache"
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
        max_size: largest size that ``neuron-accel cache prune`` leaves: bytes, or text such as ``"200GB"`` or
            ``"50GiB"``.
        ttl: time after which ``neuron-accel cache prune`` evicts an unused entry: seconds, or text such as ``"30d"`` or
            ``"12h"``.

    Raises:
        ConfigurationError: if the location or a limit is not valid, or options contradict each other.
    """

    location: str | None = None
    no_cache: bool = False
    retry_failed_compilation: bool = False
    log_level: Literal["INFO", "WARNING", "ERROR"] | None = None
    max_size: int | str | None = None
    ttl: float | str | None = None

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
        self.max_bytes, self.ttl_seconds  # noqa: B018  raises an error for a malformed limit

    @property
    def max_bytes(self) -> int | None:
        """``max_size`` in bytes."""
        return None if self.max_size is None else parse_size(self.max_size, "CompileCache.max_size")

    @property
    def ttl_seconds(self) -> float | None:
        """``ttl`` in seconds."""
        return None if self.ttl is None else parse_duration(self.ttl, "CompileCache.ttl")

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
