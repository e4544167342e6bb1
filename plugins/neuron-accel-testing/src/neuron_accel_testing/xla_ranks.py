# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several torch_xla ranks of this machine's CPU, with lazy graphs, compilation and collectives.

The CPU client of PJRT connects only devices of one process, so ranks are threads of one process, each with its own
device (see :mod:`neuron_accel.backends.xla_channel`). They share the state of the process: torch's CPU generator, so
models have to be built one at a time (:func:`one_at_a_time`), and environment variables, some of which Accelerate
removes for a moment, so pass ``NeuronAccelerator(backend="xla")`` instead of setting a variable. A collective completes
only if its graph was compiled once for all threads, which ``backend.step_boundary`` and ``backend.to_host`` see to:
``item()`` of a tensor that is still to be computed by one aborts the process. Graphs are compiled without
optimizations; for measurements set ``XLA_FLAGS=--xla_backend_optimization_level=3
--xla_llvm_disable_expensive_passes=false``.

The process is forked from one that has imported torch_xla, Accelerate and transformers, which is started at the first
call and ends with the caller.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neuron_accel.backends.select import Machine
from neuron_accel.backends.xla_channel import one_at_a_time as one_at_a_time
from neuron_accel.errors import UsageError

from ._rank import STACK_SIGNAL
from ._xla_process import XlaTask
from .rank_errors import RankExit, RanksError, RankTimeout

# Every rank blocks threads in rendezvous; the default, the number of cores, is too small for four ranks on two cores.
_THREADS = "64"
_SET = {
    "PJRT_DEVICE": "CPU",
    "NEURON_ACCEL_BACKEND": "xla",
    "NPROC": _THREADS,
    "XLA_THREAD_POOL_SIZE": _THREADS,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
# In tests compilation takes longer than execution. LLVM's optimizations take half of it, and do not change results.
QUICK_FLAGS = {"--xla_backend_optimization_level": "0", "--xla_llvm_disable_expensive_passes": "true"}
_UNSET = (
    *("ACCELERATE_USE_CPU", "USE_TORCH_XLA", "DISABLE_XLA", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "XLA_FLAGS",  # set in the process from which ranks are forked, with those that torch_xla adds
)
_START_S = 120.0  # the imports


def run_xla_ranks(
    call: bytes, n: int, *, timeout: float, grace: float, env: Mapping[str, str], main: Mapping[str, str]
) -> list[Any]:
    """Implements ``backend="xla"`` of :func:`neuron_accel.testing.run_ranks`.

    Args:
        call: pickle of ``(function, args, kwargs)``.
        main: data for multiprocessing's ``spawn.prepare`` to import the caller's script; empty: not imported.

    Raises:
        RanksError: if a rank raises, ends early, or runs out of time.
        UsageError: without torch_xla.
    """
    if not Machine().torch_xla:
        raise UsageError("torch_xla is not installed.", fix="pip install 'torch==2.9.*' 'torch_xla==2.9.0'")
    task = XlaTask(
        size=n,
        call=call,
        environ={**_environment(), "CPU_NUM_DEVICES": str(n), **env},
        timeout=timeout,
        grace=grace,
        syspath=list(sys.path),
        main=dict(main),
    )
    return run_forked("neuron_accel.testing._xla_server", task, _server_environment())


def run_forked(server: str, task: XlaTask, environ: Mapping[str, str]) -> list[Any]:
    """Runs a task in a process forked from a server process, and returns the results of its ranks.

    Args:
        server: the module that the server process runs; it is started at the first call, and stays for later ones.
        task: the task.
        environ: environment variables of the server process, if this call starts it.

    Raises:
        RanksError: if a rank raises, ends early, or runs out of time.
    """
    with tempfile.TemporaryDirectory(prefix=f"neuron-accel-xla-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        Path(folder, "task").write_bytes(pickle.dumps(task))
        with _server(server, environ) as running:
            in_time, code = running.run(folder, task.timeout)
        return _results(Path(folder), task.size, in_time, code, task.timeout)


def _environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k not in _UNSET}, **_SET}


def _server_environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return {**_environment(), "XLA_FLAGS": flags(), "PYTHONPATH": path}


def flags() -> str:
    """The caller's ``XLA_FLAGS``, with those for fast compilation added, unless it sets them."""
    flags = os.environ.get("XLA_FLAGS", "")
    return " ".join([flags, *(f"{name}={value}" for name, value in QUICK_FLAGS.items() if name not in flags)]).strip()


def _results(folder: Path, n: int, in_time: bool, code: int, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}
    tracebacks: dict[int, str] = {}
    reports = {rank: path for rank in range(n) if (path := folder / f"report{rank}").exists()}
    for rank, path in sorted(reports.items(), key=lambda item: item[1].stat().st_mtime_ns):
        payload, text = pickle.loads(path.read_bytes())
        value = pickle.loads(payload)
        if text is None:
            results[rank] = value
        else:
            errors[rank], tracebacks[rank] = value, text
    stack = folder / "stack"
    for rank in (r for r in range(n) if r not in reports):
        late = f"still running after {timeout:g} s"
        errors[rank] = RankExit(code) if in_time else RankTimeout(late)
        if not in_time and stack.exists():
            tracebacks.setdefault(rank, stack.read_text(errors="replace"))
    output = folder / "output"
    text = output.read_text(errors="replace")[-20_000:] if output.exists() else ""
    if errors:
        raise RanksError(n, errors, tracebacks, {min(errors): text} if text else {})
    sys.stdout.write("".join(f"[xla ranks] {line}\n" for line in text.splitlines()))
    return [results[rank] for rank in range(n)]


class _Server:
    """The server process from which ranks are forked.

    Args:
        module: the module that it runs.
        environ: its environment variables.
    """

    def __init__(self, module: str, environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environ),
            text=True,
            start_new_session=True,  # the caller handles interrupts, and ends the ranks
        )
        atexit.register(self.close)

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def run(self, folder: str, timeout: float) -> tuple[bool, int]:
        """Runs the task in ``folder``; returns whether its process ended in time, and its exit code."""
        assert self._process.stdin is not None
        print(folder, file=self._process.stdin, flush=True)
        pid = self._answer("pid", _START_S * float(os.environ.get("NEURON_ACCEL_TIMEOUT_FACTOR", 1)))
        if pid is None:
            self.close()
            raise UsageError("The server process of XLA ranks does not answer.")
        try:
            code = self._answer("exit", timeout)
        except BaseException:
            self._end(pid)
            self._answer("exit", 30)
            raise
        if code is not None:
            return True, code
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, STACK_SIGNAL)
        time.sleep(1)  # the stacks are written by a signal handler
        self._end(pid)
        return False, self._answer("exit", 30) or 0

    def _end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _answer(self, word: str, timeout: float) -> int | None:
        stream = self._process.stdout
        assert stream is not None
        if not select.select([stream], [], [], timeout)[0]:
            return None
        line = stream.readline().split()
        if not line or line[0] != word:
            self.close()
            raise UsageError(f"The server process of XLA ranks answered {line} instead of {word!r}.")
        return int(line[1])

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


@contextmanager
def _server(module: str, environ: Mapping[str, str]) -> Iterator[_Server]:
    """A server process that runs ``module`` and serves this thread only: one of an earlier call, or a new one."""
    idle = _idle_servers().setdefault(module, [])
    server = None
    while server is None:
        try:
            found = idle.pop()
        except IndexError:
            server = _Server(module, environ)
        else:
            server = None if found.ended else found
    try:
        yield server
    finally:
        if not server.ended:
            idle.append(server)


@functools.lru_cache(maxsize=1)
def _idle_servers() -> dict[str, list[_Server]]:
    """The server processes that no call uses, by module."""
    return {}
