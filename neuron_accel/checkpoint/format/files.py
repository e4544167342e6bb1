"""Durable operations on files.

All operations of a save on the file system are methods of one :class:`Files`, so that a test can end the process before
any of them, and every error names the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import xxhash

from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run


BLOCK = 64 << 20
"""Size in bytes of the blocks that have a checksum each, so that threads and ranks can check a large file together."""
_CANNOT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_CHUNK = 1 << 20  # fits into a core's cache, from which it is written and checksummed


@dataclass(frozen=True)
class Written:
    """Size and checksums of a file that was written.

    Args:
        size: in bytes.
        checksums: checksum of each block of ``BLOCK`` bytes, of which the last may be shorter: 64-bit XXH3
            (https://xxhash.com) in hexadecimal. It detects damage, not forgery.
    """

    size: int
    checksums: tuple[str, ...]


@dataclass(frozen=True)
class Extent:
    """A range of bytes in a file."""

    path: Path
    offset: int
    size: int


class Files:
    """Operations on a local or shared POSIX file system.

    Args:
        work: what they belong to: ``"save"``, ``"consolidate"`` or ``"reshard"``.
    """

    def __init__(self, work: str = "save") -> None:
        self._event = f"neuron_accel.{work}"

    def operation(self, name: str, path: Path) -> None:
        """Is called before every operation, and raises an audit event. Tests override it."""
        sys.audit(f"{self._event}.{name}", str(path))

    def make_folder(self, path: Path) -> None:
        try:
            self.operation("mkdir", path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failure("made", path, error) from error

    def write(self, path: Path, parts: Iterable[bytes | memoryview]) -> Written:
        """Writes ``parts`` to a file, one after another, and returns once they are on disk. If that fails, the file is
        removed.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        size, checksums = 0, _Checksums()
        try:
            self.operation("open", path)
            with open(path, "wb", buffering=0) as file, _removed_on_failure(path):
                for part in parts:
                    view = memoryview(part).cast("B")
                    for begin in range(0, len(view), _CHUNK):
                        chunk = view[begin : begin + _CHUNK]
                        self.operation("write", path)
                        checksums.update(chunk)
                        size += len(chunk)
                        while chunk:
                            chunk = chunk[file.write(chunk) :]
                self.operation("fsync", path)
                os.fsync(file.fileno())
        except OSError as error:
            raise failure("written", path, error) from error
        return Written(size, checksums.of_blocks())

    def assemble(self, path: Path, parts: Iterable[bytes | memoryview | Extent]) -> None:
        """Writes bytes and slices of other files to a file, and returns once they are on disk. Slices are copied by the
        system if possible. If that fails, the file is removed.

        Raises:
            CheckpointError: if the file cannot be written, or a slice cannot be read.
        """
        try:
            self.operation("open", path)
            with open(path, "wb", buffering=0) as file, _removed_on_failure(path):
                for part in parts:
                    self.operation("write", path)
                    if isinstance(part, Extent):
                        _copy_extent(part, file.fileno())
                        continue
                    left = memoryview(part).cast("B")
                    while left:
                        left = left[file.write(left) :]
                self.operation("fsync", path)
                os.fsync(file.fileno())
        except OSError as error:
            raise failure("written", path, error) from error

    def replace(self, path: Path, contents: bytes) -> Written:
        """Replaces the contents of a file atomically. If that fails, the file is as before."""
        temporary = path.with_name(f".{path.name}.new")
        written = self.write(temporary, [contents])
        try:
            with _removed_on_failure(temporary):
                self.operation("rename", path)
                os.replace(temporary, path)
        except OSError as error:
            raise failure("replaced", path, error) from error
        self.sync_folder(path.parent)
        return written

    def sync_folder(self, path: Path) -> None:
        """Makes the entries of a folder durable."""
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
        """Removes a file, or a folder with its contents, if it exists."""
        try:
            self.operation("remove", path)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise failure("removed", path, error) from error


@contextlib.contextmanager
def _removed_on_failure(path: Path) -> Iterator[None]:
    """Removes a file if the body, which writes it, fails: what is incomplete would only fill a disk."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def failure(verb: str, path: Path | str, error: OSError) -> CheckpointError:
    """Returns the error for a file that could not be ``verb``: ``"read"``, ``"written"`` and so on."""
    return CheckpointError(
        f"{Path(path).name!r} could not be {verb}: {error.strerror or error}.",
        where=str(path),
        fix="check that it exists and may be read by this user, or use another checkpoint"
        if verb == "read"
        else "check that the folder exists, is writable for this user, and has space left",
    )


def open_file(path: Path | str) -> int:
    """Opens a file for reading and returns its descriptor. Only regular files are accepted, since opening or reading a
    pipe, a socket or a device might wait forever.

    Raises:
        OSError: if it cannot be opened, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
        raise OSError(errno.EINVAL, f"it is {kind}, not a file")
    return descriptor


def read_bytes(path: Path) -> bytes:
    """Returns the contents of a file.

    Raises:
        OSError: as for :func:`open_file`.
    """
    with open(open_file(path), "rb") as file:
        return file.read()


def _copy_extent(extent: Extent, target: int) -> None:
    """Appends an extent to an open file: with copy_file_range(2), which may share blocks instead of copying them, or
    through memory where that is not possible.

    Raises:
        CheckpointError: if the file ends before the extent does.
    """
    offset, end = extent.offset, extent.offset + extent.size
    with open(open_file(extent.path), "rb", buffering=0) as source:
        by_system = hasattr(os, "copy_file_range")
        while offset < end:
            size = min(_CHUNK if not by_system else BLOCK, end - offset)
            if by_system:
                try:
                    count = os.copy_file_range(source.fileno(), target, size, offset)
                except OSError as error:
                    if error.errno not in _CANNOT_COPY:
                        raise
                    by_system = False
                    continue
            else:
                count = os.write(target, os.pread(source.fileno(), size, offset))
            if not count:
                raise CheckpointError(
                    f"{extent.path.name!r} ends too early.", where=str(extent.path), why="it was truncated"
                )
            offset += count


class _Checksums:
    """Computes the checksums of the blocks of a file that is written sequentially."""

    def __init__(self) -> None:
        self._complete: list[str] = []
        self._current, self._left = xxhash.xxh3_64(), BLOCK

    def update(self, data: memoryview) -> None:
        while data:
            part, data = data[: self._left], data[self._left :]
            self._current.update(part)
            self._left -= len(part)
            if not self._left:
                self._complete.append(self._current.hexdigest())
                self._current, self._left = xxhash.xxh3_64(), BLOCK

    def of_blocks(self) -> tuple[str, ...]:
        last = (self._current.hexdigest(),) if self._left < BLOCK else ()
        return (*self._complete, *last)


def number_of_blocks(size: int) -> int:
    """Returns the number of blocks of a file of ``size`` bytes."""
    return -(-size // BLOCK)


def checksum_of_block(path: Path, block: int) -> str:
    """Returns the checksum of one block of a file, using a fixed amount of memory.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    checksum, left = xxhash.xxh3_64(), BLOCK
    buffer = bytearray(_CHUNK)
    try:
        with open(open_file(path), "rb", buffering=0) as file:
            file.seek(block * BLOCK)
            while left and (count := file.readinto(memoryview(buffer)[: min(left, _CHUNK)])):
                checksum.update(memoryview(buffer)[:count])
                left -= count
    except OSError as error:
        raise failure("read", path, error) from error
    return str(checksum.hexdigest())


def checksums_of(data: bytes | memoryview) -> tuple[str, ...]:
    """Returns the checksums of a file with the contents ``data``."""
    checksums = _Checksums()
    checksums.update(memoryview(data))
    return checksums.of_blocks()


# ---- Several threads for reading and copying: one thread is slower than memory and than most disks -------------------
Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST = 4  # more threads are not faster


def threads_of(run: Run) -> int:
    """Returns how many threads this rank may use, such that the threads of all ranks on its machine have a core
    each."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", run.world.size))
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) // max(1, ranks)))


def in_order(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[tuple[Item, Result]]:
    """Yields each item with ``work(item)``, in the order of the items. ``work`` is called for a few items ahead, in
    ``threads`` threads.

    Raises:
        Exception: the exception of ``work``, for the first item for which it raises one.
    """
    if threads == 1:
        for item in items:
            yield item, work(item)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="neuron_accel-read") as pool:
        ahead: deque[tuple[Item, Future[Result]]] = deque()
        try:
            for item in items:
                ahead.append((item, pool.submit(work, item)))
                if len(ahead) > 2 * threads:
                    first, result = ahead.popleft()
                    yield first, result.result()
            while ahead:
                first, result = ahead.popleft()
                yield first, result.result()
        finally:
            for _, waiting in ahead:
                waiting.cancel()
