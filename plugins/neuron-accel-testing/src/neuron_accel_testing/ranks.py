# SPDX-License-Identifier: Apache-2.0
"""Runs a function on several ranks of this machine, for tests.

Ranks are forked from a process that has imported torch, Accelerate and transformers, so that a call takes a fraction of
a second instead of the seconds that these imports take. That process is started at the first call and ends with the
caller.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from neuron_accel.doors import TEST_DEVICES, entry_points, how_to_install, offered_by
from neuron_accel.errors import UsageError

from . import _rank
from ._call import free_port, pickle_call
from .devices import RankDevice, RankMachine
from .rank_errors import RankExit, RanksError, RankTimeout

_logger = logging.getLogger(__name__)

_TAIL = 20_000  # number of characters of a rank's output in an error


def run_ranks(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    grace: float = 10.0,
    env: Mapping[str, str] | None = None,
    backend: str | None = "gloo",
    full_exit: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Calls ``fn(*args, **kwargs)`` on ``n`` ranks and returns the results by rank.

    Each rank is a process on the CPU with one thread, with torch.distributed initialised, and with the environment of
    the caller and of torchrun (RANK, WORLD_SIZE, ...; no server listens on MASTER_PORT). The caller prints the output
    of ranks if they succeed; otherwise it is part of the error. No process, file or socket is left behind, also if the
    caller is interrupted or killed.

    Args:
        fn: a function of a module (not a lambda or a closure, since ranks import it by name). It may be in a script
            that calls ``run_ranks`` under ``if __name__ == "__main__":``, but not in a notebook or an interactive
            session.
        n: number of ranks, 1 or more.
        args, kwargs: arguments of ``fn``, which ranks receive as copies. They and the results must be picklable.
        timeout: seconds after which ranks that still run are ended. The environment variable
            ``NEURON_ACCEL_TIMEOUT_FACTOR`` multiplies it, for machines that are slow or busy.
        grace: seconds after the first failure until the other ranks are ended.
        env: additional environment variables for the ranks.
        backend: ``"gloo"``; None for ranks without a process group; ``"xla"`` for ranks of torch_xla on the CPU, which
            are threads of one process (see :mod:`neuron_accel.testing.xla_ranks`) and share its environment; ``"cuda"``
            for ranks with GPUs, which they share if they are more (see :mod:`neuron_accel.testing.cuda_ranks`). With
            the package neuron-accel-emulation also ``"native"`` for ranks with a stand-in for the native Neuron device,
            ``"native-p2p"`` for one that can send and receive, and ``"neuron"`` for ranks of torch_xla on an emulated
            Neuron device, which are processes without a process group. Other packages may add to these
            (:mod:`neuron_accel.testing.devices`).
        full_exit: whether ranks end as the interpreter does (waiting for threads, ``atexit``, finalisation); a rank
            that does not end within ``grace`` seconds, or not with exit code 0, has failed. Only for gloo, the native
            stand-in and None.

    Raises:
        RanksError: if a rank raises, ends early, or runs out of time.
        UsageError: if the call itself is wrong.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "run_ranks was called while a rank imports the script that calls it.",
            where=getattr(sys.modules["__main__"], "__file__", None),
            why="ranks import the script to find its functions, and would start further ranks",
            fix='put the call under `if __name__ == "__main__":`',
        )
    call, main = pickle_call(fn, args, kwargs)
    timeout *= float(os.environ.get("NEURON_ACCEL_TIMEOUT_FACTOR", 1))
    if n < 1:
        raise UsageError(f"run_ranks needs at least one rank, not {n}.")
    details = {"ranks": n, "backend": backend, "arguments": (args, kwargs)}
    _logger.debug("%s on %d ranks (%s)", getattr(fn, "__qualname__", fn), n, backend, extra=details)
    if backend == "xla":
        from .xla_ranks import run_xla_ranks

        return run_xla_ranks(call, n, timeout=timeout, grace=grace, env=env or {}, main=main)
    device = None if backend in ("gloo", "cuda", None) else _find(backend)
    if isinstance(device, RankMachine):
        return device.run(fn, n, *args, timeout=timeout, grace=grace, env=env, **kwargs)
    if backend == "cuda":
        _check_cuda()
    with tempfile.TemporaryDirectory(prefix=f"neuron-accel-ranks-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        more = {**(device.prepare(Path(folder)) if device else {}), **(env or {})}
        tasks = [
            _rank.RankTask(
                rank=rank,
                size=n,
                call=call,
                backend=device.library if device else backend,
                device=device,
                folder=folder,
                environ=_environment(rank, n, port, more, on_cpu=device is None and backend != "cuda"),
                timeout=timeout,
                full_exit=full_exit,
            )
            for rank in range(n)
        ]
        ranks = _Ranks(tasks)
        try:
            ranks.start()
            ranks.collect(timeout, grace)
            return ranks.finish(grace if full_exit else None)
        finally:
            ranks.end()


class _Ranks:
    """The ranks of one call, from start to end."""

    def __init__(self, tasks: list[_rank.RankTask]) -> None:
        self.tasks = tasks
        self.processes: list[Any] = []
        self.connections: list[Connection] = []
        self.ready: set[int] = set()
        self.results: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}
        self.tracebacks: dict[int, str] = {}

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["neuron_accel.testing._preload"])
        for task in self.tasks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank.main, args=(task, theirs), name=f"rank{task.rank}")
            self.connections.append(ours)
            self.processes.append(process)
            process.start()
            theirs.close()

    @property
    def running(self) -> list[int]:
        return [r for r in range(len(self.tasks)) if r not in self.results and r not in self.errors]

    def collect(self, timeout: float, grace: float) -> None:
        """Receives reports until every rank has sent one, the time limit, or ``grace`` seconds after the first
        failure."""
        deadline, reason = time.monotonic() + timeout, f"still running after {timeout:g} s"
        failed = False
        while self.running:
            if self.errors and not failed:
                failed = True
                if time.monotonic() + grace < deadline:
                    deadline = time.monotonic() + grace
                    reason = f"still running {grace:g} s after rank {next(iter(self.errors))} had failed"
            left = deadline - time.monotonic()
            waited = {self.connections[r]: r for r in self.running}
            ready = wait(list(waited), timeout=max(left, 0))
            for connection in ready:
                self._receive(waited[connection])  # type: ignore[index]
            if not ready and left <= 0:
                self._time_out(reason)

    def _receive(self, rank: int) -> None:
        try:
            data = self.connections[rank].recv_bytes()
            if data == _rank.READY:
                self._begin(rank)
                return
            value, text = _rank.read_report(data)
        except (EOFError, OSError):
            self.processes[rank].join(5)
            self.errors[rank] = RankExit(self.processes[rank].exitcode)
            return
        except Exception as error:  # a result that cannot be unpickled in this process
            value, text = error, f"the result of rank {rank} cannot be unpickled: {error!r}"
        if text is None:
            self.results[rank] = value
        else:
            self.errors[rank], self.tracebacks[rank] = value, text

    def _begin(self, rank: int) -> None:
        self.ready.add(rank)
        if len(self.ready) == len(self.tasks):
            self._send_go()

    def _send_go(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(_rank.GO)

    def _time_out(self, reason: str) -> None:
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, _rank.STACK_SIGNAL)
        for rank in self.running:
            self.tracebacks[rank] = _read_stack(self.tasks[rank].stack)
            self.errors[rank] = RankTimeout(reason)

    def finish(self, grace: float | None = None) -> list[Any]:
        """Returns the results, or raises the error; with ``grace`` also if ranks do not end within that time."""
        outputs = {task.rank: text for task in self.tasks if (text := _read(task.output))}
        if self.errors:
            raise RanksError(len(self.tasks), self.errors, self.tracebacks, outputs)
        for rank, text in outputs.items():
            sys.stdout.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))
        self._send_go()
        for process in self.processes:
            process.join(10 if grace is None else grace)
        if grace is not None:
            self._check_ends(grace)
        return [self.results[task.rank] for task in self.tasks]

    def _check_ends(self, grace: float) -> None:
        for rank, process in enumerate(self.processes):
            if process.exitcode is None:
                try:
                    os.kill(process.pid, _rank.STACK_SIGNAL)
                except ProcessLookupError:  # it has ended in the meantime
                    process.join(grace)
                    continue
                self.tracebacks[rank] = _read_stack(self.tasks[rank].stack)
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode != 0}
        if codes:
            late = RankTimeout(f"returned, and did not end within {grace:g} s")
            errors = {rank: late if code is None else RankExit(code) for rank, code in codes.items()}
            raise RanksError(len(self.tasks), errors, self.tracebacks, {})

    def end(self) -> None:
        """Kills ranks that still run, and their children. Each rank leads its own process group."""
        started = [process for process in self.processes if process.pid is not None]
        for process in started:
            for kill in (os.killpg, os.kill) if process.exitcode is None else (os.killpg,):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(process.pid, signal.SIGKILL)
        for process in started:
            process.join()
            process.close()
        for connection in self.connections:
            connection.close()


def _find(backend: str) -> RankDevice | RankMachine:
    """The :class:`RankDevice` or :class:`RankMachine` that another package has added.

    Raises:
        UsageError: if none has.
    """
    devices = {point.name: point for point in entry_points(TEST_DEVICES)}
    if backend in devices:
        return devices[backend].load()
    package = offered_by(TEST_DEVICES, backend)
    names = ", ".join(f'"{name}"' for name in ("gloo", "xla", "cuda", *devices))
    raise UsageError(
        f"{backend!r} is not a backend of run_ranks{' here' if package else ''}.",
        why=f"it is in a package of its own, {package}, which is not installed" if package else None,
        fix=how_to_install(package) if package else f"use {names}, or None for no process group",
    )


def _check_cuda() -> None:
    from . import cuda_ranks

    lacks = cuda_ranks.missing()
    if lacks is not None:
        raise UsageError(
            f"Ranks with CUDA devices cannot be run: {lacks}.", fix="run this on a machine with an NVIDIA GPU"
        )


def _environment(rank: int, size: int, port: int, env: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "ACCELERATE_USE_CPU"},
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        **({"ACCELERATE_USE_CPU": "true"} if on_cpu else {}),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **env,
    }


def _read_stack(path: Path) -> str:
    """The stack that a rank writes to ``path`` on the signal, when the file has stopped growing."""
    previous, deadline = -1, time.monotonic() + 3
    while time.monotonic() < deadline:
        size = path.stat().st_size if path.exists() else 0
        if size and size == previous:
            break
        previous = size
        time.sleep(0.05)
    return _read(path) or "(no stack: the rank had not started, or does not handle signals)"


def _read(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return text if len(text) <= _TAIL else f"[... {len(text) - _TAIL} characters left out]\n{text[-_TAIL:]}"
