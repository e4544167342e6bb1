# SPDX-License-Identifier: Apache-2.0
"""Durable operations on files, in local folders and at URLs.

All operations of a save are methods of one :class:`Files`, so that a test can end the process before any of them, and
every error names the file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
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
from neuron_accel.storage import THREADS, Location, RemotePath

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run


BLOCK = 64 << 20
"""Size in bytes of the blocks that have a checksum each, so that threads and ranks can check a large file together."""
_CANNOT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_POPULATE_READ = 22  # MADV_POPULATE_READ of madvise(2)
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

    path: Location
    offset: int
    size: int


class Files:
    """Operations on a local or shared POSIX file system, and on the stores of URLs. What is written to a store appears
    as a whole or not at all, and is durable when it appears."""

    def operation(self, name: str, path: Location) -> None:
        """Is called before every operation. Tests override it."""

    def make_folder(self, path: Location) -> None:
        try:
            self.operation("mkdir", path)
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failure("made", path, error) from error

    def write(self, path: Location, parts: Iterable[bytes | memoryview]) -> Written:
        """Writes ``parts`` to a new file, one after another, and returns once they are on disk. If that fails, the file
        is removed. A local file that exists is not written: what still writes it may be of an earlier start.

        Raises:
            CheckpointError: if the file cannot be written.
        """
        size, checksums = 0, _Checksums()

        def chunks() -> Iterator[memoryview]:
            nonlocal size
            for part in parts:
                view = memoryview(part).cast("B")
                for begin in range(0, len(view), _CHUNK):
                    chunk = view[begin : begin + _CHUNK]
                    self.operation("write", path)
                    checksums.update(chunk)
                    size += len(chunk)
                    yield chunk

        self._put(path, chunks())
        return Written(size, checksums.of_blocks())

    def assemble(self, path: Location, parts: Iterable[bytes | memoryview | Extent]) -> None:
        """Writes bytes and slices of other files to a new file, and returns once they are on disk. Slices are copied by
        the system if possible. If that fails, the file is removed.

        Raises:
            CheckpointError: if the file cannot be written, or a slice cannot be read.
        """

        def announced() -> Iterator[bytes | memoryview | Extent]:
            for part in parts:
                self.operation("write", path)
                yield part

        self._put(path, announced())

    def _put(self, path: Location, parts: Iterable[bytes | memoryview | Extent]) -> None:
        try:
            self.operation("open", path)
            if isinstance(path, RemotePath):
                path.upload(block for part in parts for block in _in_memory(part))
                return
            with open(path, "xb", buffering=0) as file, _removed_on_failure(path):  # nor through a link
                for part in parts:
                    _append(part, file.fileno())
                self.operation("fsync", path)
                os.fsync(file.fileno())
        except OSError as error:
            raise failure("written", path, error) from error

    def replace(self, path: Location, contents: bytes, token: str = "") -> Written:
        """Replaces the contents of a file atomically. If that fails, the file is as before.

        Args:
            path: the file.
            contents: what it contains then.
            token: names what writes it, so that another does not put what is incomplete into its place.
        """
        if isinstance(path, RemotePath):
            return self.write(path, [contents])
        temporary = path.with_name(f".{path.name}.{token}.new" if token else f".{path.name}.new")
        with contextlib.suppress(OSError):  # of a process that was killed
            temporary.unlink()
        written = self.write(temporary, [contents])
        try:
            with _removed_on_failure(temporary):
                self.operation("rename", path)
                os.replace(temporary, path)
        except OSError as error:
            raise failure("replaced", path, error) from error
        self.sync_folder(path.parent)
        return written

    def sync_folder(self, path: Location) -> None:
        """Makes the entries of a folder durable. In a store entries are durable when they appear."""
        if isinstance(path, RemotePath):
            return
        try:
            self.operation("fsync", path)
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise failure("made durable", path, error) from error

    def remove(self, path: Location, *, is_folder: bool = False) -> None:
        """Removes a file, or a folder with its contents, if it exists. For a folder at a URL ``is_folder`` must be
        True, since asking the store would take another request."""
        try:
            self.operation("remove", path)
            if isinstance(path, RemotePath):
                if is_folder:
                    path.remove()
                else:
                    path.unlink(missing_ok=True)
            elif path.is_dir() and not path.is_symlink():
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


def failure(verb: str, path: Location | str, error: OSError) -> CheckpointError:
    """Returns the error for a file that could not be ``verb``: ``"read"``, ``"written"`` and so on."""
    return CheckpointError(
        f"{_name(path)!r} could not be {verb}: {error.strerror or error}.",
        where=str(path),
        fix="check that it exists and may be read by this user, or use another checkpoint"
        if verb == "read"
        else "check that the folder exists, is writable for this user, and has space left",
    )


def _name(path: Location | str) -> str:
    return Path(path).name if isinstance(path, str) else path.name


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


def read_bytes(path: Location) -> bytes:
    """Returns the contents of a file.

    Raises:
        OSError: as for :func:`open_file`; at a URL FileNotFoundError only.
        CheckpointError: if a file at a URL cannot be read for another reason.
    """
    if isinstance(path, RemotePath):
        return path.read_bytes()
    with open(open_file(path), "rb") as file:
        return file.read()


def _in_memory(part: bytes | memoryview | Extent) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a part, a few megabytes at a time."""
    if not isinstance(part, Extent):
        yield part
        return
    size = 0
    try:
        if isinstance(part.path, RemotePath):
            blocks: Iterator[bytes] = part.path.ranges(part.offset, part.size)
        else:
            blocks = _local_ranges(part.path, part.offset, part.size)
        for block in blocks:
            size += len(block)
            yield block
    except OSError as error:
        raise failure("read", part.path, error) from error
    if size < part.size:
        raise too_short(part.path)


def _local_ranges(path: Path, offset: int, size: int) -> Iterator[bytes]:
    with open(open_file(path), "rb", buffering=0) as file:
        file.seek(offset)
        while size and (block := file.read(min(_CHUNK, size))):
            size -= len(block)
            yield block


def too_short(path: Location | str) -> CheckpointError:
    """Returns the error for a file that ends before a range of it does."""
    return CheckpointError(f"{_name(path)!r} ends too early.", where=str(path), why="it was truncated")


def _append(part: bytes | memoryview | Extent, target: int) -> None:
    """Appends to an open file: an extent with copy_file_range(2), which may share blocks instead of copying them, or
    through memory where that is not possible.

    Raises:
        CheckpointError: if the file of an extent ends before the extent does.
    """
    if isinstance(part, Extent) and isinstance(part.path, Path) and hasattr(os, "copy_file_range"):
        with open(open_file(part.path), "rb", buffering=0) as source:
            while part.size:
                try:
                    count = os.copy_file_range(source.fileno(), target, min(BLOCK, part.size), part.offset)
                except OSError as error:
                    if error.errno not in _CANNOT_COPY:
                        raise
                    break
                if not count:
                    raise too_short(part.path)
                part = Extent(part.path, part.offset + count, part.size - count)
            else:
                return
    for block in _in_memory(part):
        left = memoryview(block).cast("B")
        while left:
            left = left[os.write(target, left) :]


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


def checksum_of_block(path: Location, block: int, size: int) -> str:
    """Returns the checksum of one block of a file, using a fixed amount of memory.

    Args:
        path: the file.
        block: number of the block.
        size: bytes of the whole file.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    checksum, left = xxhash.xxh3_64(), min(BLOCK, size - block * BLOCK)
    try:
        if isinstance(path, RemotePath):
            for part in path.ranges(block * BLOCK, left):
                checksum.update(part)
            return str(checksum.hexdigest())
        buffer = bytearray(_CHUNK)
        with open(open_file(path), "rb", buffering=0) as file:
            file.seek(block * BLOCK)
            while left and (count := file.readinto(memoryview(buffer)[: min(left, _CHUNK)])):
                checksum.update(memoryview(buffer)[:count])
                left -= count
    except OSError as error:
        raise failure("read", path, error) from error
    return str(checksum.hexdigest())


def map_range(descriptor: int, offset: int, size: int, access: int = mmap.ACCESS_READ) -> mmap.mmap:
    """Maps a range of an open file into memory, and reads it.

    A mapping of storage that fails ends the process when it is used. The range is therefore brought into memory before,
    which raises an error instead (``MADV_POPULATE_READ``, Linux 5.14). Where the system cannot do that, or the file
    cannot be mapped, the returned memory is not a mapping of the file but a copy.

    Args:
        descriptor: of the file.
        offset: the start of the range, a multiple of ``mmap.ALLOCATIONGRANULARITY``.
        size: of the range, at least 1.
        access: of the mapping.

    Raises:
        EOFError: if the file ends before the range does.
        OSError: if it cannot be read.
    """
    if offset + size > os.fstat(descriptor).st_size:
        raise EOFError
    if sys.platform == "linux":
        try:
            memory = mmap.mmap(descriptor, size, access=access, offset=offset)
            memory.madvise(_POPULATE_READ)
            return memory
        except ValueError:  # the file has become shorter
            raise EOFError from None
        except OSError:  # what is wrong with the file, if anything, reading it says
            pass
    memory = mmap.mmap(-1, size)
    view = memoryview(memory)
    while view:
        count = os.preadv(descriptor, [view], offset)
        if not count:
            raise EOFError
        view, offset = view[count:], offset + count
    return memory


def checksums_of(data: bytes | memoryview) -> tuple[str, ...]:
    """Returns the checksums of a file with the contents ``data``."""
    checksums = _Checksums()
    checksums.update(memoryview(data))
    return checksums.of_blocks()


# ---- Several threads for reading and copying: one thread is slower than memory and than most disks -------------------
Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST = 4  # more threads are not faster


def threads_of(run: Run, folder: Location | None = None) -> int:
    """Returns how many threads this rank may use, such that the threads of all ranks on its machine have a core each.
    Threads that read ``folder`` need none if it is at a URL."""
    if isinstance(folder, RemotePath):
        return THREADS
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
