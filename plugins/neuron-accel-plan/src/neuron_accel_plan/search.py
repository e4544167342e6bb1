# SPDX-License-Identifier: Apache-2.0
"""Searches the layouts of a model on a number of machines: all that the installed plugins support. Layouts that cannot
fit or run are ruled out with a reason; the others are ranked by predicted time.

One micro-batch of one sample is dry-run for every variant of a block (tensor parallelism, sequence parallelism and so
on) without recomputation, on the smallest mesh. From that follows a bound below which the predicted time of a layout is
not, whatever its stages, replicas and micro-batches are, and whatever it recomputes. Then the layout with the least
bound is examined more closely, again and again: its own variant of a block is run, from which its memory is estimated,
then a micro-batch of its own size, and at last the layout itself is counted and its time predicted. What was counted
bounds layouts that only recompute more, or shard less. A predicted time that is below all bounds is the next best one
(best-first search).
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from neuron_accel import Instance, find_instance
from neuron_accel.errors import ConfigurationError
from neuron_accel_plan.bounds import Bounds, Estimate
from neuron_accel_plan.candidates import Layout, exclude, layouts_of, offering, text
from neuron_accel_plan.dry_runs import DryRuns, Failed, Ranked, Sample, Task
from neuron_accel_plan.layout import Planner, no_collection_of_what_is_there

if TYPE_CHECKING:
    from neuron_accel_plan.calibration import Machine

__all__ = ["Layout", "Ranked", "RuledOut", "Search", "Slower", "exclude", "offering", "search", "text"]


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
class Search:
    """The layouts of a model on some machines.

    Args:
        model: name of the model's class.
        parameters: number of its parameters.
        instance: instance type.
        instances: number of instances.
        tokens: tokens in a step.
        best: layouts that fit, the fastest first.
        ruled_out: those that do not fit or cannot run.
        slower: all others.
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
    price_per_hour: float | None = None

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
        progress: called with the number of dry runs that are done, and that will be done.

    Raises:
        ConfigurationError: for an unknown model, instance or option.
    """
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
        found, slower, ruled_out = _Searcher(planner, kind, dry_runs, calibration, progress).run(best)
    return Search(
        model=type(planner.model).__name__,
        parameters=planner.parameters,
        instance=kind.name,
        instances=instances,
        tokens=global_batch * sequence,
        best=tuple(found),
        ruled_out=tuple(ruled_out),
        slower=tuple(slower),
        price_per_hour=price_per_hour,
    )


def rank(ranked: Ranked) -> tuple[float, int, int]:
    """Returns by what layouts are ranked: predicted time; of times that are equal but for rounding, the fewest
    micro-batches, and then the least memory."""
    return float(f"{ranked.time.seconds:.9g}"), ranked.count.accumulation, ranked.count.step.peak.total


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

    def run(self, best: int) -> tuple[list[Ranked], list[Slower], list[RuledOut]]:
        """Returns the fastest layouts that fit, those that are slower, and those that are not possible."""
        bounds, ruled_out = self._bounds, list[RuledOut]()
        possible: list[Layout] = []
        layouts = [*self.layouts()]
        if len(layouts) > _MANY:
            self._dry_runs.start()
        for layout in layouts:
            reason = bounds.cannot_fit(layout)
            if reason is None:
                possible.append(layout)
            else:
                ruled_out.append(RuledOut(layout=layout, reason=reason))
        first = {repr(sample): sample for sample in map(bounds.first_sample, possible)}
        self._progress(0, len(first) + best)
        for done, (name, answer) in enumerate(self._dry_runs.answers(first.items(), len(first) + 3 * best), start=1):
            bounds.learn(first[name], answer)
            self._progress(done, len(first) + best)
        estimates = []
        for layout in possible:
            estimate = bounds.estimate(layout)
            if isinstance(estimate, str):
                ruled_out.append(RuledOut(layout=layout, reason=estimate))
            else:
                estimates.append(estimate)
        found, slower, others = self._best_first(
            estimates, best, lambda done, more: self._progress(len(first) + done, len(first) + done + more)
        )
        return found, slower, ruled_out + others

    def _best_first(
        self, estimates: Iterable[Estimate], best: int, progress: Callable[[int, int], None]
    ) -> tuple[list[Ranked], list[Slower], list[RuledOut]]:
        """Runs what has the least bound until ``best`` layouts are counted whose predicted time is below all bounds, or
        equal to some and ranked before these (:func:`rank`)."""
        heap: list[tuple[float, int, float, int, Estimate | Ranked]] = []

        def push(each: Estimate | Ranked, number: int) -> None:
            """Adds what is known of a layout. ``number`` is its place among all: it ranks what is alike."""
            key: tuple[float, int, float]
            self._bounds.learn_layout(each.layout, each.time.seconds if isinstance(each, Ranked) else each.seconds)
            if isinstance(each, Ranked):
                key = rank(each)
            else:  # before predicted times that are equal but for rounding
                key = each.seconds * (1 - 1e-9), each.micro_batches, each.memory
            heapq.heappush(heap, (*key, number, each))

        def rule_out(layout: Layout, reason: str, answer: Failed | None = None) -> None:
            self._bounds.learn_impossible(layout, answer)
            ruled_out.append(RuledOut(layout=layout, reason=reason))

        for number, estimate in enumerate(estimates):
            push(estimate, number)
        found: list[Ranked] = []
        ruled_out: list[RuledOut] = []
        done = 0
        while heap and len(found) < best:
            if isinstance(heap[0][-1], Ranked):
                found.append(heapq.heappop(heap)[-1])  # type: ignore[arg-type]
                continue
            tasks: dict[str, Task] = {}
            taken: dict[str, list[tuple[int, Estimate]]] = {}
            while heap and len(tasks) < self._dry_runs.width and isinstance(heap[0][-1], Estimate):
                *_, number, first = heapq.heappop(heap)
                assert isinstance(first, Estimate)
                estimate = first
                if estimate.sample is not None:  # more samples may be known by now
                    again = self._bounds.estimate(estimate.layout)
                    if isinstance(again, str):
                        rule_out(estimate.layout, again)
                        continue
                    if again.sample != estimate.sample or again.seconds > estimate.seconds:
                        push(replace(again, seconds=max(again.seconds, estimate.seconds)), number)
                        continue
                task = estimate.layout if estimate.sample is None else estimate.sample
                reason, seconds = self._bounds.by_layouts(estimate.layout)
                if reason is not None:
                    rule_out(estimate.layout, reason)
                    continue
                if seconds > estimate.seconds:  # let those that recompute less be tried before
                    push(replace(estimate, seconds=seconds), number)
                    continue
                if not isinstance(task, Sample) or not self._bounds.knows(task):
                    tasks[repr(task)] = task
                taken.setdefault(repr(task), []).append((number, estimate))
            for name, answer in self._dry_runs.answers(tasks.items(), 3 * best):
                done += 1
                task = tasks[name]
                if isinstance(task, Sample):
                    self._bounds.learn(task, answer)
                    continue
                ((number, estimate),) = taken.pop(name)
                if isinstance(answer, Ranked):
                    push(answer, number)
                else:
                    assert isinstance(answer, Failed)
                    rule_out(estimate.layout, answer.reason, answer)
            progress(done, best - len(found))
            for number, estimate in itertools.chain.from_iterable(taken.values()):  # whose sample is known now
                again = self._bounds.estimate(estimate.layout)
                if isinstance(again, str):
                    rule_out(estimate.layout, again)
                else:
                    push(again, number)
        progress(done, 0)
        slower = [
            Slower(
                layout=each.layout,
                seconds=each.time.seconds if isinstance(each, Ranked) else each.seconds,
                counted=isinstance(each, Ranked),
            )
            for *_, each in sorted(heap, key=lambda item: item[:4])
        ]
        return found, slower, ruled_out
