"""Collective calls of a loop that only some ranks make: said, with file and line, while the others wait.

What the loop calls is only noted; a thread beside it looks now and then whether a call has lasted long. Then ranks ask
each other, over a board beside all collectives, where they are. Where all are in the same call it is only slow.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend, Board
    from neuron_accel.engine.runtime.run import Run

F = TypeVar("F", bound=Callable[..., Any])

VARIABLE = "NEURON_ACCEL_WAIT_WARNING_S"
DEFAULT_S = 10.0
THREAD_NAME = "neuron_accel-waiting"
"""Of a thread that lives until `end_training`."""
_ANSWER_S = 2.0
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (str(Path(torch.__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep, "<")
"""Where packages are installed, and Python itself."""


def collective(method: F) -> F:
    """Marks a method of an accelerator that every rank has to call."""

    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.run.calling(method.__name__):
            return method(self, *args, **kwargs)

    return wrapper  # type: ignore[return-value]


class Answer(NamedTuple):
    """Where a rank is.

    Args:
        question: what it answers.
        number: of collective calls of the loop that it has begun.
        call: the one it is in; empty if it is in none.
        place: file and line of the loop.
    """

    question: str
    number: int
    call: str
    place: str

    def __str__(self) -> str:
        return f"in `{self.call}` at {self.place}" if self.call else f"at {self.place}"


def seconds_before_warning(environ: Mapping[str, str] = os.environ) -> float:
    """How long a collective call may last before ranks ask each other; 0: they never do.

    Raises:
        ConfigurationError: if the variable is not a number of at least 0.
    """
    text = environ.get(VARIABLE, "").strip() or str(DEFAULT_S)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigurationError(
            f"{VARIABLE}={text} is not a number of seconds.", where=VARIABLE, fix="give 0 for never"
        )
    return value


class Waiting:
    """One rank's calls, and the thread that watches them.

    Args:
        backend: of the run, on more than one rank.
        name: the same on every rank, and of no other run.
        delay_s: after how many seconds of a call ranks ask each other.
    """

    def __init__(self, backend: Backend, name: str, delay_s: float) -> None:
        self._rank, self._size, self._delay = backend.rank, backend.world_size, delay_s
        self._board: Board = backend.board()
        self._name, self._loop = name, threading.get_ident()
        self._number, self._depth, self._call, self._since = 0, 0, "", 0.0
        self._asked, self._pause = "", delay_s
        self._ended = threading.Event()
        thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._thread = thread
        thread.start()
        atexit.register(self.stop)

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """The loop is in a collective call; of calls in each other the outermost counts."""
        self._depth += 1
        if self._depth == 1:
            self._loop, self._since, self._pause = threading.get_ident(), time.monotonic(), self._delay
            self._number += 1
            self._call = name
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._call = ""

    def stop(self) -> None:
        """The rank no longer answers; other ranks are notified."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.stop)
        try:
            self._board.put(f"{self._name}/ended/{self._rank}", b"1")
        except Exception:  # the board has gone before: no rank is left to tell
            return
        finally:
            if threading.current_thread() is not self._thread:
                self._thread.join(1.0)

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        tick = min(1.0, self._delay / 4)
        try:
            while not self._ended.wait(tick):
                self._answer()
                if self._call and time.monotonic() - self._since > self._pause:
                    self._pause *= 4
                    self._ask(tick)
        except Exception:  # the board is gone, and with it the run
            return

    def _answer(self) -> None:
        question = (self._board.get(f"{self._name}/question") or b"").decode()
        if question and question != self._asked:
            self._asked = question
            answer = Answer(question, self._number, self._call, self._place())
            self._board.put(f"{self._name}/{self._rank}", json.dumps(answer).encode())

    def _ask(self, tick: float) -> None:
        number, question = self._number, f"{self._rank}.{self._number}.{time.monotonic_ns()}"
        self._board.put(f"{self._name}/question", question.encode())
        deadline = time.monotonic() + _ANSWER_S + 2 * tick
        answers: dict[int, Answer] = {}
        while len(answers) < self._size and time.monotonic() < deadline and not self._ended.wait(tick / 2):
            self._answer()
            for rank in range(self._size):
                note = self._board.get(f"{self._name}/{rank}")
                answer = Answer(*json.loads(note)) if note else None
                if answer is not None and answer.question == question:
                    answers[rank] = answer
        mine = answers.get(self._rank)
        if mine is None or not mine.call or self._number != number:
            return  # the others came, or another rank asks, and says it
        here = [rank for rank, answer in answers.items() if (answer.number, answer.call) == (mine.number, mine.call)]
        if len(here) < self._size and here[0] == self._rank:
            print(self._said(mine, here, answers), file=sys.stderr, flush=True)

    def _said(self, mine: Answer, here: list[int], answers: dict[int, Answer]) -> str:
        waited = time.monotonic() - self._since
        lines = [
            f"neuron_accel: {_ranks(here)} of {self._size} {'waits' if len(here) == 1 else 'wait'} for others, "
            f"for {waited:.0f} s now, {mine}."
        ]
        for rank in range(self._size):
            if rank in here:
                continue
            if rank in answers:
                where = str(answers[rank])
            elif self._board.get(f"{self._name}/ended/{rank}") is not None:
                where = "no more: it has ended, or called `end_training`"
            else:
                where = "at an unknown place: it does not answer"
            lines.append(f"  Rank {rank} is {where}.")
        lines.append(
            f"  Every rank has to call `{mine.call}`: look for `if accelerator.is_main_process`, or a loop that ends "
            f"earlier on one rank. Waiting goes on ({VARIABLE}=0 turns this off)."
        )
        return "\n".join(lines)

    def _place(self) -> str:
        """``train.py:31``: where the loop is, outside of this package and its libraries."""
        frame: FrameType | None = sys._current_frames().get(self._loop)
        place = "an unknown place"
        while frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith((_OURS, *_LIBRARIES)):
                return f"{path}:{frame.f_lineno}"
            if place == "an unknown place" and not path.startswith(_OURS):
                place = f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return place


def watch(run: Run, owner: Any, environ: Mapping[str, str] = os.environ) -> Waiting | None:
    """Lets ``run.calling`` note calls, as long as ``owner`` lives; None on one rank, and where it is turned off.
    Collective."""
    mine = (seconds_before_warning(environ), f"waiting/{time.time_ns()}")
    seconds, name = run.backend.broadcast_object(mine, run.world)
    if run.world.size == 1 or not seconds:
        return None
    waiting = Waiting(run.backend, name, seconds)
    run.calling = waiting.calling
    weakref.finalize(owner, waiting.stop)
    return waiting


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
