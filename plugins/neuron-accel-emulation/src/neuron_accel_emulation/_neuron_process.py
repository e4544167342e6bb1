# SPDX-License-Identifier: Apache-2.0
"""The processes that are the ranks of an emulated Neuron device, and the process that forks them."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from neuron_accel.testing.devices import STACK_SIGNAL, XlaTask, enter_task, import_script, pickle_error

_PR_SET_PDEATHSIG = 1


def main(folder: str) -> NoReturn:
    """Forks the ranks of the task in ``folder``, which write reports to it, and exits when all have ended."""
    task = enter_task(folder)
    # Ranks end together, once all have reported: a peer may still be reading from one that has finished.
    waiting, go = os.pipe()
    ranks = [_fork(task, folder, rank, waiting, go) for rank in range(task.size)]
    os.close(waiting)
    faulthandler.unregister(STACK_SIGNAL)  # that of the ranks, which register their own
    signal.signal(STACK_SIGNAL, lambda *_: _signal(ranks, STACK_SIGNAL))
    late = _await_reports(task, Path(folder), ranks)
    os.close(go)
    _signal(late, signal.SIGKILL)  # they wait for a failed rank and would not end
    os._exit(_await_ends([pid for pid in ranks if pid not in late]))


def _fork(task: XlaTask, folder: str, rank: int, waiting: int, go: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(go)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _become_rank(task, rank)
        _report(task, Path(folder), rank)
        os.read(waiting, 1)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without waiting for threads of the runtime


def _become_rank(task: XlaTask, rank: int) -> None:
    """Sets the environment of a rank, as the launcher does, and then does what importing torch_xla in it would do:
    it was imported before the fork, in another environment."""
    import torch
    from torch_xla import runtime
    from torch_xla._internal import neuron
    from torch_xla.experimental import plugins

    number = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.clear()
    os.environ.update({**number, **task.environ})
    os.environ.setdefault("NEURON_LIBRARY_PATH", os.environ["NEURON_ACCEL_EMULATED_DEVICE"])
    plugins.use_dynamic_plugins()
    neuron.set_envvar_defaults()
    neuron.configure_pjrt_environment()
    runtime._maybe_select_default_device()
    torch.set_num_threads(1)
    import_script(task)


def _report(task: XlaTask, folder: Path, rank: int) -> None:
    try:
        function, args, kwargs = pickle.loads(task.call)
        report: Any = (pickle.dumps(function(*args, **kwargs)), None)
    except BaseException as error:
        ended_well = isinstance(error, SystemExit) and error.code in (None, 0)
        report = (pickle.dumps(None), None) if ended_well else (pickle_error(error), traceback.format_exc())
    sys.stdout.flush()
    partial = folder / f"report{rank}.partial"
    partial.write_bytes(pickle.dumps(report))
    partial.rename(folder / f"report{rank}")
    if report[1] is not None:
        os._exit(1)  # at once, so that the others notice


def _await_reports(task: XlaTask, folder: Path, ranks: list[int]) -> list[int]:
    """Waits until every rank has reported or ended, at most ``task.grace`` seconds after the first failure.

    Returns:
        the process ids of the ranks that have done neither.
    """
    ended: set[int] = set()
    failed_at = None
    while True:
        for pid in ranks:
            if pid not in ended and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended.add(pid)
                failed_at = failed_at or time.monotonic()
        late = [pid for rank, pid in enumerate(ranks) if pid not in ended and not (folder / f"report{rank}").exists()]
        if not late or (failed_at is not None and time.monotonic() - failed_at > task.grace):
            return late
        time.sleep(0.01)


def _await_ends(ranks: list[int], seconds: float = 10.0) -> int:
    """Waits for the ranks to end, kills those that still run, and returns the largest exit code."""
    deadline = time.monotonic() + seconds
    codes: dict[int, int] = {}
    while len(codes) < len(ranks) and time.monotonic() < deadline:
        for pid in ranks:
            if pid not in codes:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    _signal([pid for pid in ranks if pid not in codes], signal.SIGKILL)
    return max((abs(code) for code in codes.values()), default=0)


def _signal(ranks: list[int], number: int) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
