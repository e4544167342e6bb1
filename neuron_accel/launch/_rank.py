# SPDX-License-Identifier: Apache-2.0
"""One rank of a launch: ``python .../_rank.py LAUNCHER_PID script|module TARGET [ARGUMENT ...]``.

Runs the target as Python itself would, with three additions:

- The rank is killed when its launcher ends, for any reason.
- Beside the error file the rank records how it ended: an exception with its exact time, so that the launcher can
  distinguish the rank that failed first from those that failed as a consequence, or that it reached the end.
- A crash in native code prints the Python stack.

This module imports the standard library only, and is run as a file, so that the target is the first to import and
configure any other package, this one included.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder, in which `inspect` and `trace` are not those of the standard library

import builtins
import contextlib
import ctypes
import faulthandler
import importlib.abc
import importlib.util
import io
import json
import os
import signal
import threading
import time
import traceback
import types

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5
STARTED_FILE, ENDED_FILE, STOPPED_FILE = "started.json", "ended.json", "stopped.txt"


def die_with(launcher_pid: int) -> None:
    """Arranges that this process is killed when its launcher ends, even by SIGKILL.

    On Linux the kernel does it (prctl(2), PR_SET_PDEATHSIG); elsewhere a thread watches the parent's id.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(launcher_pid,), daemon=True).start()
    if os.getppid() != launcher_pid:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(launcher_pid: int) -> None:
    while os.getppid() == launcher_pid:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def run_script(path: str) -> None:
    """Executes a file as ``__main__``."""
    _look_first_in(os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as source:
        code = compile(source.read(), path, "exec", dont_inherit=True)
    _run_as_main(code, __file__=path)


def run_module(name: str) -> None:
    """Executes a module, or the ``__main__`` of a package, as ``__main__``."""
    _look_first_in(os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        sys.exit(f"neuron-accel: {name} is not a module that can be executed")
    code = spec.loader.get_code(spec.name)
    if code is None:
        sys.exit(f"neuron-accel: {name} is not written in Python")
    sys.argv[0] = str(spec.origin)
    _run_as_main(code, __file__=spec.origin, __spec__=spec, __loader__=spec.loader, __package__=spec.parent)


def _look_first_in(folder: str) -> None:
    """Puts the folder into ``sys.path[0]`` that Python would put there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _run_as_main(code: types.CodeType, **attributes: object) -> None:
    """Executes code as ``__main__``. Unlike with runpy, the module remains, for threads and exit handlers."""
    main = types.ModuleType("__main__")
    main.__dict__.update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def write_error_file(error: BaseException, stack: types.TracebackType | None) -> None:
    """Writes the error file that torch's elastic agent reads when a rank fails, with the time as a float added."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    now = time.time()
    if isinstance(error, SyntaxError):  # its formatted text begins with the line of the file
        summary = f"{type(error).__name__}: {error}"
    else:
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    details = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, stack)),
        "timestamp": str(int(now)),
        "time": now,
    }
    with contextlib.suppress(OSError):  # the exit code stays that of the error
        _write(path, {"message": {"message": summary, "extraInfo": details}})


def note_start() -> None:
    """Records the process id of this rank beside the error file."""
    _leave(STARTED_FILE, {"pid": os.getpid()})


def note_signals() -> int | None:
    """Arranges that the Python stack is recorded beside the error file if SIGTERM ends this rank, also inside native
    code. Returns the file's descriptor, None without a file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not hasattr(faulthandler, "register"):
        return None
    try:
        file = os.open(os.path.join(os.path.dirname(path), STOPPED_FILE), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError:
        return None
    faulthandler.register(signal.SIGTERM, file, chain=True)
    return file


def note_success(leaving: SystemExit | None = None) -> None:
    """Records beside the error file when this rank ended with success, and at which ``sys.exit``: a rank that fails
    later may have waited for it. A rank that ends by ``os._exit`` does not call this."""
    note: dict[str, object] = {"time": time.time()}
    if leaving is not None:
        frames = traceback.extract_tb(targets_part(leaving.__traceback__))
        if frames:
            note["left_at"] = f"{frames[-1].filename}, line {frames[-1].lineno}"
    _leave(ENDED_FILE, note)


def _leave(name: str, note: dict[str, object]) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with contextlib.suppress(OSError):
            _write(os.path.join(os.path.dirname(path), name), note)


def _write(path: str, contents: dict[str, object]) -> None:
    """Writes a file that is complete whenever it is there: the launcher may read it, or this rank be killed, at any
    time."""
    partial = f"{path}.{os.getpid()}"
    with open(partial, "w") as file:
        json.dump(contents, file)
    os.replace(partial, path)


def targets_part(stack: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames before the target's own code."""
    while stack is not None and stack.tb_frame.f_code.co_filename == __file__:
        stack = stack.tb_next
    return stack


def main() -> None:
    launcher_pid, kind, target, *arguments = sys.argv[1:]
    die_with(int(launcher_pid))
    faulthandler.enable()
    note_start()
    stopped = note_signals()
    sys.argv = [target, *arguments]
    try:
        run_script(target) if kind == "script" else run_module(target)
    except KeyboardInterrupt:
        if stopped is not None:
            os.write(stopped, b"interrupted\n")
        raise
    except SystemExit as error:
        if error.code in (None, 0):
            note_success(error)
        else:
            write_error_file(error, targets_part(error.__traceback__))
        raise
    except BaseException as error:
        stack = targets_part(error.__traceback__)
        write_error_file(error, stack)
        sys.excepthook(type(error), error.with_traceback(stack), stack)
        sys.exit(1)
    note_success()


if __name__ == "__main__":
    main()
