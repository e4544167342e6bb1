"""The entries of a compile cache at an address, such as S3: what there is. Nothing is ever changed there.

An eviction could not keep the promises of :mod:`neuron_accel.neuron.cache_store`. A store of objects knows when one was
written, not when it was last read. It has no lock that is released when a job dies, so it is unknown whose entry is
being compiled. And objects go one by one, with no way to rename a full entry: a job may find half of one.
"""

from __future__ import annotations

import json
import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from neuron_accel.errors import ConfigurationError, UsageError
from neuron_accel.neuron.cache import check_location, is_s3

EXTRA = "neuron-accel[s3]"
DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class RemoteEntry:
    """One compiled graph, or one that failed to compile or is being compiled.

    Args:
        path: its address.
        compiler: the version that compiled it.
        size: bytes of its objects.
        last_written: seconds since the epoch.
        state: "done", "failed" (the failure itself is remembered) or "incomplete".
    """

    path: str
    compiler: str
    size: int
    last_written: float
    state: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def is_remote(location: str) -> bool:
    """Whether ``location`` is an address, not a folder of this machine."""
    return "://" in location


def remote_entries(url: str) -> list[RemoteEntry]:
    """All entries at ``url``, which fsspec can read; the one that was written first comes first.

    Raises:
        ConfigurationError: if there is no cache, it may not be read, or the package that reads such addresses is not
            installed.
    """
    if is_s3(url):
        check_location(url, "--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL")
    with explained(url):
        store, root = _open(url)
        folders = [f for f in store.ls(root, detail=False) if f.rstrip("/").rpartition("/")[2].startswith("neuronxcc-")]
        found = [entry for folder in folders for entry in _read(store, folder.rstrip("/"))]
    return sorted(found, key=lambda entry: (entry.last_written, entry.path))


def _open(url: str) -> tuple[Any, str]:
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a package is missing, or such addresses are unknown
        raise ConfigurationError(
            f"Addresses like {url} cannot be read here: {error}.",
            where="neuron-accel cache",
            why="they are read through fsspec, which has a package for each kind of store",
            fix=f"pip install '{EXTRA}'" if is_s3(url) else "install the package that it names, or name another place",
        ) from None


def _read(store: Any, folder: str) -> Iterator[RemoteEntry]:
    """The entries of one compiler version."""
    objects: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for path, info in store.find(folder, detail=True).items():
        module, _, name = path[len(folder) + 1 :].partition("/")
        if module.startswith("MODULE_") and name and not name.endswith(".lock"):
            objects[module][name] = info
    for module, files in objects.items():
        path = f"{folder}/{module}"
        finished = any(name.endswith(".neff") and info["size"] for name, info in files.items())
        failed = any(name.rpartition("/")[2] == "model.done" for name in files)
        yield RemoteEntry(
            path=store.unstrip_protocol(path),
            compiler=folder.rpartition("/")[2].removeprefix("neuronxcc-"),
            size=sum(info["size"] for info in files.values()),
            last_written=max(_written(store, f"{path}/{name}", info) for name, info in files.items()),
            state="done" if finished else "failed" if failed else "incomplete",
        )


def _written(store: Any, path: str, info: Mapping[str, Any]) -> float:
    """Seconds since the epoch. A listing of S3 says it already; other stores are asked."""
    return (info.get("LastModified") or store.modified(path)).timestamp()


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Says what keeps ``url`` from being read. Each store has exceptions of its own, hence any of them."""
    try:
        yield
    except ConfigurationError:
        raise
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"There is no compile cache at {url}.",
            where="--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL",
            why=f"nothing is there, or the bucket does not exist ({error})",
            fix="name the address that jobs use; the first one writes there",
        ) from None
    except PermissionError as error:
        raise ConfigurationError(
            f"The compile cache at {url} may not be read: {str(error).rstrip('.')}.",
            where=url,
            why="the credentials were refused: these are not allowed to list it, are wrong, or have expired",
            fix="use some that may" + _CREDENTIALS if is_s3(url) else "use credentials that may list it",
        ) from None
    except Exception as error:
        raise ConfigurationError(
            f"The compile cache at {url} cannot be read: {str(error).rstrip('.') or 'it does not say why'}.",
            where=url,
            why=f"{type(error).__module__}.{type(error).__qualname__}, from what reads such addresses",
            fix="give credentials, region and network" + _CREDENTIALS
            if is_s3(url)
            else "check credentials and network",
        ) from error


_CREDENTIALS = (
    " (s3:ListBucket on the bucket is enough): AWS_PROFILE, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the "
    "instance's role; `aws sts get-caller-identity` shows whose are used"
)


# ---- evicting, which is the store's to do ----------------------------------------------------------------------------
def refusal_to_prune(url: str, ttl_seconds: float | None) -> UsageError:
    """Why nothing is evicted at ``url``, and what does it instead.

    Args:
        ttl_seconds: how long entries were to stay; the rule that is proposed keeps them as long, in whole days.

    Raises:
        ConfigurationError: if it begins like an S3 address but is not valid.
    """
    instead = "let the store do it, with a lifecycle rule (which knows no limit to the size)"
    if is_s3(url):
        check_location(url, "--cache-dir")
        instead += _lifecycle(url, 30 if ttl_seconds is None else max(1, math.ceil(ttl_seconds / DAY)))
    return UsageError(
        f"The cache at {url} is not pruned from here.", where="neuron-accel cache prune", why=_WHY, fix=instead
    )


def _lifecycle(url: str, days: int) -> str:
    bucket, _, prefix = url.removeprefix("s3://").rstrip("/").partition("/")
    rule = {
        "ID": "neuron-compile-cache",
        "Status": "Enabled",
        "Filter": {"Prefix": f"{prefix}/neuronxcc-" if prefix else "neuronxcc-"},
        "Expiration": {"Days": days},
    }
    put = ["aws", "s3api", "put-bucket-lifecycle-configuration", "--bucket", bucket]
    put += ["--lifecycle-configuration", json.dumps({"Rules": [rule]})]
    get = ["aws", "s3api", "get-bucket-lifecycle-configuration", "--bucket", bucket]
    return (
        f". One that expires graphs {days} d after they were compiled, used since or not; a job that needs one then "
        f"compiles it again:\n    {shlex.join(put)}\n  It takes the place of all rules that the bucket has: if\n"
        f"    {shlex.join(get)}\n  shows some, add this one to them"
    )


_WHY = (
    "entries in use could not be spared: it knows when objects were written, not when they were last read, has no lock "
    "that is released when a job dies, and deletes object by object, so that a job might find half an entry"
)
