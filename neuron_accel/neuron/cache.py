"""The persistent compile cache: where it is and how it behaves.

On the XLA path the compiler's wrapper keeps it in a folder or at an S3 address, below ``neuronxcc-VERSION``, with a
folder ``MODULE_<hash of the graph>+<hash of the flags>`` for each graph. Since June 2023 it evicts nothing; see
:mod:`neuron_accel.neuron.cache_store` for that. The native device keeps compiled programs in a folder of its own.
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
"""In a location: the name of the machine."""

NETWORK_FILE_SYSTEMS = (
    *("nfs", "nfs4", "efs", "lustre", "cifs", "smb3", "ceph", "glusterfs", "beegfs", "gpfs", "wekafs"),
    *("fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.mount-s3"),
)
"""Types of file systems that several machines mount, as /proc/mounts names them. EFS is nfs4 there, FSx lustre."""

_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?\Z")


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """The compile cache of a run.

    Args:
        location: a folder, which may begin with ``~``, or ``s3://bucket/prefix``; None: what the environment says, or
            the default. ``{host}`` in it is replaced by this machine's name, so that machines which share a file system
            have a folder each.
        no_cache: compile everything anew, and keep nothing.
        retry_failed_compilation: compile again what failed before; without, the failure itself is remembered.
        log_level: how much the cache tells.
        max_size: what `prune` leaves at most: bytes, or text such as ``"200GB"`` or ``"50GiB"``.
        ttl: what `prune` leaves at most this long unused: seconds, or text such as ``"30d"`` or ``"12h"``.

    Raises:
        ConfigurationError: for a location or limit that cannot be.
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
                why="without a cache no failure is remembered",
                fix="drop one of them",
            )
        if self.log_level not in (None, *flags.VALUES["--log_level"]):
            raise ConfigurationError(
                f"log_level is {self.log_level!r}.",
                where="CompileCache",
                fix=f"give {', '.join(flags.VALUES['--log_level'])}",
            )
        self.max_bytes, self.ttl_seconds  # noqa: B018  a malformed limit is refused here, not when it is needed

    @property
    def max_bytes(self) -> int | None:
        return None if self.max_size is None else parse_size(self.max_size, "CompileCache.max_size")

    @property
    def ttl_seconds(self) -> float | None:
        return None if self.ttl is None else parse_duration(self.ttl, "CompileCache.ttl")

    def flags(self) -> tuple[Flag, ...]:
        """The options of the XLA path, for NEURON_CC_FLAGS."""
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
        """Variables beside NEURON_CC_FLAGS.

        Args:
            native: for the native device instead of the XLA path.

        Raises:
            ConfigurationError: for what the native device's cache cannot do.
        """
        if not native:
            return {} if self.location is None else {URL_VARIABLE: self.location}
        if is_s3(self.location or ""):
            raise ConfigurationError(
                f"{self.location} cannot be the cache of the native device.",
                where="CompileCache.location",
                why="it is a folder there",
                fix="name a folder on a file system that all machines share",
            )
        for name in ("retry_failed_compilation", "log_level"):
            if getattr(self, name):
                raise ConfigurationError(
                    f"{name} does nothing on the native device.",
                    where="CompileCache",
                    why="it is an option of the XLA path's cache",
                    fix="leave it out",
                )
        found = {} if self.location is None else {NATIVE_VARIABLE: self.location}
        return {**found, **({NATIVE_OFF_VARIABLE: "1"} if self.no_cache else {})}

    def check_writable(self, environ: Mapping[str, str]) -> None:
        """Raises :class:`ConfigurationError` if nothing can be written to where the cache is."""
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
                why="every start would compile everything again, for minutes to hours",
                fix=f"make it writable, or name another place ({URL_VARIABLE}, --cache-dir)",
            ) from None


def shared_by_machines(location: str, mounts: Iterable[tuple[str, str]]) -> str | None:
    """The type of the network file system that a folder is on; None where it is on another.

    Args:
        location: a folder, which need not exist.
        mounts: where file systems are mounted, and their types.
    """
    if is_s3(location):
        return None
    path = Path(os.path.realpath(os.path.expanduser(location)))
    around = [(len(Path(point).parts), kind) for point, kind in mounts if path.is_relative_to(point)]
    kind = max(reversed(around), key=lambda found: found[0], default=(0, ""))[1]  # a later mount hides an earlier one
    return kind if kind in NETWORK_FILE_SYSTEMS else None


def remark_on_place(location: str, mounts: Iterable[tuple[str, str]], host: str) -> str | None:
    """What to know about a cache in a folder that several machines may share; None where there is nothing.

    Args:
        location: of the cache of the XLA path.
        mounts: as for :func:`shared_by_machines`.
        host: this machine's name.
    """
    kind = shared_by_machines(location, mounts)
    if kind is None or host in Path(location).parts:
        return None
    return (
        f"the compile cache {location} is on {kind}: machines that share one corrupt it (KeyError, truncated files); "
        f"give each its own with --cache-dir '{os.path.join(location, HOST)}', or use s3://bucket/prefix"
    )


def is_s3(location: str) -> bool:
    return location.startswith("s3://")


def check_location(location: str, where: str) -> None:
    """Raises :class:`ConfigurationError` unless ``location`` names a folder or an S3 address."""
    scheme, separator, _ = location.partition("://")
    if not location.strip():
        raise ConfigurationError("The location of the compile cache is empty.", where=where, fix="name a folder")
    if is_s3(location) and not _S3.match(location):
        raise ConfigurationError(
            f"{location!r} is not a valid S3 address.",
            where=where,
            why="the name of a bucket has 3 to 63 small letters, digits, dots and hyphens",
            fix="write s3://bucket/prefix",
        )
    if separator and scheme != "s3":
        raise ConfigurationError(
            f"The compile cache cannot be at {location!r}.", where=where, fix="name a folder, or s3://bucket/prefix"
        )


def location_of(environ: Mapping[str, str]) -> str:
    """Where the XLA path's cache is: ``--cache_dir`` in NEURON_CC_FLAGS, else NEURON_COMPILE_CACHE_URL, else the
    default.

    Raises:
        ConfigurationError: if NEURON_CC_FLAGS is malformed, or the place can be none.
    """
    for flag in flags.parse(environ.get(VARIABLE, "")):
        if flag.name == "--cache_dir":
            assert flag.value is not None
            check_location(flag.value, f"--cache_dir in {VARIABLE}")
            return os.path.expanduser(flag.value)
    found = environ.get(URL_VARIABLE, "").strip().removeprefix("file://") or DEFAULT_LOCATION
    check_location(found, URL_VARIABLE)
    return os.path.expanduser(found)
