"""Durable operations on files, each of them a place where a crash may fall.

Everything that a save does to a file system goes through one :class:`Files`, so that a test can end the process before
any of its operations, and so that every failure names the file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from neuron_accel.engine.errors import CheckpointError

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Written:
    """A file that is complete on disk.

    Args:
        size: in bytes.
        checksum: XXH3 (64 bits, https://xxhash.com) of its contents, in hexadecimal. It finds damage several times
            faster than memory can be read; it is no protection against forgery.
    """

    size: int
    checksum: str


class Files:
    """A local or shared POSIX file system."""

    def operation(self, name: str, path: Path) -> None:
        """Called before every operation; for tests."""

    def make_folder(self, path: Path) -> None:
        try:
            self.operation("mkdir", path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failure("made", path, error) from error

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        """Makes a file of ``parts`` and returns once its contents are on disk."""
        size, checksum = 0, xxhash.xxh3_64()
        try:
            self.operation("open", path)
            with open(path, "wb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part).cast("B")
                    for begin in range(0, len(view), _CHUNK):
                        chunk = view[begin : begin + _CHUNK]
                        self.operation("write", path)
                        checksum.update(chunk)
                        size += len(chunk)
                        while chunk:
                            chunk = chunk[file.write(chunk) :]
                self.operation("fsync", path)
                os.fsync(file.fileno())
        except OSError as error:
            raise failure("written", path, error) from error
        return Written(size, checksum.hexdigest())

    def replace(self, path: Path, contents: bytes) -> Written:
        """Gives a file new contents; at any moment it has either the old ones or the new ones, whole."""
        temporary = path.with_name(f".{path.name}.new")
        written = self.write(temporary, [contents])
        try:
            self.operation("rename", path)
            os.replace(temporary, path)
        except OSError as error:
            raise failure("replaced", path, error) from error
        self.sync_folder(path.parent)
        return written

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder durable."""
        try:
            self.operation("fsync", path)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise failure("made durable", path, error) from error

    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with all it holds; nothing happens where there is none."""
        try:
            self.operation("remove", path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise failure("removed", path, error) from error


def failure(verb: str, path: Path | str, error: OSError) -> CheckpointError:
    """The error for a file that could not be written, read, ..."""
    return CheckpointError(
        f"{Path(path).name!r} could not be {verb}: {error.strerror or error}.",
        where=str(path),
        fix="check that the folder exists, is writable for this user, and has space left",
    )


def checksum_of(path: Path) -> str:
    """The checksum of a file's contents, with a fixed amount of memory.

    Raises:
        CheckpointError: if it cannot be read.
    """
    checksum = xxhash.xxh3_64()
    buffer = bytearray(1 << 20)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                checksum.update(memoryview(buffer)[:count])
    except OSError as error:
        raise failure("read", path, error) from error
    return checksum.hexdigest()


def checksum_of_bytes(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))
