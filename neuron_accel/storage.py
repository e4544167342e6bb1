# SPDX-License-Identifier: Apache-2.0
"""Folders and files at URLs such as ``s3://bucket/runs``, through fsspec.

An object store has neither folders nor renames: a file is an object, which is written completely or not at all, and a
folder is the common prefix of its objects. :class:`RemotePath` has the methods of :class:`pathlib.Path` that this
package uses, with these differences: an object appears only when all of its bytes are written, and every error but that
a file does not exist is a CheckpointError, since each store has exceptions of its own.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from neuron_accel.errors import CheckpointError, ConfigurationError

_log = logging.getLogger(__name__)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]+)://(.*)", re.DOTALL)
_COLLAPSED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")
_LOCAL = ("file", "local")
_FLAT = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "cos", "obs")
"""Protocols of stores without folders. ``makedirs`` must not be called there: it would create a bucket whose name was
misspelt."""
_ONE_REQUEST = 8 << 20
"""Objects of at most this size in bytes are written, and ranges are read, in one request."""
THREADS = 8
"""Number of threads that send requests. They wait for the network most of the time, so they need no core each."""


def is_url(location: str) -> bool:
    """Whether ``location`` is a URL, not a folder."""
    return "://" in location


def open_store(url: str, where: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it. Nothing is requested from the store.

    Args:
        url: the URL.
        where: the option or command that was given it, for messages.

    Raises:
        ConfigurationError: if fsspec, or the package that it needs for such URLs, is not installed, or it knows no such
            URLs.
    """
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a package is missing, or the protocol is unknown
        is_s3 = url.startswith(("s3://", "s3a://"))
        raise ConfigurationError(
            f"{url} cannot be read: {str(error).rstrip('.')}.",
            where=where,
            why="URLs are read with fsspec, which needs a package for each protocol",
            fix="pip install s3fs" if is_s3 else "install the package that it names, or pass another location",
        ) from None


def last_written(store: Any, path: str, info: Mapping[str, Any]) -> float:
    """Returns when an object was written, in seconds since the epoch by the store's clock: from its entry in a listing,
    if that says so, or asked of the store; 0 if that does not know."""
    listed = next((info[name] for name in ("LastModified", "last_modified", "mtime") if info.get(name)), None)
    if isinstance(listed, (int, float)):
        return float(listed)
    try:
        when = listed if isinstance(listed, datetime) else store.modified(path)
    except NotImplementedError:
        return 0.0
    return float(when.timestamp())


def advice(url: str, right: str) -> str:
    """Returns what to do if a store refuses requests for ``url``, which need the permissions ``right`` on S3."""
    if not url.startswith(("s3://", "s3a://")):
        return ""
    return (
        f" ({right}): AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the instance's role; "
        "`aws sts get-caller-identity` prints the identity in use"
    )


_RIGHTS = "s3:ListBucket and s3:ListBucketMultipartUploads on the bucket, s3:GetObject, s3:PutObject, " + (
    "s3:DeleteObject and s3:AbortMultipartUpload on its objects"
)


@dataclass(frozen=True)
class Stat:
    """Size of a file in bytes, and when it was written, in nanoseconds since the epoch by the store's clock."""

    st_size: int
    st_mtime_ns: int


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder at a URL.

    Args:
        url: the URL, without a slash at its end.
        store: fsspec's file system.
        info: fsspec's description of it, if it was just listed.
    """

    url: str
    store: Any = field(compare=False, repr=False)
    info: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    # ---- names -------------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        name = str(name)
        return RemotePath(f"{self.url}/{name}" if name not in ("", ".") else self.url, self.store)

    @property
    def name(self) -> str:
        return self.url.partition("://")[2].rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        protocol, _, path = self.url.partition("://")
        above = path.rpartition("/")[0]
        return RemotePath(f"{protocol}://{above}", self.store) if above else self

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        if not self.url.startswith(folder.url + "/"):
            raise ValueError(f"{self.url!r} is not in {folder.url!r}")
        return PurePosixPath(self.url[len(folder.url) + 1 :])

    def resolve(self) -> RemotePath:
        return self

    @property
    def _key(self) -> str:
        return str(self.store._strip_protocol(self.url))

    @property
    def _is_flat(self) -> bool:
        return self.url.partition("://")[0] in _FLAT

    # ---- what there is -----------------------------------------------------------------------------------------------
    def _described(self) -> dict[str, Any]:
        """Returns fsspec's description. Raises FileNotFoundError if there is nothing. ``exists`` of fsspec is not used,
        because it takes every error for absence."""
        if self.info is not None:
            return self.info
        with self._explained("read"):
            self.store.invalidate_cache()
            found: dict[str, Any] = self.store.info(self._key)
            return found

    def _is(self, kind: str) -> bool:
        try:
            return bool(self._described()["type"] == kind)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def is_file(self) -> bool:
        return self._is("file")

    def is_dir(self) -> bool:
        return self._is("directory")

    def exists(self) -> bool:
        try:
            return bool(self._described())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def stat(self) -> Stat:
        """Raises FileNotFoundError if there is no such file."""
        info = self._described()
        if info["type"] != "file":
            raise FileNotFoundError(self.url)
        with self._explained("read"):
            return Stat(int(info["size"]), int(last_written(self.store, self._key, info) * 1e9))

    @property
    def size(self) -> int:
        """Size of the file in bytes. Raises FileNotFoundError if there is none."""
        info = self._described()
        if info["type"] != "file":
            raise FileNotFoundError(self.url)
        return int(info["size"])

    def iterdir(self) -> Iterator[RemotePath]:
        """Yields the files and folders in a folder; none if it does not exist."""
        key = self._key.rstrip("/")
        try:
            with self._explained("listed"):
                self.store.invalidate_cache()
                found = self.store.ls(key, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return
        for info in found:
            inside = str(info["name"]).rstrip("/")
            if inside.strip("/") != key.strip("/"):  # the folder itself, as an empty object
                yield replace(self / inside.rpartition("/")[2], info=info)

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yields what in the folder has a name like ``pattern``, which has no slash."""
        return (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    # ---- reading -----------------------------------------------------------------------------------------------------
    def read_bytes(self) -> bytes:
        """Raises FileNotFoundError if there is no such file."""
        with self._explained("read"):
            return bytes(self.store.cat_file(self._key))

    def read_range(self, offset: int, size: int) -> bytes:
        """Returns bytes ``offset`` to ``offset + size`` of the file, or fewer if it ends before. Raises
        FileNotFoundError if there is no such file."""
        if not size:
            return b""
        with self._explained("read"):
            return bytes(self.store.cat_file(self._key, start=offset, end=offset + size))

    def ranges(self, offset: int, size: int) -> Iterator[bytes]:
        """Yields the same bytes, at most 8 MiB at a time."""
        end = offset + size
        while offset < end:
            wanted = min(_ONE_REQUEST, end - offset)
            part = self.read_range(offset, wanted)
            yield part
            if len(part) < wanted:  # a range that begins at the end of the file would be an error
                return
            offset += wanted

    # ---- writing -----------------------------------------------------------------------------------------------------
    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        if not self._is_flat:
            with self._explained("made"):
                self.store.makedirs(self._key, exist_ok=True)

    def put(self, contents: bytes) -> None:
        """Writes a small file in one request. A file that was there stays as it was if that fails."""
        with self._explained("written"):
            self.store.pipe_file(self._key, contents)

    def upload(self, parts: Iterable[bytes | memoryview]) -> None:
        """Writes a file, in several requests if it is large. If that fails, or ``parts`` raises, the upload is aborted,
        and a file that was there stays as it was."""
        left, start = iter(parts), bytearray()
        for part in left:
            start += part
            if len(start) > _ONE_REQUEST:
                break
        else:
            self.put(bytes(start))
            return
        with self._explained("written"):
            # Without `autocommit` the store completes the upload on request, not whenever the file is closed.
            file = self.store.open(self._key, "wb", autocommit=False)
            try:
                file.write(start)
                del start
                for part in left:
                    file.write(part)
                file.close()
                file.commit()
            except BaseException:
                with suppress(Exception):
                    file.discard()
                with suppress(Exception):
                    file.closed = True  # its finalizer would write what is buffered
                raise

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            with self._explained("removed"):
                self.store.rm_file(self._key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Removes a file, or a folder with its contents, if it exists."""
        with suppress(FileNotFoundError), self._explained("removed"):
            self.store.invalidate_cache()
            if self._described()["type"] == "file":
                self.store.rm_file(self._key)
            else:
                self.store.rm(self._key, recursive=True)

    def abort_uploads(self, is_left_over: Callable[[str], bool]) -> None:
        """Aborts uploads of several parts into this folder that were never completed, whose parts a store keeps (and
        charges for) until then.

        S3 lists them. Other stores forget them by themselves.

        Args:
            is_left_over: whether to abort the upload of a file, given its path in the folder.
        """
        if self.url.partition("://")[0] not in ("s3", "s3a") or not hasattr(self.store, "call_s3"):
            return
        with self._explained("cleaned up"):
            bucket, prefix, _ = self.store.split_path(self._key)
            prefix = f"{prefix}/" if prefix else ""
            following: dict[str, str] = {}
            while True:
                try:
                    page = self.store.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **following)
                except PermissionError as error:  # what was asked for is saved
                    _log.warning(
                        "Uploads that an interrupted save has left in %s cannot be found: %s. Permit "
                        "s3:ListBucketMultipartUploads, or let a lifecycle rule abort incomplete uploads.",
                        self.url,
                        error,
                    )
                    return
                for upload in page.get("Uploads", []):
                    if upload["Key"].startswith(prefix) and is_left_over(upload["Key"][len(prefix) :]):
                        with suppress(FileNotFoundError):  # it has been completed or aborted meanwhile
                            self.store.abort_mpu(bucket, upload["Key"], upload["UploadId"])
                if not page.get("IsTruncated"):
                    return
                following = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    @contextmanager
    def _explained(self, verb: str) -> Iterator[None]:
        """A context that turns exceptions of the store into CheckpointError, but for a file that does not exist where
        one is read or removed."""
        try:
            yield
        except (CheckpointError, ConfigurationError):
            raise
        except FileNotFoundError as error:
            if verb not in ("written", "made"):
                raise
            raise CheckpointError(
                f"{self.name!r} could not be {verb}: {self._bucket} does not exist.",
                where=self.url,
                why=str(error) or None,
                fix="check its name, or create it: it is not created here, since the name may be misspelt",
            ) from error
        except NotADirectoryError:
            raise
        except Exception as error:
            denied = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
            said = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
            raise CheckpointError(
                f"{self.name!r} could not be {verb}: {said}.",
                where=self.url,
                why="there are no credentials, or they do not permit it or have expired"
                if denied
                else f"fsspec raised {type(error).__module__}.{type(error).__qualname__}",
                fix=("use credentials that permit it" if denied else "check credentials, region and network")
                + advice(self.url, _RIGHTS),
            ) from error

    @property
    def _bucket(self) -> str:
        protocol, _, path = self.url.partition("://")
        return f"{protocol}://{path.partition('/')[0]}"


@contextmanager
def staged(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """A context with a local folder for libraries that write to such only: ``folder`` itself, or a temporary one if it
    is a URL. :func:`upload_folder` then moves the files there."""
    if isinstance(location(folder), Path):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory(prefix="neuron_accel-") as temporary:
        yield Path(temporary)


def upload_folder(local: Path, folder: str | os.PathLike[str]) -> None:
    """Uploads the files in a temporary folder to a URL; does nothing for a local folder. The configuration of a model
    is last, since without it a folder cannot be loaded.

    Raises:
        CheckpointError: if a file cannot be written. Those that were written before stay.
    """
    target = location(folder)
    if isinstance(target, Path):
        return
    files = sorted((path for path in local.rglob("*") if path.is_file()), key=lambda p: (p.name == "config.json", p))
    for path in files:
        with open(path, "rb") as file:
            (target / path.relative_to(local).as_posix()).upload(iter(lambda: file.read(_ONE_REQUEST), b""))


Location = Path | RemotePath
"""A local folder or file, or one at a URL."""


def location(given: str | os.PathLike[str] | RemotePath) -> Location:
    """Returns the path of a folder or file that was given as text: a URL, or a local path. ``file://`` is a local path.

    Raises:
        ConfigurationError: if there is no package for such a URL, or the URL was given as :class:`pathlib.Path`.
    """
    if isinstance(given, RemotePath):
        return given
    text = os.fspath(given)
    match = _URL.fullmatch(text)
    if match is None:
        if not isinstance(given, str) and _COLLAPSED.match(text):
            raise ConfigurationError(
                f"{text!r} is not a URL: pathlib.Path removes one of its slashes.",
                where=text,
                fix="give the URL as text",
            )
        return Path(text)
    protocol, rest = match[1].lower(), match[2]
    if protocol in _LOCAL:
        return Path(rest)
    if "::" in text or not rest.strip("/"):
        raise ConfigurationError(
            f"{text!r} cannot be the folder of a checkpoint.",
            where=text,
            why="URLs that chain several file systems are not supported" if "::" in text else "it names no folder",
            fix="give one like s3://bucket/runs/state",
        )
    url = f"{protocol}://{rest.rstrip('/')}"
    return RemotePath(url, open_store(url, url)[0])
