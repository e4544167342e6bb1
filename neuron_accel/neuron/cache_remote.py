# SPDX-License-Identifier: Apache-2.0
"""Lists the entries of a compile cache on S3 or at another URL. The cache is never changed.

Evicting entries safely, as :mod:`neuron_accel.neuron.cache_store` does in a folder, is not possible on an object store.
It records when an object was written, but not when it was last read. It has no locks that are released when a job dies,
so entries that are being compiled are not known. And objects are deleted one by one, so that a job may read part of an
entry.
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
from neuron_accel.storage import advice, last_written, open_store

DAY = 86400.0


@dataclass(frozen=True, kw_only=True)
class RemoteEntry:
    """A graph that was compiled, failed to compile, or is being compiled.

    Args:
        path: its URL.
        compiler: version of the compiler.
        size: bytes of its objects.
        last_written: when an object was last written, in seconds since the epoch.
        state: "done", "failed" (a cached failure) or "incomplete".
    """

    path: str
    compiler: str
    size: int
    last_written: float
    state: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def remote_entries(url: str) -> list[RemoteEntry]:
    """Lists all entries at ``url``, read with fsspec, in the order in which they were written.

    Raises:
        ConfigurationError: if there is no cache, access is denied, or the package for such URLs is not installed.
    """
    if is_s3(url):
        check_location(url, "--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL")
    with explained(url):
        store, root = open_store(url, "neuron-accel cache")
        folders = [f for f in store.ls(root, detail=False) if f.rstrip("/").rpartition("/")[2].startswith("neuronxcc-")]
        found = [entry for folder in folders for entry in _read(store, folder.rstrip("/"))]
    return sorted(found, key=lambda entry: (entry.last_written, entry.path))


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
            last_written=max(last_written(store, f"{path}/{name}", info) for name, info in files.items()),
            state="done" if finished else "failed" if failed else "incomplete",
        )


@contextmanager
def explained(url: str) -> Iterator[None]:
    """A context manager that turns any exception into a ConfigurationError, since each store has its own classes."""
    try:
        yield
    except ConfigurationError:
        raise
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"There is no compile cache at {url}.",
            where="--cache-dir, NEURON_CC_FLAGS or NEURON_COMPILE_CACHE_URL",
            why=f"there are no objects, or the bucket does not exist ({error})",
            fix="pass the URL that jobs use; the first job creates the cache",
        ) from None
    except PermissionError as error:
        raise ConfigurationError(
            f"Access to the compile cache at {url} was denied: {str(error).rstrip('.')}.",
            where=url,
            why="the credentials do not permit listing it, are wrong, or have expired",
            fix="use credentials that permit listing it" + advice(url, _RIGHTS),
        ) from None
    except Exception as error:
        raise ConfigurationError(
            f"The compile cache at {url} cannot be read: {str(error).rstrip('.') or 'no reason given'}.",
            where=url,
            why=f"fsspec raised {type(error).__module__}.{type(error).__qualname__}",
            fix="check credentials, region and network" + advice(url, _RIGHTS),
        ) from error


_RIGHTS = "s3:ListBucket on the bucket is enough"


# ---- evicting, by a lifecycle rule of the store ----------------------------------------------------------------------
def refusal_to_prune(url: str, ttl_seconds: float | None) -> UsageError:
    """The error for an attempt to evict entries at ``url``, with a lifecycle rule for S3 as the fix.

    Args:
        url: location of the cache.
        ttl_seconds: time after which the rule expires an entry, rounded up to days; None: 30 days.

    Raises:
        ConfigurationError: if ``url`` begins with ``s3://`` but is not a valid S3 address.
    """
    instead = "use a lifecycle rule of the store (which cannot limit the size)"
    if is_s3(url):
        check_location(url, "--cache-dir")
        instead += _lifecycle(url, 30 if ttl_seconds is None else max(1, math.ceil(ttl_seconds / DAY)))
    return UsageError(f"The cache at {url} cannot be pruned.", where="neuron-accel cache prune", why=_WHY, fix=instead)


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
        f". This one expires graphs {days} d after they were compiled, whether used since or not; a job that needs one "
        f"then compiles it again:\n    {shlex.join(put)}\n  It replaces all rules of the bucket: if\n"
        f"    {shlex.join(get)}\n  prints any, add this rule to them"
    )


_WHY = (
    "entries in use are not known: the store records when objects were written, not when they were last read, has no "
    "locks that are released when a job dies, and deletes object by object, so that a job may read part of an entry"
)
