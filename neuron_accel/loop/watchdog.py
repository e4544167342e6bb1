# SPDX-License-Identifier: Apache-2.0
"""A watchdog that reports collective calls which only some ranks have made, with file and line of every rank.

A call is recorded when it begins. A thread checks how long the current call has lasted; after a while, ranks exchange
the calls that they are in over a board, which is independent of collectives. If all are in the same call, it is only
slow, and nothing is printed.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from neuron_accel.backends.events import Event, Observer
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.backends.board import Board
    from neuron_accel.engine.runtime.run import Run

VARIABLE = "NEURON_ACCEL_WAIT_WARNING_S"
DEFAULT_S = 10.0
THREAD_NAME = "neuron_accel-watchdog"
"""Name of the watchdog's thread, which lives until `end_training`."""
_ANSWER_S = 2.0
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (str(Path(torch.__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep, "<")
"""Prefixes of file names of installed packages and of Python itself."""


class Answer(NamedTuple):
    """What a rank is doing.

    Args:
        question: the question that this answers.
        number: number of collective calls that the rank has begun.
        call: the call that it is in; empty if it is in none.
        place: file and line of the training script that it is at.
    """

    question: str
    number: int
    call: str
    place: str

    def __str__(self) -> str:
        return f"in `{self.call}` at {self.place}" if self.call else f"at {self.place}"


def seconds_before_warning(environ: Mapping[str, str] = os.environ) -> float:
    """Returns how long a collective call may last before it is reported, in seconds; 0 disables the watchdog.

    Raises:
        ConfigurationError: if the environment variable is not a number of at least 0.
    """
    text = environ.get(VARIABLE, "").strip() or str(DEFAULT_S)
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigurationError(
            f"{VARIABLE}={text} is not a number of seconds.", where=VARIABLE, fix="set it to 0 to disable the warning"
        )
    return value


class CollectiveWatchdog(Observer):
    """Records the collective calls of one rank; a thread reports calls that other ranks have not made.

    Args:
        backend: of a run on more than one rank.
        name: identifies the run on the board; the same on every rank.
        delay_s: seconds that a call may last before ranks compare their calls.
        regularly: functions that the thread calls about once a second.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"call"})

    def __init__(
        self, backend: Backend, name: str, delay_s: float, regularly: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._rank, self._size, self._delay = backend.rank, backend.world_size, delay_s
        self._board: Board = backend.board()
        self._name, self._loop, self._regularly = name, threading.get_ident(), regularly
        self._number, self._depth, self._call, self._since = 0, 0, "", 0.0
        self._asked, self._pause = "", delay_s
        self._ended = threading.Event()
        thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._thread = thread
        thread.start()
        atexit.register(self.stop)

    def begin(self, event: Event) -> None:
        """Records a call; of nested calls the outermost."""
        self._depth += 1
        if self._depth == 1:
            self._loop, self._since, self._pause = threading.get_ident(), time.monotonic(), self._delay
            self._number += 1
            self._call = event.name

    def end(self, event: Event) -> None:
        self._depth -= 1
        if not self._depth:
            self._call = ""

    def stop(self) -> None:
        """Ends the thread, and records on the board that this rank has ended."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.stop)
        try:
            self._board.put(f"{self._name}/ended/{self._rank}", b"1")
        except Exception:  # the board is gone, so the other ranks have ended
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
                for function in tuple(self._regularly):
                    function()
                if self._call and time.monotonic() - self._since > self._pause:
                    self._pause *= 4
                    self._ask(tick)
        except Exception:  # the board is gone, so the run has ended
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
            return  # the call is complete, or another rank asks and reports
        here = [rank for rank, answer in answers.items() if (answer.number, answer.call) == (mine.number, mine.call)]
        if len(here) < self._size and here[0] == self._rank:
            print(self._said(mine, here, answers), file=sys.stderr, flush=True)

    def _said(self, mine: Answer, here: list[int], answers: dict[int, Answer]) -> str:
        waited = time.monotonic() - self._since
        lines = [
            f"neuron_accel: {_ranks(here)} of {self._size} {'has' if len(here) == 1 else 'have'} waited for other "
            f"ranks for {waited:.0f} s, {mine}."
        ]
        for rank in range(self._size):
            if rank in here:
                continue
            if rank in answers:
                where = str(answers[rank])
            elif self._board.get(f"{self._name}/ended/{rank}") is not None:
                where = "not running any more: it has ended, or called `end_training`"
            else:
                where = "at an unknown line: it does not answer"
            lines.append(f"  Rank {rank} is {where}.")
        lines.append(
            f"  Every rank has to call `{mine.call}`: look for `if accelerator.is_main_process`, or a loop that ends "
            f"earlier on one rank. The ranks keep waiting ({VARIABLE}=0 disables this warning)."
        )
        return "\n".join(lines)

    def _place(self) -> str:
        """File and line of the training script, such as ``train.py:31``: the innermost frame outside this package and
        installed ones."""
        frame: FrameType | None = sys._current_frames().get(self._loop)
        place = "an unknown place"
        while frame is not None:
            path, is_ours = frame.f_code.co_filename, _is_ours(frame)
            if not is_ours and not path.startswith(_LIBRARIES):
                return f"{path}:{frame.f_lineno}"
            if place == "an unknown place" and not is_ours:
                place = f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return place


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame is in this package, or in one named after it, which may be installed in place."""
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package.startswith("neuron_accel") or frame.f_code.co_filename.startswith(_OURS)


def watch(run: Run, environ: Mapping[str, str] = os.environ) -> CollectiveWatchdog | None:
    """Starts a watchdog that records the calls of a run until that is deleted. Collective.

    Returns:
        the watchdog; None on one rank, or if the environment disables it.
    """
    mine = (seconds_before_warning(environ), f"watchdog/{time.time_ns()}")
    seconds, name = run.backend.broadcast_object(mine, run.world)
    if run.world.size == 1 or not seconds:
        return None
    watchdog = CollectiveWatchdog(run.backend, name, seconds, run.regularly)
    run.events.observe(watchdog)
    weakref.finalize(run, watchdog.stop)
    return watchdog


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
