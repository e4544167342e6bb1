# SPDX-License-Identifier: Apache-2.0
"""Searches the layouts of a model on a number of machines: all that the installed plugins support. Layouts that cannot
fit or run are ruled out with a reason; the others are ranked by predicted time.

One micro-batch of one sample is dry-run for every variant of a block (tensor parallelism, sequence parallelism and so
on) without recomputation, on the smallest mesh. From that follows a bound below which the predicted time of a layout is
not, whatever its stages, replicas and micro-batches are, and whatever it recomputes. Then the layout with the least
bound is examined more closely, again and again: its own variant of a block is run, from which its memory is estimated,
then a micro-batch of its own size, and at last the layout itself is counted and its time predicted. What was counted
bounds layouts that only recompute more, or shard less. A predicted time that is below all bounds is the next best one
(best-first search). A search whose time is limited ends before that, with the best that was counted and the least bound
of what is left.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import yaml

from neuron_accel import Instance, find_instance
from neuron_accel.errors import ConfigurationError
from neuron_accel_plan.bounds import Bounds, Estimate
from neuron_accel_plan.candidates import Layout, exclude, layouts_of, offering, text
from neuron_accel_plan.dry_runs import Answer, DryRuns, Failed, Ranked, Sample, Task
from neuron_accel_plan.layout import Planner, no_collection_of_what_is_there

if TYPE_CHECKING:
    from neuron_accel_plan.calibration import Machine

__all__ = ["Layout", "Left", "Ranked", "RuledOut", "Search", "Slower", "exclude", "offering", "search", "text"]


@dataclass(frozen=True, kw_only=True)
class RuledOut:
    """A layout that does not fit or cannot run, and why."""

    layout: Layout
    reason: str


@dataclass(frozen=True, kw_only=True)
class Slower:
    """A layout that may fit, and is slower than all that were found.

    Args:
        layout: the layout.
        seconds: what a step takes at least, by a bound of the predicted time; the predicted time if it was counted.
        counted: whether it was counted, and fits.
    """

    layout: Layout
    seconds: float
    counted: bool


@dataclass(frozen=True, kw_only=True)
class Left:
    """A layout that may fit and be among the fastest, and that a search with a limit of time did not come to.

    Args:
        layout: the layout.
        seconds: what a step takes at least, by a bound of the predicted time.
    """

    layout: Layout
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """The layouts of a model on some machines.

    Args:
        model: name of the model's class.
        parameters: number of its parameters.
        instance: instance type.
        instances: number of instances.
        tokens: tokens in a step.
        best: layouts that were counted and fit, the fastest first.
        ruled_out: those that do not fit or cannot run.
        slower: those that are not faster than the last of ``best``.
        left: those that may be faster, that with the least bound first; empty unless the time was limited.
        price_per_hour: price of an instance for an hour; None if it was not given.
    """

    model: str
    parameters: int
    instance: str
    instances: int
    tokens: int
    best: tuple[Ranked, ...]
    ruled_out: tuple[RuledOut, ...] = field(repr=False)
    slower: tuple[Slower, ...] = field(default=(), repr=False)
    left: tuple[Left, ...] = field(default=(), repr=False)
    price_per_hour: float | None = None

    @property
    def at_most_faster(self) -> float | None:
        """By which fraction of its tokens per second a layout that is left may be faster than the first; 0 if none may,
        None if nothing is known of one."""
        if not self.left or not self.best:
            return 0.0
        least = self.left[0].seconds
        return max(0.0, self.best[0].time.seconds / least - 1) if least else None

    def price(self, seconds: float) -> float | None:
        """Price of a million tokens, if a step takes that long."""
        if self.price_per_hour is None:
            return None
        return self.price_per_hour * self.instances / 3600 * seconds / self.tokens * 1e6

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain numbers and text: bytes, seconds."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "instance": self.instance,
            "instances": self.instances,
            "tokens": self.tokens,
            "layouts": [
                {
                    **ranked.count.to_dict(),
                    "layout": str(ranked.layout),
                    "config": ranked.layout.configuration(),
                    "seconds": {"likely": ranked.time.seconds, "low": ranked.time.low, "high": ranked.time.high},
                    "price_per_million_tokens": self.price(ranked.time.seconds),
                }
                for ranked in self.best
            ],
            "ruled_out": [{"layout": str(ruled.layout), "reason": ruled.reason} for ruled in self.ruled_out],
            "slower": [
                {"layout": str(each.layout), "seconds_at_least": each.seconds, "counted": each.counted}
                for each in self.slower
            ],
            "left": [{"layout": str(each.layout), "seconds_at_least": each.seconds} for each in self.left],
        }

    def write(self, path: str | os.PathLike[str], number: int = 1) -> None:
        """Writes the configuration that trains with a layout.

        Args:
            path: a YAML file, which is replaced.
            number: the layout, from 1.

        Raises:
            ConfigurationError: if no layout fits, or the file cannot be written.
        """
        if not self.best:
            raise ConfigurationError("No layout fits, so there is no configuration to write.", where=os.fspath(path))
        ranked = self.best[number - 1]
        count = ranked.count
        calls = ranked.layout.accumulation
        head = (
            f"# {self.model} on {self.instances} x {self.instance}: {count.mesh}, {ranked.layout}\n"
            f"# a data-parallel rank calls the model with {count.micro_batch * count.accumulation // calls} samples of "
            f"{count.sequence} tokens\n"
        )
        try:
            written = head + yaml.safe_dump(ranked.layout.configuration(), sort_keys=False)
            Path(path).write_text(written, encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(
                f"{os.fspath(path)} cannot be written: {error.strerror or error}.",
                fix="pass a file in an existing folder that can be written",
            ) from error


def search(
    model: str | os.PathLike[str] | Any,
    *,
    instances: int,
    instance: str,
    global_batch: int,
    sequence: int,
    dtype: str = "bfloat16",
    attention: str = "eager",
    reserve: int | None = None,
    price_per_hour: float | None = None,
    calibration: Any = None,
    best: int = 10,
    jobs: int = 1,
    within: float | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Search:
    """Finds the fastest layouts of a model that fit on some machines. See :func:`neuron_accel.plan`.

    Args:
        model, instance, global_batch, sequence, dtype, attention, reserve: see :func:`neuron_accel.plan`.
        instances: number of instances, all cores of which are used.
        price_per_hour: price of an instance for an hour.
        calibration: measured constants for the prediction of time.
        best: number of layouts to find.
        jobs: number of processes that dry runs are shared by, if they take long enough. Each has about half a gigabyte;
            with more than one the script needs ``if __name__ == "__main__":``, as with ``multiprocessing``.
        within: seconds after which the search ends, as soon as one layout is found that fits: at least one sample of
            every variant of a block is run. What is found then depends on the speed of this machine. None: the search
            ends when nothing that is left can be faster.
        progress: called with the number of dry runs that are done, and that will be done.

    Raises:
        ConfigurationError: for an unknown model, instance or option.
    """
    started = time.monotonic()
    kind: Any = find_instance(instance) if isinstance(instance, str) else instance  # or ranks.CpuRanks
    if instances < 1:
        raise ConfigurationError(f"instances is {instances}.", fix="pass at least 1")
    if instances > 1 and not kind.multi_node:
        raise ConfigurationError(
            f"{instances} instances of {kind.name} cannot train together.",
            where="instances",
            why="they have no network for groups over several machines",
            fix="pass 1, or a larger instance",
        )
    if price_per_hour is not None and not 0 < price_per_hour < math.inf:
        raise ConfigurationError(f"price_per_hour is {price_per_hour:g}.", fix="pass a price above 0")
    for name, number in (("jobs", jobs), ("best", best)):
        if number < 1:
            raise ConfigurationError(f"{name} is {number}.", fix="pass at least 1")
    if within is not None and not within > 0:
        raise ConfigurationError(f"within is {within:g}.", fix="pass a number of seconds above 0")
    arguments: dict[str, Any] = {
        "model": model,
        "world_size": instances * kind.hardware().full,
        "global_batch": global_batch,
        "sequence": sequence,
        "instance": instance,
        "dtype": dtype,
        "attention": attention,
        "reserve": reserve,
    }
    planner = Planner(**arguments)
    with no_collection_of_what_is_there(), closing(DryRuns(planner, arguments, calibration, jobs)) as dry_runs:
        queue = _Searcher(planner, kind, dry_runs, calibration, progress).run(best, Deadline(within, started))
    return Search(
        model=type(planner.model).__name__,
        parameters=planner.parameters,
        instance=kind.name,
        instances=instances,
        tokens=global_batch * sequence,
        best=tuple(queue.found),
        ruled_out=tuple(queue.ruled_out),
        slower=tuple(queue.slower()),
        left=tuple(queue.left()),
        price_per_hour=price_per_hour,
    )


def rank(ranked: Ranked) -> tuple[float, int, int]:
    """Returns by what layouts are ranked: predicted time; of times that are equal but for rounding, the fewest
    micro-batches, and then the least memory."""
    return float(f"{ranked.time.seconds:.9g}"), ranked.count.accumulation, ranked.count.step.peak.total


@dataclass(frozen=True)
class Deadline:
    """When a search ends.

    Args:
        seconds: after how many; None: when nothing that is left can be faster.
        started: when it was started, by ``time.monotonic``.
    """

    seconds: float | None = None
    started: float = 0.0

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the time has passed."""
        return self.seconds is not None and time.monotonic() - self.started > share * self.seconds

    def left(self) -> float | None:
        """Returns the seconds until the search ends; None without a limit, or if they are over."""
        left = math.inf if self.seconds is None else self.started + self.seconds - time.monotonic()
        return left if 0 < left < math.inf else None


_MANY = 1000
"""Number of layouts from which on more processes are started at once, whatever a dry run takes."""


class _Searcher:
    def __init__(
        self,
        planner: Planner,
        instance: Instance,
        dry_runs: DryRuns,
        calibration: Machine | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self._planner, self._dry_runs, self._progress = planner, dry_runs, progress
        self._bounds = Bounds(planner, instance, calibration)

    def layouts(self) -> Iterator[Layout]:
        """Yields the layouts that may be tried."""
        return layouts_of(self._planner.space(()))

    def run(self, best: int, deadline: Deadline = Deadline()) -> _Queue:
        """Returns what is known when the search ends: the fastest layouts that fit, and all others."""
        bounds, ruled_out = self._bounds, list[RuledOut]()
        first: dict[str, Sample] = {}
        possible: dict[str, list[tuple[int, Layout]]] = {}  # by their first sample, with their place among all
        for number, layout in enumerate(self.layouts()):
            if number == _MANY:
                self._dry_runs.start()
            reason = bounds.cannot_fit(layout)
            if reason is None:
                sample = bounds.first_sample(layout)
                first.setdefault(repr(sample), sample)
                possible.setdefault(repr(sample), []).append((number, layout))
            else:
                ruled_out.append(RuledOut(layout=layout, reason=reason))
        self._progress(0, len(first) + best)
        samples = iter(first.items())
        answers = self._dry_runs.answers(lambda: next(samples, None), len(first) + 3 * best)
        estimates: dict[int, Estimate] = {}
        for done, answered in enumerate(answers, start=1):
            assert answered is not None
            name, answer = answered
            bounds.learn(first[name], answer)
            for number, layout in possible.pop(name):
                estimate = bounds.estimate(layout)
                if isinstance(estimate, str):
                    ruled_out.append(RuledOut(layout=layout, reason=estimate))
                else:
                    estimates[number] = estimate
            self._progress(done, len(first) + best)
        queue = _Queue(self._bounds, [estimates[number] for number in sorted(estimates)], best)
        queue.ruled_out += ruled_out
        self._best_first(
            queue, deadline, lambda done, more: self._progress(len(first) + done, len(first) + done + more)
        )
        return queue

    def _best_first(self, queue: _Queue, deadline: Deadline, progress: Callable[[int, int], None]) -> None:
        """Runs what has the least bound until enough layouts are counted whose predicted time is below all bounds, or
        equal to some and ranked before these (:func:`rank`); or until the time is over and one is counted that fits."""
        done = 0
        for answer in self._dry_runs.answers(queue.following, 3 * queue.best, deadline.left):
            if answer is not None:
                queue.take(*answer)
                done += 1
                progress(done, queue.best - len(queue.found))
            if len(queue.found) == queue.best:
                break  # what still runs is slower
            if deadline.is_over(0.5):
                queue.hurry()
            if deadline.is_over() and queue.end():
                break
        progress(done, 0)


_Key = tuple[float, int, float]
"""By what layouts are ranked: see :func:`rank`; for one that is not counted by what is known of it."""


class _Queue:
    """Layouts that may be among the fastest, the one with the least bound first, and what is running.

    Args:
        bounds: what is known.
        estimates: of each layout.
        best: number of layouts to find.

    Attributes:
        found: the fastest layouts.
        ruled_out: those that were found to be impossible.
        best: number of layouts to find.
    """

    def __init__(self, bounds: Bounds, estimates: Iterable[Estimate], best: int) -> None:
        self.found: list[Ranked] = []
        self.ruled_out: list[RuledOut] = []
        self.best = best
        self._bounds = bounds
        # With the place among all, which ranks what is alike.
        self._heap: list[tuple[_Key, int, Estimate | Ranked]] = []
        self._running: dict[str, Task] = {}
        self._counted: dict[str, str] = {}  # layouts that are running, by what they have in common with others
        self._waiting: dict[str, list[tuple[_Key, int, Estimate]]] = {}  # by the task that they wait for
        self._fits = False  # whether a layout was counted that fits
        self._hurries, self._may_hurry = False, True
        self._aside: list[tuple[_Key, int, Estimate]] = []  # those that may not fit, until one is found that does
        self._ended = False
        for number, estimate in enumerate(estimates):
            self._push(estimate, number)

    def following(self) -> tuple[str, Task] | None:
        """Returns the name of the task that is to be run for the layout with the least bound of those that wait for
        none, and the task. None if the next layout, or all of them, are found, or wait for what is running."""
        self._find()
        while self._heap and len(self.found) < self.best and isinstance(self._heap[0][-1], Estimate):
            key, number, each = heapq.heappop(self._heap)
            assert isinstance(each, Estimate)
            if self._is_current(each, number) and not self._is_aside(key, number, each):
                counts = each.sample is None or (self._hurries and each.memory > 0)
                task = each.layout if counts else each.sample
                assert task is not None
                name = repr(task)
                if counts:
                    name = self._counted.setdefault(self._bounds.common(each.layout), name)
                self._waiting.setdefault(name, []).append((key, number, each))
                if name not in self._running:
                    self._running[name] = task
                    return name, task
            self._find()
        if self._aside and not self._heap and not self._running:  # none is left that is likely to fit
            self._calm()
            return self.following()
        return None

    def hurry(self) -> None:
        """Counts only what is likely to fit, by one sample of its family, until a layout is found that does."""
        self._hurries = self._may_hurry

    def _is_aside(self, key: _Key, number: int, each: Estimate) -> bool:
        """Whether a layout is put aside, since it is not likely to fit."""
        if not self._hurries or self._bounds.is_likely(each):
            return False
        self._aside.append((key, number, each))
        return True

    def _calm(self) -> None:
        """Takes up again what was put aside, for good."""
        self._hurries = self._may_hurry = False
        for item in self._aside:
            heapq.heappush(self._heap, item)
        self._aside.clear()

    def end(self) -> bool:
        """Takes what was counted and fits as found, also if what is left may be faster; returns whether there is
        any."""
        if not self._fits:
            return False
        counted = [each for *_, each in self._heap if isinstance(each, Ranked)]
        self._ended = True
        self.found += sorted(counted, key=rank)[: self.best - len(self.found)]
        found = {id(each) for each in self.found}
        self._heap = [item for item in self._heap if id(item[-1]) not in found]
        return True

    def left(self) -> list[Left]:
        """Returns the layouts that may be among the fastest, if the search was ended before that was known."""
        return [Left(layout=each.layout, seconds=each.seconds) for each in self._others() if self._is_left(each)]

    def _others(self) -> list[Estimate | Ranked]:
        """The layouts that are not among the fastest, the fastest of them first."""
        others = [*self._heap, *itertools.chain.from_iterable(self._waiting.values())]
        return [each for *_, each in sorted(others, key=lambda item: item[:2])]

    def _is_left(self, each: Estimate | Ranked) -> TypeGuard[Estimate]:
        if not self._ended or isinstance(each, Ranked):
            return False
        return len(self.found) < self.best or each.seconds < self.found[-1].time.seconds

    def _find(self) -> None:
        """Takes what is counted and ranked before all others, also before those that wait for what is running."""
        while self._heap and len(self.found) < self.best:
            key, _, first = self._heap[0]
            if not isinstance(first, Ranked):
                return
            if any(waits < key for waits, *_ in itertools.chain(self._aside, *self._waiting.values())):
                return
            self.found.append(first)
            heapq.heappop(self._heap)

    def take(self, name: str, answer: Answer) -> None:
        """Keeps the answer of a task."""
        task, waiting = self._running.pop(name), self._waiting.pop(name)
        if isinstance(task, Sample):
            self._bounds.learn(task, answer)
            for _, number, estimate in waiting:
                again = self._bounds.estimate(estimate.layout)
                if isinstance(again, str):
                    self._rule_out(estimate.layout, again)
                else:
                    self._push(again, number)
            return
        # A layout, and others that it may tell something of.
        del self._counted[self._bounds.common(task)]
        (_, number, estimate), *others = waiting
        if isinstance(answer, Ranked):
            self._bounds.learn_memory(estimate, answer.count.step.peak.total)
            self._push(answer, number)
            self._fits = True
            self._calm()
        else:
            assert isinstance(answer, Failed)
            self._bounds.learn_memory(estimate, answer.memory)
            self._rule_out(estimate.layout, answer.reason, answer)
        for _, number, estimate in others:
            self._push(estimate, number)
        self._find()

    def slower(self) -> list[Slower]:
        """Returns the layouts that are known not to be among the fastest."""
        return [
            Slower(
                layout=each.layout,
                seconds=each.time.seconds if isinstance(each, Ranked) else each.seconds,
                counted=isinstance(each, Ranked),
            )
            for each in self._others()
            if not self._is_left(each)
        ]

    def _push(self, each: Estimate | Ranked, number: int) -> None:
        key: _Key
        if isinstance(each, Ranked):
            key, seconds = rank(each), each.time.seconds
        else:  # before predicted times that are equal but for rounding
            key, seconds = (each.seconds * (1 - 1e-9), each.micro_batches, each.memory), each.seconds
        self._bounds.learn_layout(each.layout, seconds)
        heapq.heappush(self._heap, (key, number, each))

    def _rule_out(self, layout: Layout, reason: str, answer: Failed | None = None) -> None:
        self._bounds.learn_impossible(layout, answer)
        self.ruled_out.append(RuledOut(layout=layout, reason=reason))

    def _is_current(self, estimate: Estimate, number: int) -> bool:
        """Whether an estimate is the best that is known; else the layout is ruled out, or waits with a better one."""
        if estimate.sample is not None:  # more samples may be known by now
            again = self._bounds.estimate(estimate.layout)
            if isinstance(again, str):
                self._rule_out(estimate.layout, again)
                return False
            if again.sample != estimate.sample or again.seconds > estimate.seconds:
                self._push(replace(again, seconds=max(again.seconds, estimate.seconds)), number)
                return False
        elif reason := self._bounds.too_large(estimate.layout, estimate.memory):  # more layouts may be counted by now
            self._rule_out(estimate.layout, reason)
            return False
        reason, seconds = self._bounds.by_layouts(estimate.layout)
        if reason is not None:
            self._rule_out(estimate.layout, reason)
            return False
        if seconds > estimate.seconds:  # let those that recompute less be tried before
            self._push(replace(estimate, seconds=seconds), number)
            return False
        return True
