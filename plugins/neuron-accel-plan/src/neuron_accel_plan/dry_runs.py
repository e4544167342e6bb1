# SPDX-License-Identifier: Apache-2.0
"""Dry runs that a search needs, in this process or shared by several."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from neuron_accel.contract import StrategyPlugin
from neuron_accel.errors import NeuronAccelError, UsageError
from neuron_accel_plan.candidates import Layout
from neuron_accel_plan.layout import LayoutCount, Planner, forget_what_is_there, no_collection_of_what_is_there
from neuron_accel_plan.step import StepCount, block_of
from neuron_accel_plan.time import StepTime


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A layout that fits, with what it needs.

    Args:
        layout: the layout.
        count: memory, traffic and operations.
        time: predicted time of a step.
    """

    layout: Layout
    count: LayoutCount
    time: StepTime


@dataclass(frozen=True)
class Sample:
    """A step on the smallest mesh, which stands for all layouts with the same variant of a block.

    Args:
        family: the plugins that change what a block computes.
        rows: samples of a data-parallel rank in a micro-batch.
        micro_batches: number of micro-batches.
    """

    family: tuple[StrategyPlugin, ...]
    rows: int
    micro_batches: int = 1


@dataclass(frozen=True)
class Failed:
    """Why a layout, or a sample, is not possible.

    Args:
        reason: one sentence.
        memory: bytes that it needs, if it runs and has not enough memory; else 0.
        in_block: whether the rank of the first stage needs too much in a block of the model.
    """

    reason: str
    memory: int = 0
    in_block: bool = False


Task = Sample | Layout
"""A sample whose steps of few blocks are run, or a layout that is counted."""
Answer = Sequence[StepCount] | Ranked | Failed
_WORTHWHILE = 10.0
"""Seconds of dry runs from which on more processes gain more than their start takes."""


class DryRuns:
    """Dry-runs steps in this process, or in several processes if that takes long.

    Args:
        planner: the planner of this process.
        arguments: those that it was created with.
        calibration: measured constants for the prediction of time, or None.
        jobs: the most processes.
    """

    def __init__(self, planner: Planner, arguments: Mapping[str, Any], calibration: Any, jobs: int) -> None:
        self._planner, self._arguments, self._calibration, self._jobs = planner, arguments, calibration, jobs
        self._processes: dict[Connection, SpawnProcess] = {}
        self._seconds: list[float] = []

    def answers(
        self,
        following: Callable[[], tuple[str, Task] | None],
        number: int,
        time_left: Callable[[], float | None] = lambda: None,
    ) -> Iterator[tuple[str, Answer] | None]:
        """Yields the name and the answer of each task, as soon as there is one.

        Args:
            following: returns the name of the next task and the task; None if there is none before another one is
                answered. It is called when a process is free.
            number: about how many tasks there are.
            time_left: returns the seconds after which None is yielded if no other process has answered; None: never.
        """
        done = 0
        while not self._processes:
            task = following()
            if task is None:
                return
            started = time.perf_counter()
            found = answer(self._planner, self._calibration, task[1])
            self._seconds.append(time.perf_counter() - started)
            yield task[0], found
            done += 1
            spent = sum(self._seconds)
            expected = max(spent, spent / len(self._seconds) * (number - done))  # at least as long as until now
            if expected > _WORTHWHILE:
                self.start()
        yield from self._elsewhere(following, time_left)

    def close(self) -> None:
        """Ends the processes."""
        for connection, process in self._processes.items():
            process.kill()
            process.join()
            connection.close()
        self._processes.clear()

    def start(self) -> None:
        """Starts the processes, unless there is to be one only. Their own start goes on beside what this process
        does."""
        if self._jobs == 1 or self._processes:
            return
        context = multiprocessing.get_context("spawn")
        for _ in range(self._jobs):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, self._arguments, self._calibration), daemon=True)
            process.start()
            there.close()
            self._processes[here] = process

    def _elsewhere(
        self, following: Callable[[], tuple[str, Task] | None], time_left: Callable[[], float | None]
    ) -> Iterator[tuple[str, Answer] | None]:
        free, busy = list(self._processes), dict[Connection, str]()
        while True:
            while free and (task := following()) is not None:
                connection = free.pop()
                try:
                    connection.send(task[1])
                except OSError:
                    raise self._ended(connection) from None
                busy[connection] = task[0]
            if not busy:
                return
            ready = wait(busy, time_left())
            if not ready:
                yield None
            for connection in [each for each in ready if isinstance(each, Connection)]:
                try:
                    found = connection.recv()
                except (EOFError, OSError):
                    raise self._ended(connection) from None
                free.append(connection)
                yield busy.pop(connection), found

    def _ended(self, connection: Connection) -> UsageError:
        process = self._processes[connection]
        process.join()
        return UsageError(
            f"A process of the search ended with exit code {process.exitcode}.",
            why="its own error, if it had one, is printed above; a negative code is a signal, and -9 often means that "
            "the machine has too little memory",
            fix="search in this process: jobs=1, or --jobs 1",
        )


def _serve(connection: Connection, arguments: Mapping[str, Any], calibration: Any) -> None:
    """Answers tasks until the other end of the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks is interrupted, and ends this one
    torch.set_num_threads(1)
    planner = Planner(**arguments)
    with no_collection_of_what_is_there():
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            connection.send(answer(planner, calibration, task))


def answer(planner: Planner, calibration: Any, task: Task) -> Answer:
    """Runs a sample, or counts a layout and predicts its time."""
    forget_what_is_there()
    try:
        if isinstance(task, Sample):
            return planner.shallow(task.family, task.rows, task.micro_batches)
        count = planner.count(task.plugins, task.accumulation, rank=0, only_if_fits=True)
        if count.fits:  # other ranks may keep more
            count = planner.count(task.plugins, task.accumulation)
    except NeuronAccelError as error:
        return Failed(first_line(error))
    except (RuntimeError, ValueError, TypeError) as error:
        if is_ours(error):
            raise
        return Failed(f"its dry run failed: {first_line(error)}")
    if not count.compiles:
        return Failed(next(str(finding) for finding in count.findings if finding.certain))
    if not count.fits:
        assert count.core_bytes is not None
        peak, room = count.step.peak, count.core_bytes - count.reserve
        largest = max(peak.parts, key=lambda part: peak.parts[part])
        return Failed(
            f"at least {peak.total / 2**30:.1f} GiB, most of it {largest} ({peak.parts[largest] / 2**30:.1f} GiB); "
            f"a core has {room / 2**30:.3g} GiB without its reserve",
            memory=peak.total,
            in_block=count.rank == 0 and block_of(peak.moment, planner.blocks or "") is not None,
        )
    return Ranked(layout=task, count=count, time=count.predict(calibration))


def first_line(error: Exception) -> str:
    """Returns the first line of the message of an error."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised in code of this package or of neuron_accel."""
    assert error.__traceback__ is not None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).split(".")[0].startswith("neuron_accel")
