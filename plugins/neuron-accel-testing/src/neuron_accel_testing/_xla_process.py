# SPDX-License-Identifier: Apache-2.0
"""The process whose threads are the XLA ranks of a test."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from neuron_accel.backends.xla_channel import Meeting, run_in_threads

from ._rank import STACK_SIGNAL, pickle_error


@dataclass(frozen=True, kw_only=True)
class XlaTask:
    """The task of the process.

    Args:
        size: number of ranks.
        call: pickle of ``(function, args, kwargs)``.
        environ: the full environment.
        timeout: seconds after which the caller ends the process.
        grace: seconds that other ranks have once one has failed.
        syspath: where modules are found.
        main: how to import the caller's script, see :func:`neuron_accel.testing.xla_ranks.run_xla_ranks`.
    """

    size: int
    call: bytes
    environ: dict[str, str]
    timeout: float
    grace: float
    syspath: list[str]
    main: dict[str, str]


def main(folder: str) -> NoReturn:
    """Runs the task in ``folder``, leaves a report of each rank there, and ends the process."""
    task = enter_task(folder)
    try:
        import_script(task)
        _run(task, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # the runtime's threads need not be waited for


def enter_task(folder: str) -> XlaTask:
    """The task in ``folder``, after which this process, just forked, has its own session, output and environment."""
    os.setsid()
    descriptor = os.open(Path(folder, "output"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target in (1, 2):
        os.dup2(descriptor, target)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        task: XlaTask = pickle.loads(Path(folder, "task").read_bytes())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(task.timeout) + 30)  # should the caller be gone
        stack = os.open(Path(folder, "stack"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        faulthandler.enable(file=2)
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ.clear()
        os.environ.update({"XLA_FLAGS": flags, **task.environ})
        sys.path[:] = task.syspath
        return task
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def import_script(task: XlaTask) -> None:
    """Makes the caller's script ``__main__``, as multiprocessing does for processes that it starts."""
    if not task.main:
        return
    process: Any = multiprocessing.current_process()
    process._inheriting = True  # run_ranks refuses to start ranks meanwhile
    try:
        multiprocessing.spawn.prepare(task.main)
    finally:
        del process._inheriting


def _run(task: XlaTask, folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    meeting = Meeting(task.size, timeout=task.timeout)

    def rank(index: int) -> None:
        try:
            function, args, kwargs = pickle.loads(task.call)
            report: Any = (pickle.dumps(function(*args, **kwargs)), None)
        except BaseException as error:
            report = (pickle_error(error), traceback.format_exc())
            meeting.abort()
            threading.Thread(target=_leave, args=(task.grace,), daemon=True).start()
        partial = Path(folder, f"report{index}.partial")
        partial.write_bytes(pickle.dumps(report))
        partial.rename(Path(folder, f"report{index}"))

    run_in_threads(rank, meeting)


def _leave(after: float) -> None:
    """A rank has failed; others may wait for it in a collective that nothing interrupts."""
    time.sleep(after)
    os._exit(1)
