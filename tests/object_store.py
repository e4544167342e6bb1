"""A store of objects for fsspec, in folders of this machine, so that several processes share it.

Like S3 it has objects instead of files: they are written as a whole, several parts of an upload become an object when
it is completed, there are no folders and no renames, and what was written is listed. A bucket is a folder whose name
ends in ``.bucket`` and must exist. Each request is recorded, and can fail or end the process.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

PART = 1 << 20


class ObjectStore(AbstractFileSystem):
    protocol = "objects"
    root_marker = "/"
    before_request: ClassVar[Callable[[str, str], None]] = staticmethod(lambda name, key: None)
    requests: ClassVar[list[tuple[str, str, int]]] = []
    """Name, key and bytes of the requests of this process."""

    def _request(self, name: str, path: str, size: int = 0) -> tuple[Path, str]:
        head, mark, key = self._strip_protocol(path).partition(".bucket")
        bucket, key = Path(head + mark), key.strip("/")
        type(self).before_request(name, key)
        type(self).requests.append((name, key, size))
        if not mark or not bucket.is_dir():
            raise FileNotFoundError("The specified bucket does not exist")
        return bucket, key

    def _put(self, bucket: Path, key: str, contents: bytes) -> None:
        temporary = bucket.with_suffix(f".{uuid.uuid4().hex}")
        temporary.write_bytes(contents)
        os.replace(temporary, bucket / quote(key, safe=""))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        assert mode == "overwrite"
        bucket, key = self._request("put", path, len(value))
        self._put(bucket, key, value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        bucket, key = self._request("get", path, (end or 0) - (start or 0))
        with open(bucket / quote(key, safe=""), "rb") as file:
            file.seek(start or 0)
            return file.read() if end is None else file.read(end - (start or 0))

    def _open(
        self, path: str, mode: str = "rb", block_size: Any = None, autocommit: bool = True, **options: Any
    ) -> Any:
        return _Upload(self, path, mode, PART, autocommit=autocommit)

    def _entry(self, bucket: Path, key: str) -> dict[str, Any]:
        found = (bucket / quote(key, safe="")).stat()
        return {"name": f"{bucket}/{key}", "type": "file", "size": found.st_size, "mtime": found.st_mtime}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        bucket, key = self._request("head", path)
        if (bucket / quote(key, safe="")).is_file():
            return self._entry(bucket, key)
        if not key or any(name.startswith(f"{key}/") for name in self._keys(bucket)):
            return {"name": f"{bucket}/{key}", "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def _keys(self, bucket: Path) -> list[str]:
        return sorted(unquote(name) for name in os.listdir(bucket))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        bucket, key = self._request("list", path)
        prefix, found = f"{key}/" if key else "", {}
        for name in self._keys(bucket):
            if name.startswith(prefix):
                child, deeper, _rest = name[len(prefix) :].partition("/")
                full = f"{bucket}/{prefix}{child}"
                found[child] = (
                    {"name": full, "type": "directory", "size": 0} if deeper else self._entry(bucket, prefix + child)
                )
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else [info["name"] for info in found.values()]

    def _rm(self, path: str) -> None:
        bucket, key = self._request("delete", path)
        (bucket / quote(key, safe="")).unlink(missing_ok=True)

    def rm_file(self, path: str) -> None:
        self._rm(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: Any = None) -> None:
        for one in self.find(path):
            self._rm(one)

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def mv(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")


class _Upload(AbstractBufferedFile):
    """An object that is written in parts; they are in a folder beside the bucket until the upload is completed."""

    def _initiate_upload(self) -> None:
        bucket, key = self.fs._request("create upload", self.path)
        self._parts = Path(f"{uploads_of(bucket)}/{uuid.uuid4().hex}")
        self._parts.mkdir(parents=True)
        (self._parts / "upload.json").write_text(json.dumps({"key": key, "pid": os.getpid()}))

    def _upload_chunk(self, final: bool = False) -> bool:
        contents = self.buffer.getvalue()
        self.fs._request("upload part", self.path, len(contents))
        (self._parts / f"{self.offset:020d}").write_bytes(contents)
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        bucket, key = self.fs._request("complete upload", self.path)
        parts = sorted(path for path in self._parts.iterdir() if path.name != "upload.json")
        self.fs._put(bucket, key, b"".join(part.read_bytes() for part in parts))
        shutil.rmtree(self._parts)

    def discard(self) -> None:
        if hasattr(self, "_parts"):
            self.fs._request("abort upload", self.path)
            shutil.rmtree(self._parts)


def uploads_of(bucket: Path) -> Path:
    return bucket.with_suffix(".uploads")


def make_bucket(folder: Path) -> tuple[Path, str]:
    """Makes a bucket in a folder; returns the folder in which its objects are, and its URL."""
    bucket = folder / "a.bucket"
    bucket.mkdir()
    return bucket, f"objects://{bucket}"


def contents_of(bucket: Path) -> dict[str, bytes]:
    """Returns all objects of a bucket, by key."""
    return {unquote(path.name): path.read_bytes() for path in bucket.iterdir()}


def register() -> type[ObjectStore]:
    """Makes ``objects://`` known to fsspec in this process."""
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    ObjectStore.requests.clear()
    ObjectStore.before_request = staticmethod(lambda name, key: None)
    return ObjectStore
