"""Runs a function on several ranks of this machine, for tests.

Ranks are forked from one warm process that has torch, Accelerate and transformers imported already and nothing else
done, so that a case costs a fraction of a second rather than the seconds that those imports take. That process is
started at the first call and ends with the caller's.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.spawn
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from neuron_accel.errors import CommunicationError, UsageError
from neuron_accel.testing import _rank

_TAIL = 20_000  # characters of a rank's output that an error carries


class RankExit(Exception):
    """A rank ended (``os._exit``, a signal, the kernel) before it returned or raised.

    Args:
        code: its exit code; negative for the number of the signal that ended it.
    """

    def __init__(self, code: int | None) -> None:
        self.code = code
        named = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        super().__init__(f"ended with {named} before it returned")

    def __reduce__(self):
        return type(self), (self.code,)


class RankTimeout(Exception):
    """A rank was still running when its time was over, and was ended."""


class RanksError(Exception):
    """At least one rank failed.

    Attributes:
        errors: the exception of each rank that failed, by rank. ``__cause__`` is the one that came first, where the
            failures that merely follow from another's (a lost connection) count last.
        tracebacks: the text of their tracebacks, or of the stacks of ranks that ran out of time, by rank. The message
            has those that say something new.
        outputs: the end of what each rank wrote to stdout and stderr, by rank; ranks that wrote nothing are absent.
    """

    def __init__(
        self, size: int, errors: Mapping[int, BaseException], tracebacks: Mapping[int, str], outputs: Mapping[int, str]
    ) -> None:
        self.size, self.errors = size, dict(errors)
        self.tracebacks, self.outputs = dict(tracebacks), dict(outputs)
        first = min(self.errors, key=lambda rank: _is_consequence(self.errors[rank]))  # errors come in order of time
        self.__cause__ = self.errors[first]
        super().__init__(self._describe(first))

    def __reduce__(self):
        return type(self), (self.size, self.errors, self.tracebacks, self.outputs)

    def _describe(self, first: int) -> str:
        lines = [f"rank {first} of {self.size}: {_name(self.errors[first])}"]
        lines += [f"rank {r} of {self.size}: {_name(e)}" for r, e in self.errors.items() if r != first]
        for rank in sorted(self.errors, key=lambda r: (r != first, r)):
            if rank in self.tracebacks and (rank == first or not self._follows(rank, first)):
                lines += [f"--- traceback of rank {rank} ---", _without_harness(self.tracebacks[rank])]
            if rank in self.outputs:
                lines += [f"--- output of rank {rank} ---", self.outputs[rank].rstrip()]
        return "\n".join(lines)

    def _follows(self, rank: int, first: int) -> bool:
        """Whether a rank's traceback would say nothing new: it raised the same, or lost the one that failed first."""
        error = self.errors[rank]
        if isinstance(error, RankTimeout):  # where it stands says whom it waits for
            return False
        return _is_consequence(error) or _name(error) == _name(self.errors[first])


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
        backend: ``"gloo"``; None for ranks without a process group; ``"xla"`` for ranks of torch_xla on the CPU, which
            are threads of one process (see :mod:`neuron_accel.testing.xla_ranks`) and share its environment.
        full_exit: ranks end as an interpreter does (threads waited for, ``atexit``, finalisation), and one that does
            not end by itself within ``grace`` seconds, or not with exit code 0, has failed. Not for ``"xla"``.

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
    call = _pickle_call(fn, args, kwargs)
    if n < 1:
        raise UsageError(f"run_ranks needs at least one rank, not {n}.")
    if backend == "xla":
        from neuron_accel.testing.xla_ranks import run_xla_ranks

        return run_xla_ranks(call, n, timeout=timeout, grace=grace, env=env or {}, main=_main_script(call))
    _main_script(call)
    if backend not in ("gloo", None):
        raise UsageError(
            f"run_ranks knows no backend {backend!r}.", fix='use "gloo", "xla", or None for no process group'
        )
    with tempfile.TemporaryDirectory(prefix=f"neuron-accel-ranks-{os.getpid()}-", ignore_cleanup_errors=True) as folder:
        port = _free_port()
        tasks = [
            _rank.RankTask(
                rank=rank,
                size=n,
                call=call,
                backend=backend,
                folder=folder,
                environ=_environment(rank, n, port, env or {}),
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


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise UsageError(
            f"run_ranks cannot send {getattr(fn, '__qualname__', fn)!r} and its arguments to the ranks: {error}",
            why="ranks are processes; functions reach them by name and values as copies",
            fix="use a function of a module instead of a lambda or closure, and picklable arguments",
        ) from error


def _main_script(call: bytes) -> dict[str, str]:
    """What tells a rank where to find ``__main__``, as multiprocessing passes it on; empty if the call does not need
    it.

    Raises:
        UsageError: if it needs it, and other processes cannot import it.
    """
    if b"__main__" not in call:
        return {}
    data: Mapping[str, Any] = multiprocessing.spawn.get_preparation_data("ranks")
    main = {key: data[key] for key in ("init_main_from_name", "init_main_from_path") if key in data}
    if not main or not os.path.exists(main.get("init_main_from_path", os.curdir)):
        raise UsageError(
            "run_ranks was given a function or value of __main__, which is no file here.",
            why="ranks are processes; they find functions and classes by importing their module",
            fix="put it into a module, and import it from there",
        )
    return main


def _environment(rank: int, size: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **env,
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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


def _without_harness(text: str) -> str:
    """A traceback without the frames of this package's own machinery around the call, and without underlining."""
    folder = os.path.dirname(os.path.abspath(__file__))
    harness = tuple(f'  File "{os.path.join(folder, name)}"' for name in ("_rank.py", "_xla_process.py"))
    kept, skipping = [], False
    for line in text.rstrip().splitlines():
        if line.startswith("  File ") or not line.startswith(" "):
            skipping = line.startswith(harness)
        if not skipping and line.strip(" ^~"):
            kept.append(line)
    return "\n".join(kept) if any(line.startswith("  File ") for line in kept) else text.rstrip()


def _is_consequence(error: BaseException) -> bool:
    from neuron_accel.backends.failures import is_communication_failure

    lost_peer = isinstance(error, RuntimeError) and is_communication_failure(error)
    return lost_peer or isinstance(error, (CommunicationError, RankTimeout))


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
