# SPDX-License-Identifier: Apache-2.0
"""The folder in memory with the last snapshot for restarted ranks; it is removed with the launcher."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from neuron_accel.checkpoint.state.memory import SNAPSHOTS

MEMORY = Path("/dev/shm")
_PREFIX = "neuron_accel_snapshots_"
_OWNER = "owner.lock"


@contextmanager
def snapshot_folder(restarts: int, memory: Path = MEMORY) -> Iterator[Path | None]:
    """A context in which ranks find a folder in memory by :data:`SNAPSHOTS`, if they would be restarted. The
    folder is removed at the end, and so are the folders of launchers that were killed.

    Args:
        restarts: how often the ranks are restarted.
        memory: a file system in memory.
    """
    _remove_left(memory)
    before = os.environ.pop(SNAPSHOTS, None)
    if restarts < 1 or not os.access(memory, os.W_OK):
        yield None
        return
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=memory))
    descriptor = os.open(hidden / _OWNER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    folder = memory / hidden.name[1:]
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel releases it however this process ends
        hidden.rename(folder)
        os.environ[SNAPSHOTS] = str(folder)
        yield folder
    finally:
        os.environ.pop(SNAPSHOTS, None)
        if before is not None:
            os.environ[SNAPSHOTS] = before
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left(memory: Path) -> None:
    """Removes this user's folders whose launcher does not run any more."""
    for folder in memory.glob(f"{_PREFIX}*") if memory.is_dir() else ():
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
