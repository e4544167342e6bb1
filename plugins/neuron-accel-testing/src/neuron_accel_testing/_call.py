# SPDX-License-Identifier: Apache-2.0
"""The data that a caller sends to ranks: a pickled function call, and how to import the calling script."""

from __future__ import annotations

import io
import multiprocessing.spawn
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from typing import Any

from neuron_accel.errors import UsageError


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Pickles ``(fn, args, kwargs)``.

    Returns:
        the pickle, and the data with which a rank imports ``__main__`` first, as multiprocessing passes it; that is
        empty if nothing in the call is of ``__main__``.

    Raises:
        UsageError: if that is not possible, or ``__main__`` cannot be imported by other processes.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump((fn, args, kwargs))
    except Exception as error:
        raise UsageError(
            f"run_ranks cannot send {getattr(fn, '__qualname__', fn)!r} and its arguments to the ranks: {error}",
            why="ranks are processes; functions are pickled by name and values as copies",
            fix="use a function of a module instead of a lambda or closure, and picklable arguments",
        ) from error
    return stream.getvalue(), _main_script() if pickler.needs_main else {}


class _Pickler(pickle.Pickler):
    """Notices functions, classes and objects of ``__main__``. It is asked about every object that it pickles."""

    needs_main = False

    def persistent_id(self, value: Any) -> None:
        self.needs_main |= getattr(value, "__module__", None) == "__main__"  # an object has that of its class


def _main_script() -> dict[str, str]:
    data: Mapping[str, Any] = multiprocessing.spawn.get_preparation_data("ranks")
    main = {key: data[key] for key in ("init_main_from_name", "init_main_from_path") if key in data}
    if not main or not os.path.exists(main.get("init_main_from_path", os.curdir)):
        raise UsageError(
            "run_ranks received a function or value of __main__, which is not a file.",
            why="ranks are processes; they find functions and classes by importing their module",
            fix="move it to a module, and import it from there",
        )
    return main


def free_port() -> int:
    """A port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
