"""The lock of a save, by which a second run that saves into the same folder is told.

It is a file in the folder, made exclusively, which file systems that several machines share guarantee too. It names the
process that saves, and is touched as long as that process lives: the lock of a process that was killed is recognised by
its process id on the same machine, and elsewhere by its age on the clock of the file system.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuron_accel.checkpoint.format.files import Files, failure
from neuron_accel.errors import CheckpointError

if TYPE_CHECKING:
    import psutil

NAME = ".saving.json"
TOUCH_S = 10.0
STALE_S = 60.0
"""Seconds after which a lock of another machine that has not been touched is considered left over."""
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
        """Makes the lock; one that was left over is removed.

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
                if found is not None and self._holds(found):
                    break
                self._take_away(found)
        except OSError as error:
            raise failure("written", self._path, error) from error
        other = _read(self._path) or {}
        raise CheckpointError(
            f"{describe(other)} is saving into this folder.",
            where=str(self._path.parent),
            why=f"the files of both checkpoints would be mixed; {self._path.name} was made at {other.get('time', '?')}",
            fix="give each run a folder of its own, or wait until the other save has ended",
        )

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
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        try:
            os.write(descriptor, json.dumps({**this_process(), "time": now, "token": self._token}).encode())
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

    def _holds(self, found: dict[str, Any]) -> bool:
        """Whether the process that made a lock may still be saving."""
        import psutil

        if _is_near(found, this_process()):
            try:
                process = psutil.Process(int(found["pid"]))
                return process.status() != psutil.STATUS_ZOMBIE and _started_at(found, _started(process))
            except (psutil.Error, KeyError, TypeError, ValueError):
                return False
        probe = self._path.with_name(f"{NAME}.{self._token}")
        try:
            probe.touch()  # by the clock of the file system, which may be another machine's
            return probe.stat().st_mtime - self._path.stat().st_mtime < STALE_S
        except FileNotFoundError:
            return False
        finally:
            probe.unlink(missing_ok=True)

    def _take_away(self, found: dict[str, Any] | None) -> None:
        """Removes a lock that was left over, but not one that another process has made since."""
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
