"""Runs a function on several ranks of this machine, for tests.

Ranks are forked from one warm process that has torch, Accelerate and transformers imported already and nothing else
done, so that a case costs a fraction of a second rather than the seconds that those imports take. That process is
started at the first call and ends with the caller's.
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

from neuron_accel.errors import UsageError
from neuron_accel.testing import _rank, native_ranks
from neuron_accel.testing._call import free_port, main_script, pickle_call
from neuron_accel.testing.rank_errors import RankExit, RanksError, RankTimeout

NATIVE = {
    "native": native_ranks.StandIn(),
    "native-p2p": native_ranks.StandIn(send_receive=True),
}
"""Names of backends with a stand-in for the native Neuron device."""

_logger = logging.getLogger(__name__)

_TAIL = 20_000  # characters of a rank's output that an error carries


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
    """Calls ``fn(*args, **kwargs)`` on ``n`` ranks and returns what they returned, by rank.

    Each rank is a process of its own on the CPU with one thread, with torch.distributed initialised and the environment
    that torchrun would give it (RANK, WORLD_SIZE, ...; no server listens on MASTER_PORT) on top of the caller's. What
    ranks print is printed by the caller after success and is part of the error otherwise. No process, file or socket is
    left behind, also when the caller is interrupted or killed.

    Args:
        fn: a function of a module (not a lambda or a closure: ranks import it by name). One of a script will do, if the
            script calls ``run_ranks`` under ``if __name__ == "__main__":``; one of a notebook or a prompt will not.
        n: number of ranks, 1 or more.
        args, kwargs: what ``fn`` is called with; picklable, as is what it returns. Ranks get copies.
        timeout: seconds until ranks that still run are ended.
        grace: seconds that the other ranks have to end on their own once one has failed.
        env: more environment variables for the ranks.
        backend: ``"gloo"``; None for ranks without a process group; ``"native"`` for ranks with a stand-in for the
            native Neuron device, ``"native-p2p"`` for one that can send and receive (see
            :mod:`neuron_accel.testing.native_ranks`); ``"xla"`` for ranks of torch_xla on the CPU, which are threads of
            one process (see :mod:`neuron_accel.testing.xla_ranks`) and share its environment; ``"cuda"`` for ranks with
            GPUs, which they share if they are more (see :mod:`neuron_accel.testing.cuda_ranks`);
            ``"neuron"`` for ranks of torch_xla on an emulated Neuron device, which are processes without a process
            group (see :mod:`neuron_accel.testing.neuron_ranks`).
        full_exit: ranks end as an interpreter does (threads waited for, ``atexit``, finalisation), and one that does
            not end by itself within ``grace`` seconds, or not with exit code 0, has failed. Only for gloo, the
            native stand-in and None.

    Raises:
        RanksError: if a rank raises, ends early, or runs out of time.
        UsageError: if the call itself is wrong.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "run_ranks was called while a rank imports the script that calls it.",
            where=getattr(sys.modules["__main__"], "__file__", None),
            why="ranks import the script to find its functions, and would start ranks without end",
            fix='put the call under `if __name__ == "__main__":`',
        )
    call = pickle_call(fn, args, kwargs)
    if n < 1:
        raise UsageError(f"run_ranks needs at least one rank, not {n}.")
    details = {"ranks": n, "backend": backend, "arguments": (args, kwargs)}
    _logger.debug("%s on %d ranks (%s)", getattr(fn, "__qualname__", fn), n, backend, extra=details)
    if backend == "xla":
        from neuron_accel.testing.xla_ranks import run_xla_ranks

        return run_xla_ranks(call, n, timeout=timeout, grace=grace, env=env or {}, main=main_script(call))
    if backend == "neuron":
        from neuron_accel.testing.neuron_ranks import emulated_instance

        with emulated_instance(cores=n) as machine:
            return machine.run(fn, n, *args, timeout=timeout, grace=grace, env=env, **kwargs)
    main_script(call)
    if backend == "cuda":
        _check_cuda()
    if backend not in ("gloo", "cuda", None, *NATIVE):
        raise UsageError(
            f"run_ranks knows no backend {backend!r}.",
            fix='use "gloo", "native", "native-p2p", "cuda", "xla", "neuron", or None for no process group',
        )
    with tempfile.TemporaryDirectory(prefix=f"neuron-accel-ranks-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        port, native = free_port(), backend in NATIVE
        if native:
            native_ranks.write_package(Path(folder))
        more = {**(NATIVE[backend].environ() if native else {}), **(env or {})}  # type: ignore[index]
        tasks = [
            _rank.RankTask(
                rank=rank,
                size=n,
                call=call,
                backend="neuron" if native else backend,
                folder=folder,
                environ=_environment(rank, n, port, more, on_cpu=not native and backend != "cuda"),
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
        """Takes reports until every rank has one, time is over, or grace after the first failure is."""
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
        except Exception as error:  # a result that only the rank can unpickle
            value, text = error, f"rank {rank} returned what cannot be unpickled here: {error!r}"
        if text is None:
            self.results[rank] = value
        else:
            self.errors[rank], self.tracebacks[rank] = value, text

    def _begin(self, rank: int) -> None:
        self.ready.add(rank)
        if len(self.ready) == len(self.tasks):
            self._tell_all()

    def _tell_all(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(_rank.GO)

    def _time_out(self, reason: str) -> None:
        for rank in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, _rank.STACK_SIGNAL)
        for rank in self.running:
            self.tracebacks[rank] = _settled_text(self.tasks[rank].stack)
            self.errors[rank] = RankTimeout(reason)

    def finish(self, grace: float | None = None) -> list[Any]:
        """The results, or the error; with ``grace`` also that of ranks that do not end by themselves that soon."""
        outputs = {task.rank: text for task in self.tasks if (text := _read(task.output))}
        if self.errors:
            raise RanksError(len(self.tasks), self.errors, self.tracebacks, outputs)
        for rank, text in outputs.items():
            sys.stdout.write("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()))
        self._tell_all()
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
                except ProcessLookupError:  # it has ended since it was asked
                    process.join(grace)
                    continue
                self.tracebacks[rank] = _settled_text(self.tasks[rank].stack)
        codes = {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode != 0}
        if codes:
            late = RankTimeout(f"returned, and did not end within {grace:g} s")
            errors = {rank: late if code is None else RankExit(code) for rank, code in codes.items()}
            raise RanksError(len(self.tasks), errors, self.tracebacks, {})

    def end(self) -> None:
        """Ends what still runs, with everything it started. Each rank leads a process group of its own."""
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


def _check_cuda() -> None:
    from neuron_accel.testing import cuda_ranks

    lacks = cuda_ranks.missing()
    if lacks is not None:
        raise UsageError(f"There are no CUDA ranks here: {lacks}.", fix="run this on a machine with an NVIDIA GPU")


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


def _settled_text(path: Path) -> str:
    """What a rank writes into ``path`` when asked for its stack; waits until it has stopped growing."""
    previous, deadline = -1, time.monotonic() + 3
    while time.monotonic() < deadline:
        size = path.stat().st_size if path.exists() else 0
        if size and size == previous:
            break
        previous = size
        time.sleep(0.05)
    return _read(path) or "(no stack: the rank had not begun, or does not react to signals)"


def _read(path: Path) -> str:
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
    return text if len(text) <= _TAIL else f"[... {len(text) - _TAIL} characters left out]\n{text[-_TAIL:]}"
