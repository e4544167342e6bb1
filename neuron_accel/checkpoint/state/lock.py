# SPDX-License-Identifier: Apache-2.0
"""The lock of a save: the file ``.saving.json`` in the folder, a mark that names the process that saves.

What it protects against: on one machine never two processes save into one folder, since the system locks the file for
one of them and frees it when that one ends, however it ends. The other is told at once.

Between machines the process renews its mark. Another that finds it waits until it is renewed, and is told, or for
``WAIT_S``, and takes it over: that is all that the mark of a lost machine costs, and one of the same run costs nothing.
Where neither the system nor the file server locks the file (object stores, some shared file systems; NFSv4 and Lustre
with ``flock`` do), two that begin in the same instant do not see each other, but one of them finds that the mark is not
its own before it writes the manifest, and raises.

What it does not protect against: a process of another machine that is suspended between this look and the manifest may
replace what another has written meanwhile.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from neuron_accel.checkpoint.format.files import Files, failure
from neuron_accel.engine.plan.restart import RUN
from neuron_accel.errors import CheckpointError, NeuronAccelError
from neuron_accel.storage import Location, RemotePath

NAME = ".saving.json"
RENEW_S, WAIT_S = 10.0, 30.0
_CANNOT_LOCK = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


def this_process() -> dict[str, Any]:
    """Names this process among those of all machines."""
    namespace = os.readlink("/proc/self/ns/pid") if os.path.exists("/proc/self/ns/pid") else ""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {
        "host": socket.gethostname(),
        "boot": boot.read_text().strip() if boot.exists() else "",
        "namespace": namespace,
        "pid": os.getpid(),
    }


def describe(process: dict[str, Any]) -> str:
    """A process of :func:`this_process` as text."""
    return f"process {process.get('pid', '?')} on {process.get('host', 'an unknown machine')}"


class SaveLock:
    """The lock of a save into ``folder``, for the main process of a run."""

    def __init__(self, folder: Location, files: Files) -> None:
        self._path, self._files, self._token = folder / NAME, files, uuid.uuid4().hex
        self._file: IO[bytes] | None = None
        self._over, self._thread = threading.Event(), threading.Thread(target=self._renew, daemon=True)

    def acquire(self) -> None:
        """Acquires the lock. One that is left over is taken over.

        Raises:
            CheckpointError: if another process is saving into the folder, or the lock cannot be written.
        """
        try:
            self._files.operation("lock", self._path)
            while not self._is_free():
                pass
            self._write()
        except OSError as error:
            raise failure("written", self._path, error) from error
        self._thread.start()

    def confirm(self) -> None:
        """Checks that the lock is still this object's.

        Raises:
            CheckpointError: if another run has taken it, or it cannot be read.
        """
        try:
            is_own = self._is_own()
        except OSError as error:
            raise failure("read", self._path, error) from error
        if not is_own:
            raise CheckpointError(
                "Another run has taken this folder over during the save.",
                where=str(self._path),
                why="it began in the same instant, or this process was suspended for long",
                fix="give each run a folder of its own",
            )

    @property
    def was_taken(self) -> bool:
        """Whether another process has taken the lock since it was acquired, or that is not known. It may have finished
        its save, and removed its mark."""
        try:
            return self._thread.ident is not None and not self._is_own()
        except (OSError, NeuronAccelError):
            return True

    def release(self) -> None:
        """Removes the lock, if this object has it."""
        if self._thread.ident is not None:
            self._over.set()
            self._thread.join()
            try:
                is_own = self._is_own()
            except (OSError, NeuronAccelError):
                is_own = True  # as it was before
            with suppress(OSError, NeuronAccelError):
                if is_own:
                    self._path.unlink()
        if self._file is not None:
            self._file.close()

    def is_held(self, newest: Location) -> bool:
        """Whether a process may be saving into the folder. The age of a mark is the time from it to ``newest``, a file
        that was written just now, by the clock of the file system."""
        try:
            found = _read(self._path)
            locked = None if found is None else self._lock()
            age = newest.stat().st_mtime_ns - self._path.stat().st_mtime_ns
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
        finally:
            self.release()
        return locked is False or (not _is_left_over(found or {}, locked) and age < 2e9 * WAIT_S)

    def _is_free(self) -> bool:
        """Whether this process may write the mark now; False if that is to be asked again."""
        locked, found = self._lock(), _read(self._path) or {}
        if _is_left_over(found, locked):
            if locked is False:  # a child of the process that has ended, or a file server, still keeps the file locked
                self._path.unlink(missing_ok=True)
            return locked is not False
        if found and not (locked is False and _is_near(found)):
            before, until = self._state(), time.monotonic() + WAIT_S
            while (now := self._state()) == before:
                if time.monotonic() > until:
                    if locked is False:
                        self._path.unlink(missing_ok=True)
                    return locked is not False
                time.sleep(RENEW_S / 10)
            if now is None:
                return False
        raise CheckpointError(
            f"{describe(found)} is saving into this folder.",
            where=str(self._path.parent),
            why=f"the files of both checkpoints would be mixed; {NAME} was made at {found.get('time', '?')}",
            fix="give each run a folder of its own, or wait until the other save has ended",
        )

    def _lock(self) -> bool | None:
        """Whether the system has locked the file for this process; None if it does not do that."""
        while not isinstance(self._path, RemotePath):
            self._file = open(self._path, "ab")  # noqa: SIM115 (as long as it is open, it is locked)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno not in _CANNOT_LOCK:
                    raise
                return None
            with suppress(FileNotFoundError):  # who had it has removed it
                if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                    return True
        return None

    def _write(self) -> None:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        mark = json.dumps({**this_process(), "run": os.environ.get(RUN), "time": now, "token": self._token}).encode()
        if isinstance(self._path, RemotePath):
            self._path.put(mark)
            return
        try:
            self._path.write_bytes(mark)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise

    def _renew(self) -> None:
        while not self._over.wait(RENEW_S):
            with suppress(OSError, NeuronAccelError):
                if self._is_own():
                    self._write() if isinstance(self._path, RemotePath) else os.utime(self._path)

    def _is_own(self) -> bool:
        return (_read(self._path) or {}).get("token") == self._token

    def _state(self) -> tuple[Any, int] | None:
        """What changes when the mark is renewed; None without one."""
        try:
            return _read(self._path), self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None


def _is_left_over(found: dict[str, Any], locked: bool | None) -> bool:
    """Whether the process that made a mark has ended, as the system says on this machine. On others one of an earlier
    start of this run has: its launcher has restarted it without waiting for a machine that is lost."""
    if not _is_near(found):
        is_of_this_run = found.get("run") is not None and found["run"] == os.environ.get(RUN)
        return is_of_this_run or (not found and locked is not False)
    if locked is True or found.get("namespace") != this_process()["namespace"]:
        return locked is True
    try:
        os.kill(found["pid"], 0)
    except PermissionError:
        return False
    except (OSError, KeyError, TypeError, OverflowError):
        return True
    return False


def _is_near(found: dict[str, Any]) -> bool:
    """Whether a mark is one of this machine: by its name, which containers may not share, or by its kernel."""
    here = this_process()
    return any(here[key] and found.get(key) == here[key] for key in ("host", "boot"))


def _read(path: Location) -> dict[str, Any] | None:
    """The content of a mark, empty if it is not complete; None if there is none."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
