"""Durable operations on files, each of them a place where a crash may fall.

Everything that a save does to a file system goes through one :class:`Files`, so that a test can end the process before
any of its operations, and so that every failure names the file.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from neuron_accel.engine.errors import CheckpointError

_CHUNK = 4 << 20


@dataclass(frozen=True)
class Written:
    """A file that is complete on disk.

    Args:
        size: in bytes.
        crc32: CRC-32 (ISO 3309) of its contents.
    """

    size: int
    crc32: int


class Files:
    """A local or shared POSIX file system."""

    def operation(self, name: str, path: Path) -> None:
        """Called before every operation; for tests."""

    def make_folder(self, path: Path) -> None:
        self.operation("mkdir", path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failure("made", path, error) from error

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        """Makes a file of ``parts`` and returns once its contents are on disk."""
        size = crc = 0
        try:
            self.operation("open", path)
            with open(path, "wb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part).cast("B")
                    for begin in range(0, len(view), _CHUNK):
                        chunk = view[begin : begin + _CHUNK]
                        self.operation("write", path)
                        crc = zlib.crc32(chunk, crc)
                        size += len(chunk)
                        while chunk:
                            chunk = chunk[file.write(chunk) :]
                self.operation("fsync", path)
                os.fsync(file.fileno())
        except OSError as error:
            raise failure("written", path, error) from error
        return Written(size, crc)

    def replace(self, path: Path, contents: bytes) -> Written:
        """Gives a file new contents; at any moment it has either the old ones or the new ones, whole."""
        temporary = path.with_name(f".{path.name}.new")
        written = self.write(temporary, [contents])
        self.operation("rename", path)
        try:
            os.replace(temporary, path)
        except OSError as error:
            raise failure("replaced", path, error) from error
        self.sync_folder(path.parent)
        return written

    def sync_folder(self, path: Path) -> None:
        """Makes the names in a folder durable."""
        self.operation("fsync", path)
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise failure("made durable", path, error) from error

    def remove(self, path: Path) -> None:
        """Removes a file, or a folder with all it holds; nothing happens where there is none."""
        self.operation("remove", path)
        try:
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


def crc32_of(path: Path) -> int:
    """CRC-32 of a file's contents, with a fixed amount of memory.

    Raises:
        CheckpointError: if it cannot be read.
    """
    crc = 0
    buffer = bytearray(1 << 20)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                crc = zlib.crc32(memoryview(buffer)[:count], crc)
    except OSError as error:
        raise failure("read", path, error) from error
    return crc
