# SPDX-License-Identifier: Apache-2.0
"""The lock of a save, with which a second run that saves into the same folder raises an error.

In a folder it is a file, made exclusively, which file systems that several machines share guarantee too. It names the
process that saves, and is touched as long as that process lives: the lock of a process that was killed is recognised by
its process id on the same machine, and elsewhere by its age on the clock of the file system.

An object store has neither locks nor, in general, exclusive creation. There it is a lease: each save writes an object
of its own and then lists those of others. Of two saves at least one sees the other, since an object that was written is
listed from then on.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import Files, failure
from neuron_accel.engine.plan.restart import RUN
from neuron_accel.errors import CheckpointError, NeuronAccelError
from neuron_accel.storage import Location, RemotePath

if TYPE_CHECKING:
    import psutil

NAME = ".saving.json"
TOUCH_S = 10.0
STALE_S = 60.0
"""Seconds after which a lock of another machine that has not been renewed is considered stale."""
_LONGEST = 4096


def this_process() -> dict[str, Any]:
    """Identifies this process among those of all machines: host name, namespace of process ids, id and start, in
    seconds since the machine was booted."""
    import psutil  # so that importing the package does not

    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    process = psutil.Process()
    return {
        "host": socket.gethostname(),
        "namespace": namespace,
        "pid": process.pid,
        "started": _started(process),
    }


def _started(process: psutil.Process) -> float:
    """Seconds from the start of the machine to that of the process. psutil adds the time of the former, which changes
    when the clock is set, as it may be in days of training."""
    import psutil

    return round(process.create_time() - psutil.boot_time(), 1)


def is_this_process(found: dict[str, Any]) -> bool:
    """Whether :func:`this_process` of this process once returned ``found``."""
    here = this_process()
    return _is_near(found, here) and found.get("pid") == here["pid"] and _started_at(found, here["started"])


def _is_near(found: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether the process id in ``found`` is one among those of this process."""
    return bool(found) and all(found.get(key) == here[key] for key in ("host", "namespace"))


def _started_at(found: dict[str, Any], started: float) -> bool:
    try:
        return abs(float(found["started"]) - started) < 2
    except (KeyError, TypeError, ValueError):
        return False


def describe(process: dict[str, Any]) -> str:
    """A process of :func:`this_process` as text."""
    return f"process {process.get('pid', '?')} on {process.get('host', 'an unknown machine')}"


class SaveLock:
    """The lock of a save into ``folder``, for the main process of a run."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._path, self._files, self._token = folder / NAME, files, uuid.uuid4().hex
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Acquires the lock; a stale one is removed.

        Raises:
            CheckpointError: if another process is saving into the folder, or the lock cannot be written.
        """
        try:
            self._files.operation("lock", self._path)
            for _ in range(3):
                if self._make():
                    self._thread = threading.Thread(target=self._touch, name="neuron_accel-lock", daemon=True)
                    self._thread.start()
                    return
                found = _read(self._path)
                if found is not None and self.is_held_by(found):
                    break
                self._take_away(found)
        except OSError as error:
            raise failure("written", self._path, error) from error
        raise _is_saving(_read(self._path) or {}, self._path)

    def confirm(self) -> None:
        """Checks that the lock is still this object's.

        Raises:
            CheckpointError: if another run has taken it, because it was not touched for long.
        """
        try:
            found = _read(self._path)
        except OSError as error:
            raise failure("read", self._path, error) from error
        if found is None or found.get("token") != self._token:
            raise _was_taken(self._path)

    def release(self) -> None:
        """Removes the lock, if this object has made it."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        with contextlib.suppress(OSError):
            if (_read(self._path) or {}).get("token") == self._token:
                os.unlink(self._path)

    def _make(self) -> bool:
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, _note(self._token))
        except OSError:
            os.unlink(self._path)
            raise
        finally:
            os.close(descriptor)
        return True

    def _touch(self) -> None:
        while not self._over.wait(TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def is_held_by(self, found: dict[str, Any]) -> bool:
        """Whether the process that made a lock may still be saving."""
        lives = _lives(found)
        if lives is not None:
            return lives
        probe = self._path.with_name(f"{NAME}.{self._token}")
        try:
            probe.touch()  # by the clock of the file system, which may be another machine's
            return probe.stat().st_mtime - self._path.stat().st_mtime < STALE_S
        except FileNotFoundError:
            return False
        finally:
            probe.unlink(missing_ok=True)

    def _take_away(self, found: dict[str, Any] | None) -> None:
        """Removes a stale lock, but not one that another process has acquired since."""
        aside = self._path.with_name(f"{NAME}.{self._token}")
        try:
            os.rename(self._path, aside)
            if _read(aside) != found:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self._path)
        except FileNotFoundError:
            return
        finally:
            aside.unlink(missing_ok=True)


class Lease:
    """The lock of a save into ``folder``, which is at a URL, for the main process of a run."""

    def __init__(self, folder: RemotePath, files: Files) -> None:
        self._folder, self._files, self._token = folder, files, uuid.uuid4().hex
        self._path = folder / f"{_STEM}{self._token}.json"
        self._over, self._is_lost = threading.Event(), False
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Writes the lease; stale ones are removed.

        Raises:
            CheckpointError: if another process is saving into the folder, or the lease cannot be written.
        """
        other: tuple[RemotePath, dict[str, Any]] | None = None
        for attempt in range(3):  # two that begin at the same time see each other, and both withdraw
            if attempt:
                time.sleep(random.uniform(0.1, 1))
            self._files.replace(self._path, _note(self._token))
            try:
                other = self._other()
            except BaseException:
                self._remove(self._path)
                raise
            if other is None:
                self._thread = threading.Thread(target=self._renew, name="neuron_accel-lease", daemon=True)
                self._thread.start()
                return
            self._remove(self._path)
        assert other is not None
        raise _is_saving(other[1], other[0])

    def confirm(self) -> None:
        """Checks that no other run has taken the folder over, because this lease was not renewed for long.

        Raises:
            CheckpointError: if one has, or the lease cannot be read.
        """
        if self._is_lost or not self._path.is_file():
            raise _was_taken(self._path)

    def release(self) -> None:
        """Removes the lease, if this object has written it."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join()
        self._thread = None
        self._remove(self._path)

    def _other(self) -> tuple[RemotePath, dict[str, Any]] | None:
        """Returns the lease of another process that may be saving, or None. Removes those of processes that are not."""
        for path, found in _leases(self._folder):
            if found.get("token") == self._token or path.name == self._path.name:
                continue
            lives = _lives(found)
            if lives is None:
                try:
                    lives = self._path.stat().st_mtime_ns - path.stat().st_mtime_ns < STALE_S * 1e9
                except FileNotFoundError:  # it has just been released
                    continue
            if lives:
                return path, found
            self._files.remove(path)
        return None

    def _renew(self) -> None:
        while not self._over.wait(TOUCH_S):
            with contextlib.suppress(NeuronAccelError):
                if not self._path.is_file():
                    self._is_lost = True
                    return
                self._path.put(_note(self._token))

    @staticmethod
    def _remove(path: RemotePath) -> None:
        with contextlib.suppress(NeuronAccelError):
            path.unlink(missing_ok=True)


_STEM = ".saving."


def _leases(folder: RemotePath) -> Iterator[tuple[RemotePath, dict[str, Any]]]:
    for path in folder.glob(f"{_STEM}*.json"):
        try:
            found = json.loads(path.read_range(0, _LONGEST))
        except FileNotFoundError:
            continue
        except ValueError:
            found = {}
        yield path, found if isinstance(found, dict) else {}


def lock_of(folder: Location, files: Files) -> SaveLock | Lease:
    """Returns the lock of a save into ``folder``, not acquired yet."""
    return Lease(folder, files) if isinstance(folder, RemotePath) else SaveLock(folder, files)


def is_lock(name: str) -> bool:
    """Whether a file of this name is a lock or a lease."""
    return name == NAME or (name.startswith(_STEM) and name.endswith(".json"))


def is_being_saved(folder: Location) -> bool:
    """Whether a process may be saving into a folder, as far as its lock says."""
    if not isinstance(folder, RemotePath):
        found = _read(folder / NAME)
        return found is not None and SaveLock(folder, Files()).is_held_by(found)
    for path, found in _leases(folder):
        lives = _lives(found)
        if lives is None:
            probe = folder / f".probe.{uuid.uuid4().hex}"
            probe.put(b"")  # by the clock of the store
            try:
                lives = probe.stat().st_mtime_ns - path.stat().st_mtime_ns < STALE_S * 1e9
            except FileNotFoundError:
                lives = False
            finally:
                probe.unlink(missing_ok=True)
        if lives:
            return True
    return False


def _lives(found: dict[str, Any]) -> bool | None:
    """Whether the process that made a lock lives; None if it is one of another machine.

    On another machine the main process of an earlier start of this run, which its launcher has restarted without
    waiting for a machine that is lost, counts as dead: should it live, it finds that its lock was taken.
    """
    import psutil

    if not _is_near(found, this_process()):
        return False if found.get("run") and found["run"] == os.environ.get(RUN) else None
    try:
        process = psutil.Process(int(found["pid"]))
        return process.status() != psutil.STATUS_ZOMBIE and _started_at(found, _started(process))
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def _note(token: str) -> bytes:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return json.dumps({**this_process(), "run": os.environ.get(RUN), "time": now, "token": token}).encode()


def _is_saving(other: dict[str, Any], path: Location) -> CheckpointError:
    return CheckpointError(
        f"{describe(other)} is saving into this folder.",
        where=str(path.parent),
        why=f"the files of both checkpoints would be mixed; {path.name} was made at {other.get('time', '?')}",
        fix="give each run a folder of its own, or wait until the other save has ended",
    )


def _was_taken(path: Location) -> CheckpointError:
    return CheckpointError(
        "Another run has taken this folder over during the save.",
        where=str(path),
        why=f"its lock was not renewed for {STALE_S:.0f} s, as if this process had ended",
        fix="give each run a folder of its own",
    )


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a lock, empty if it is not complete; None if there is none."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LONGEST))
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
