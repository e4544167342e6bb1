"""What a caller of ranks sends them: a function with its arguments, the script that it is from, and where to meet."""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any

from neuron_accel.errors import UsageError


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((fn, args, kwargs))
    except Exception as error:
        raise UsageError(
            f"run_ranks cannot send {getattr(fn, '__qualname__', fn)!r} and its arguments to the ranks: {error}",
            why="ranks are processes; functions reach them by name and values as copies",
            fix="use a function of a module instead of a lambda or closure, and picklable arguments",
        ) from error


def main_script(call: bytes) -> dict[str, str]:
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
            "run_ranks was given a function or value of __main__, which is not a file here.",
            why="ranks are processes; they find functions and classes by importing their module",
            fix="put it into a module, and import it from there",
        )
    return main


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
