"""``neuron-accel launch`` of ranks that start in a fraction of a second, for programs that start hundreds of them.

The launcher is the command itself, called in a forked process, with torch's agent and all that supervises ranks. Only
the first moment of a rank differs: where the agent would execute ``python .../_rank.py``, a process that has already
imported torch forks, and calls the ``main`` of ``_rank.py``. Such a rank is a child of the launcher too and leads its
own session, so the launcher sees its exit code or signal and sends it signals as to any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = ["neuron_accel.testing._preload", "neuron_accel.cli.main", "neuron_accel.launch.agent"]
_SUBREAPER = 36  # prctl(2)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launch ended.

    Args:
        exit_code: of the launcher; None: it was still running when its time was over, and was ended.
        output: standard output and error of the launcher and of the ranks that it shows.
    """

    exit_code: int | None
    output: str


def launch(words: Sequence[str], environ: Mapping[str, str], output: Path, *, timeout: float) -> Ended:
    """Runs ``neuron-accel launch`` with these arguments.

    Args:
        words: the arguments.
        environ: its environment variables, beside those of this process.
        output: the file for its output.
        timeout: seconds after which it is ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_run_launcher, args=(list(words), {**os.environ, **environ}, str(output)))
    process.start()
    process.join(timeout)
    if timed_out := process.is_alive():
        process.terminate()
        process.join(10)
        process.kill()
        process.join()
    code = None if timed_out else process.exitcode
    process.close()
    return Ended(exit_code=code, output=output.read_text(errors="replace"))


def _run_launcher(words: list[str], environ: dict[str, str], output: str) -> None:
    settled = {name: os.environ[name] for name in ("USE_TORCH_XLA",) if name in os.environ}
    os.environ.clear()
    os.environ.update({**settled, **environ})
    tempfile.tempdir = None
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    _redirect(descriptor, descriptor)
    os.close(descriptor)
    from neuron_accel.cli.main import main

    with forked_ranks():
        code = main(["launch", *words])
    sys.exit(code)


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """A context manager in which the agent of this process, which must not have other threads yet, forks ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    with _Forks() as forks, mock.patch.object(SubprocessHandler, "_popen", forks.starter()):
        yield


def _redirect(stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """A context manager in which processes below this one whose parent has ended become children of this one, as
    those of the init process otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)


class _Forks:
    """A context manager around a process that forks ranks, which become children of this process. It is itself forked
    before this process has threads."""

    def __enter__(self) -> _Forks:
        self._adopting = adopting()
        self._adopting.__enter__()
        self._socket, theirs = socket.socketpair()
        launcher = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            with contextlib.suppress(BaseException):
                _serve(theirs, launcher)
            os._exit(0)
        theirs.close()
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        self._adopting.__exit__(None, None, None)

    def starter(self) -> Any:
        """A method that replaces the one with which the agent executes the program of a rank."""

        def start(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> ForkedRank:
            streams = [1 if file is None else file.fileno() for file in (handler._stdout, handler._stderr)]
            if handler._stderr is None:
                streams[1] = 2
            request = pickle.dumps((list(args), dict(env)))
            socket.send_fds(self._socket, [len(request).to_bytes(8, "big")], streams)
            self._socket.sendall(request)
            return ForkedRank(int.from_bytes(_receive(self._socket, 8), "big"))

        return start


def _serve(connection: socket.socket, launcher: int) -> None:
    """Forks a rank for each request, until the launcher closes the connection."""
    while True:
        header, streams, _, _ = socket.recv_fds(connection, 8, 2)
        if not header:
            return
        args, env = pickle.loads(_receive(connection, int.from_bytes(header, "big")))
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:  # it ends at once, and so the launcher becomes the parent of the rank
            pid = os.fork()
            if pid == 0:
                for descriptor in (reader, writer):
                    os.close(descriptor)
                connection.close()
                _become_rank(launcher, args, env, *streams)
            os.write(writer, pid.to_bytes(8, "big"))
            os._exit(0)
        os.waitpid(between, 0)
        connection.sendall(os.read(reader, 8))
        for descriptor in (reader, writer, *streams):
            os.close(descriptor)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _become_rank(launcher: int, args: list[str], env: dict[str, str], stdout: int, stderr: int) -> None:
    """Does what the interpreter would with ``-u .../_rank.py`` and its arguments."""
    try:
        os.setsid()
        _redirect(stdout, stderr)
        os.close(stdout)
        os.close(stderr)
        settled = {name: os.environ[name] for name in ("USE_TORCH_XLA",) if name in os.environ}
        os.environ.clear()
        os.environ.update({**settled, **env})
        tempfile.tempdir = None
        multiprocessing.set_start_method(None, force=True)  # the default, for data loader workers
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        while os.getppid() != launcher:  # until the process between has ended
            time.sleep(0.001)
        from neuron_accel.launch import _rank

        at = next(index for index, word in enumerate(args) if word.endswith("_rank.py"))
        sys.argv = args[at:]
        code = 0
        try:
            _rank.main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)
    ctypes.pythonapi.Py_Exit(code)


class ForkedRank:
    """What the agent uses of a ``subprocess.Popen``.

    Args:
        pid: of the rank, a child of this process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode
