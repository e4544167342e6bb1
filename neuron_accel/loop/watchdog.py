# SPDX-License-Identifier: Apache-2.0
"""A watchdog that reports collective calls which only some ranks have made, with file and line of every rank.

A call is recorded when it begins. A thread checks how long the current call has lasted; after a while one rank asks all
others which call they are in, over a board, which is independent of collectives. If all are in the same call, it is
only slow, and nothing is printed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from neuron_accel.backends.events import Event, Observer
from neuron_accel.engine.plan.restart import WAITING_FILE
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.backends.board import Board
    from neuron_accel.engine.runtime.run import Run

VARIABLE = "NEURON_ACCEL_WAIT_WARNING_S"
DEFAULT_S = 10.0
THREAD_NAME = "neuron_accel-watchdog"
"""Name of the watchdog's thread, which lives until `end_training`."""
LOOKS_A_SECOND = 2000
"""How often all ranks together look at the board, at most; each of up to so many ranks looks once a second."""
_ANSWER_S, _SHOWN = 2.0, 16
_OURS = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (str(Path(torch.__file__).parents[1]) + os.sep, str(Path(os.__file__).parent) + os.sep, "<")
"""Prefixes of file names of installed packages and of Python itself."""


class Answer(NamedTuple):
    """What a rank is doing.

    Args:
        question: number of the last question that the rank knew before it answered.
        number: number of calls of this name that the rank has begun.
        call: the call that it is in; empty if it is in none.
        place: file and line of the training script that it is at; empty if it has ended.
    """

    question: int
    number: int
    call: str
    place: str

    def __str__(self) -> str:
        if not self.place:
            return "not running any more: it has ended, or called `end_training`"
        return f"in `{self.call}` at {self.place}" if self.call else f"at {self.place}"


@dataclass
class _Call:
    """A call of this rank, or what is between two of them (no name). A thread sees all of it or nothing.

    Args:
        number: number of calls of this name begun so far. Of others, such as the first ones of sharded parts of a
            model, ranks of different stages make different numbers.
        name: of the call.
        since: when it began, in seconds.
        pause: seconds after which ranks compare their calls.
        left_to: another rank's question, whose outcome this rank waits for.
        until: when it asks itself, in seconds.
    """

    number: int = 0
    name: str = ""
    since: float = 0.0
    pause: float = 0.0
    left_to: int = 0
    until: float = 0.0


@dataclass
class _Question:
    """The question that this rank asks: the call that it is about, until when to wait, and the answers so far."""

    number: int
    call: _Call
    until: float
    answers: dict[int, Answer] = field(default_factory=dict)


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

    Questions are counted on the board. One rank asks: the first one, or else the first that raises the count after a
    call has lasted too long. Each rank puts one answer, for the last question that it knows of, and the asking rank
    takes those that are not older than its question. The others in a long call wait for its outcome, and ask
    themselves only if there is none.

    Args:
        backend: of a run on more than one rank.
        name: identifies the run on the board; the same on every rank.
        delay_s: seconds that a call may last before ranks compare their calls.
        regularly: functions that the thread calls about once a second.

    Attributes:
        tick: seconds between two looks at the board, such that all ranks together look at most :data:`LOOKS_A_SECOND`
            times a second.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"call"})

    def __init__(
        self, backend: Backend, name: str, delay_s: float, regularly: Sequence[Callable[[], None]] = ()
    ) -> None:
        self._rank, self._size, self._delay = backend.rank, backend.world_size, delay_s
        self._board: Board = backend.board()
        self._name, self._loop, self._regularly = name, threading.get_ident(), regularly
        self.tick = max(min(1.0, delay_s / 4), self._size / LOOKS_A_SECOND)
        self._call, self._calls, self._depth, self._known = _Call(), Counter[str](), 0, 0
        self._asking: _Question | None = None
        self._has_told = False  # of a call that is complete as soon as another begins
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=THREAD_NAME, daemon=True)
        self._answer(0)  # so that one request finds the notes of all

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()
        atexit.register(self.stop)

    def begin(self, event: Event) -> None:
        """Records a call; of nested calls the outermost."""
        self._depth += 1
        if self._depth == 1:
            self._loop = threading.get_ident()
            self._calls[event.name] += 1
            self._call = _Call(self._calls[event.name], event.name, time.monotonic(), self._delay)
            if self._has_told:
                self._has_told = False
                _tell("")

    def end(self, event: Event) -> None:
        self._depth -= 1
        if not self._depth:
            self._call = _Call()

    def stop(self) -> None:
        """Ends the thread, and records on the board that this rank has ended."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.stop)
        try:
            if threading.current_thread() is not self._thread:
                self._thread.join(1.0)
            self._put(Answer(sys.maxsize, 0, "", ""))
        except Exception:  # the board is gone, so the other ranks have ended
            return

    # ---- the thread --------------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            while not self._ended.wait(self.tick / 2 if self._asking else self.tick):
                self.look()
                for function in tuple(self._regularly):
                    function()
        except Exception:  # the board is gone, so the run has ended
            return

    def look(self) -> None:
        """Answers a question of another rank, asks if this rank's call lasts too long, or looks for answers."""
        now = time.monotonic()
        known, call = int(self._board.get(f"{self._name}/question") or 0), self._call
        if known > self._known:
            self._answer(known)
            if self._asking is None:
                call.left_to, call.until = known, now + self._patience + self.tick
        if self._asking is not None:
            self._collect(self._asking, now)
        elif call.name and now - call.since > call.pause + (self.tick if self._rank else 0.0) and now >= call.until:
            if call.left_to and int(self._board.get(f"{self._name}/settled") or 0) >= call.left_to:
                call.pause *= 4
            else:
                self._ask(call, now)
            call.left_to = 0

    @property
    def _patience(self) -> float:
        return _ANSWER_S + self.tick

    def _put(self, answer: Answer) -> None:
        self._board.put(f"{self._name}/{self._rank}", json.dumps(answer).encode())

    def _answer(self, known: int) -> None:
        self._known, call = known, self._call
        self._put(Answer(known, call.number, call.name, self._place()))

    def _ask(self, call: _Call, now: float) -> None:
        number = self._board.add(f"{self._name}/question", 1)
        if number == self._known + 1:  # otherwise another rank has just asked
            self._asking = _Question(number, call, now + self._patience)
            self._answer(number)

    def _collect(self, question: _Question, now: float) -> None:
        answers, call = question.answers, question.call
        missing = [rank for rank in range(self._size) if rank not in answers]
        notes = self._board.get_all([f"{self._name}/{rank}" for rank in missing])
        for rank, note in zip(missing, notes, strict=True):
            if note is not None and (answer := Answer(*json.loads(note))).question >= question.number:
                answers[rank] = answer
        if self._call is not call:
            self._asking = None  # the call is complete; ranks that still wait ask again
        elif len(answers) == self._size or now >= question.until:
            self._asking = None
            here = [
                rank for rank, answer in answers.items() if (answer.number, answer.call) == (call.number, call.name)
            ]
            self._board.put(f"{self._name}/settled", str(self._known).encode())
            call.pause *= 4
            if len(here) < self._size:
                _tell(self._said(call, sorted(here), answers))
                self._has_told = True

    def _said(self, call: _Call, here: list[int], answers: dict[int, Answer]) -> str:
        waited = time.monotonic() - call.since
        lines = [
            f"neuron_accel: {_ranks(here)} of {self._size} {'has' if len(here) == 1 else 'have'} waited for other "
            f"ranks for {waited:.0f} s, in `{call.name}` at {self._place()}."
        ]
        others = [rank for rank in range(self._size) if rank not in here]
        for rank in others[:_SHOWN]:
            lines.append(f"  Rank {rank} is {answers.get(rank, 'at an unknown line: it does not answer')}.")
        if len(others) > _SHOWN:
            lines.append(f"  So it is with {len(others) - _SHOWN} more ranks: {_ranks(others[_SHOWN:])}.")
        why = "look for `if accelerator.is_main_process`, or a loop that ends earlier on one rank"
        if answers.keys() == set(here):
            why = "a rank that does not answer is stopped, or in code that holds Python's lock"
        lines.append(
            f"  Every rank has to call `{call.name}`: {why}. The ranks keep waiting ({VARIABLE}=0 disables this "
            "warning)."
        )
        return "\n".join(lines)

    def _place(self) -> str:
        """File and line of the training script, such as ``train.py:31``: the innermost frame outside this package and
        installed ones."""
        collects = gc.isenabled()
        gc.disable()  # on Python 3.11 a finalizer that waits for a thread would wait for ever (CPython issue 106883)
        try:
            frame: FrameType | None = sys._current_frames().get(self._loop)
        finally:
            if collects:
                gc.enable()
        place = "an unknown place"
        while frame is not None:
            path, is_ours = frame.f_code.co_filename, _is_ours(frame)
            if not is_ours and not path.startswith(_LIBRARIES):
                return f"{path}:{frame.f_lineno}"
            if place == "an unknown place" and not is_ours:
                place = f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return place


def _tell(report: str) -> None:
    """Prints a report, and leaves it for the launcher, which shows what a rank without a terminal says; an empty one
    takes it back."""
    if report:
        print(report, file=sys.stderr, flush=True)
    if notes := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            partial = Path(f"{notes}.waiting")
            partial.write_text(report)
            partial.replace(partial.with_name(WAITING_FILE))


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
    watchdog.start()
    run.events.observe(watchdog)
    weakref.finalize(run, watchdog.stop)
    return watchdog


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:_SHOWN]]
    return f"ranks {', '.join(shown)}" + (f", ... {ranks[-1]}" if len(ranks) > _SHOWN else "")
