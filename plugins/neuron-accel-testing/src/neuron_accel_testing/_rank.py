# SPDX-License-Identifier: Apache-2.0
"""A rank of :func:`neuron_accel.testing.run_ranks`: it connects, runs the task, and sends the result."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STACK_SIGNAL = signal.SIGUSR1
READY, GO = b"ready", b"go"


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """The task of a rank.

    Args:
        rank: its rank.
        size: number of ranks.
        call: pickle of ``(function, args, kwargs)``.
        backend: name of the torch.distributed backend; None: no process group.
        folder: folder for the rendezvous and for the output of ranks.
        environ: the full environment of the rank.
        timeout: seconds after which the caller ends the rank.
        device: a :class:`~neuron_accel.testing.devices.RankDevice` of another package; None: a device of torch.
        full_exit: whether the rank ends as the interpreter does: waits for threads, runs ``atexit`` handlers, and
            finalises.
    """

    rank: int
    size: int
    call: bytes
    backend: str | None
    folder: str
    environ: dict[str, str]
    timeout: float
    device: Any = None
    full_exit: bool = False

    @property
    def output(self) -> Path:
        """File with its stdout and stderr."""
        return Path(self.folder, f"rank{self.rank}.output")

    @property
    def stack(self) -> Path:
        """File to which it writes its stack on :data:`STACK_SIGNAL`."""
        return Path(self.folder, f"rank{self.rank}.stack")


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The result of a rank.

    Args:
        payload: pickle of the result, or of the exception.
        traceback: text of the traceback; None without an exception.
    """

    payload: bytes
    traceback: str | None = None


class RemoteError(Exception):
    """Replaces an exception that cannot be pickled; the message begins with the name of its type."""


def main(task: RankTask, connection: Connection) -> None:
    """Connects, runs the task, sends the result, and ends.

    All ranks begin, and if none fails also end, when the caller sends a message: a rank that ends closes its sockets,
    while its peers may still be connecting or reading. A rank that fails ends at once, so that its peers notice.
    """
    _isolate(task)
    try:
        _connect(task)
        connection.send_bytes(READY)
        connection.recv_bytes()
        report = RankReport(payload=_run(task))
    except BaseException as error:
        _send(connection, RankReport(payload=pickle_error(error), traceback=traceback.format_exc()))
        os._exit(1)
    _send(connection, report)
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()
    if task.full_exit:
        ctypes.pythonapi.Py_Exit(0)


def _isolate(task: RankTask) -> None:
    """Gives this process its own session (so that it can be ended with all its children), output, environment and
    random state, and ends it with the caller; undoes the differences between a forked process and a rank of
    torchrun."""
    os.setsid()
    descriptor = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    stack = os.open(task.stack, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    threading.Thread(target=_die_with_caller, args=(task.folder,), name="watch-caller", daemon=True).start()
    settled = {name: os.environ[name] for name in ("USE_TORCH_XLA",) if name in os.environ}
    os.environ.clear()
    os.environ.update({**settled, **task.environ})
    multiprocessing.set_start_method(None, force=True)  # the default, for data loader workers
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the standard library reseeds its generators after a fork


def _die_with_caller(folder: str) -> None:
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        shutil.rmtree(folder, ignore_errors=True)  # which a killed caller has not done
        os.killpg(0, signal.SIGKILL)


def _run(task: RankTask) -> bytes:
    function, args, kwargs = pickle.loads(task.call)
    if task.backend == "cuda":
        from . import cuda_ranks

        return cuda_ranks.dumps(function(*args, **kwargs))
    return pickle.dumps(function(*args, **kwargs))


def _connect(task: RankTask) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if task.backend is None:
        return
    if task.device is not None:
        task.device.enter(Path(task.folder))
    if task.backend == "cuda":
        from . import cuda_ranks

        store = dist.FileStore(os.path.join(task.folder, "store"), task.size)
        cuda_ranks.connect(task.rank, task.size, store, timedelta(seconds=task.timeout + 60))
        return
    dist.init_process_group(
        task.backend,
        store=dist.FileStore(os.path.join(task.folder, "store"), task.size),
        rank=task.rank,
        world_size=task.size,
        timeout=timedelta(seconds=task.timeout + 60),  # the caller ends the rank before, and prints its stack
    )
    os.ftruncate(1, 0)  # gloo of torch 2.9 prints every connection to stdout


def pickle_error(error: BaseException) -> bytes:
    """Pickles an exception, or a :class:`RemoteError` if it cannot be pickled."""
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return pickle.dumps(RemoteError(f"{type(error).__name__}: {error}"))
    return payload


def _send(connection: Connection, report: RankReport) -> None:
    # Plain pickle, since multiprocessing passes tensors in shared memory, which is freed with the rank.
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps((report.payload, report.traceback), protocol=pickle.HIGHEST_PROTOCOL))


def read_report(data: bytes) -> tuple[Any, str | None]:
    """Decodes a report: the result or exception of a rank, and the text of the traceback or None."""
    payload, text = pickle.loads(data)
    return pickle.loads(payload), text
