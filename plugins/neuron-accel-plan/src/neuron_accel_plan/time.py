# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a step from what a rank does in it, in order, and the constants of a machine.

A kernel takes a fixed time and that of the roofline: its operations at the core's rate, or its bytes at the memory's,
whichever is longer. Collectives run one after another beside the kernels, for as long as size, group and link say; a
wait lasts until the collective is complete. What a compiler fuses moves its bytes once.

A collective along a ring (the algorithm whose bytes are recorded) crosses every level of the network between its
ranks. At each level the groups that leave a place, such as a chip or a machine, share its bandwidth; the slowest level
decides. Latency is that of the ring's messages inside a machine, and that of a tree of ``log2`` of them between
machines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from neuron_accel import Instance, find_instance
from neuron_accel.errors import UsageError
from neuron_accel_plan.calibration import Bound, Constant, Level, Machine, machine_of
from neuron_accel_plan.ranks import CpuRanks
from neuron_accel_plan.trace import Event

if TYPE_CHECKING:
    from neuron_accel_plan.step import StepCount
    from neuron_accel_plan.trace import Kernel, Message, Trace, Work

PRODUCTS = "matrix products"
OTHERS = "other kernels"
FIXED = "fixed cost of kernels"
WAITING = "exposed communication,"
BUBBLE = "bubble"

PASSES = ("forward", "backward")
"""The phases whose time grows with the number of micro-batches."""

_MULTIPLIES = ("product", "batched product", "attention")
_ROUNDS = {"all_reduce": 2}
"""How often a collective traverses the ring; once if it is missing."""
_ONE_HOP = ("send", "receive", "permute", "broadcast")


@dataclass(frozen=True)
class Span:
    """What a rank does from ``start`` to ``end``, in seconds since the step began.

    Args:
        lane: ``"compute"`` or ``"communication"``.
        label: the phase of the step, or the collective and its axis.
        start, end: seconds.
    """

    lane: str
    label: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of an optimizer step.

    Args:
        seconds: with the likely constants.
        low, high: with those for which a step is fastest and slowest.
        parts: seconds by what they are spent on: matrix products, other kernels, fixed costs, waiting for the
            collectives of an axis, bubble. Their sum is ``seconds``.
        sources: where each constant is from.
        spans: what happens when, of the deepest model that was run: with fewer blocks than the model has if the count
            was extrapolated.
    """

    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    sources: Mapping[str, str] = field(repr=False)
    spans: Sequence[Span] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns seconds, bounds, parts and sources as plain numbers and text."""
        numbers = {"seconds": self.seconds, "low": self.low, "high": self.high}
        return {**numbers, "parts": dict(self.parts), "sources": dict(self.sources)}


def predict_time(
    counts: StepCount,
    machine: Instance | Machine | str,
    calibration: Machine | None = None,
    *,
    bubble: float = 0.0,
) -> StepTime:
    """Predicts the time of the step that was counted.

    Args:
        counts: of a dry run.
        machine: what the rank runs on: an instance, its name, or constants.
        calibration: measured constants, which replace those of ``machine``; what was not measured, such as the network
            between machines, stays.
        bubble: fraction of the passes' time, from 0 to 1, in which the rank waits for other stages of a pipeline.

    Raises:
        UsageError: if the count is that of a real rank, whose order of kernels and collectives is not recorded.
        ConfigurationError: for an unknown instance.
    """
    if not counts.traces:
        raise UsageError(
            "The time of this step cannot be predicted.",
            why="it was counted on a real rank, where the order of kernels and collectives is not recorded",
            fix="count a dry run, with backend=DryRun(world_size=...), or measure the time on real ranks",
        )
    constants = constants_of(machine, calibration)
    totals: dict[Bound, float] = {}
    parts: Counter[str] = Counter()
    spans: Sequence[Span] = ()
    bounds: tuple[Bound, ...] = ("likely", "best", "worst")
    for bound in bounds:
        found: Counter[str] = Counter()
        for factor, trace in counts.traces:
            run = _Run(constants, bound)
            run.play(trace)
            passes = sum(seconds for (phase, _), seconds in run.spent.items() if phase in PASSES)
            run.spent["", BUBBLE] = passes * bubble / (1 - bubble)  # type: ignore[assignment]
            for (_, part), seconds in run.spent.items():
                found[part] += factor * seconds  # type: ignore[assignment]  # a counter of seconds
            if bound == "likely" and factor > 0:
                spans = run.spans
        found = Counter({part: seconds for part, seconds in found.items() if seconds > 0})  # type: ignore[misc]
        totals[bound] = sum(found.values())
        if bound == "likely":
            parts = found
    low, high = sorted((totals["best"], totals["worst"]))
    return StepTime(
        seconds=totals["likely"],
        low=min(low, totals["likely"]),
        high=max(high, totals["likely"]),
        parts=dict(parts),
        sources=constants.sources(),
        spans=tuple(spans),
    )


def constants_of(machine: Instance | Machine | str, calibration: Machine | None) -> Machine:
    """Returns the constants of a machine, or the measured ones and of the machine what was not measured."""
    found = find_instance(machine) if isinstance(machine, str) else machine
    if calibration is not None and isinstance(found, CpuRanks):
        return calibration
    base = found if isinstance(found, Machine) else machine_of(found)
    if calibration is None:
        return base
    return replace(calibration, levels=calibration.levels or base.levels)


class _Run:
    """Plays a trace on a machine, with a clock for kernels and one for collectives.

    Args:
        machine: the constants.
        bound: which of them.
        counts: whether a message is sent; the others take no time.
    """

    def __init__(
        self, machine: Machine, bound: Bound, counts: Callable[[Message], bool] = lambda message: True
    ) -> None:
        self._machine, self._bound, self._counts = machine, bound, counts
        self.spans: list[Span] = []
        self.spent: Counter[tuple[str, str]] = Counter()  # seconds by phase and part
        self._phase = ""
        self._now = self._free = 0.0

    def play(self, trace: Trace) -> None:
        ends: dict[int, float] = {}
        overlap = min(1.0, self._machine.overlap.at(bound=self._bound))
        for event in trace.events:
            if not isinstance(event, Event):
                self._work(event)
                continue
            message = trace.messages[event.message]
            if not self._counts(message):
                continue
            waiting = f"{WAITING} {message.axis}"
            if event.what == "start":
                seconds = collective_seconds(self._machine, message, self._bound)
                self._spend(waiting, (1 - overlap) * seconds)
                begin = max(self._now - (1 - overlap) * seconds, self._free)
                self._free = ends[event.message] = begin + seconds
                self.spans.append(Span("communication", f"{message.op} {message.axis}", begin, self._free))
            else:
                self._spend(waiting, max(0.0, ends.get(event.message, 0.0) - self._now))

    def _work(self, work: Work) -> None:
        start, self._phase = self._now, work.phase
        machine, bound = self._machine, self._bound
        fixed = (machine.fixed.get(work.phase) or machine.fixed[""]).at(bound=bound)
        factor = machine.in_training[work.phase].at(bound=bound) if work.phase in machine.in_training else 1.0
        for kernel, number in work.kernels:
            self._spend(FIXED, number * fixed)
            if kernel.kind in _MULTIPLIES:
                self._spend(PRODUCTS, number * factor * kernel_seconds(machine, kernel, bound))
            elif not machine.fuses:
                self._spend(OTHERS, number * factor * kernel_seconds(machine, kernel, bound))
        if machine.fuses and work.fused:
            self._spend(OTHERS, work.fused / _rate(machine, "element-wise", "").at(work.fused, bound))
        self.spans.append(Span("compute", work.phase, start, self._now))

    def _spend(self, part: str, seconds: float) -> None:
        self.spent[self._phase, part] += seconds  # type: ignore[assignment]  # a counter of seconds
        self._now += seconds


def spent_seconds(
    counts: StepCount, machine: Machine, sent: Callable[[Message], bool] = lambda message: True
) -> dict[tuple[str, str], float]:
    """Returns the likely seconds of a step by phase, and what they are spent on, as in :attr:`StepTime.parts`, if of
    all messages only those are sent for which ``sent`` returns True."""
    found: Counter[tuple[str, str]] = Counter()
    for factor, trace in counts.traces:
        run = _Run(machine, "likely", sent)
        run.play(trace)
        for what, seconds in run.spent.items():
            found[what] += factor * seconds  # type: ignore[assignment]  # a counter of seconds
    return dict(found)


def multiplying_seconds(counts: StepCount, machine: Machine, times: float = 1.0) -> float:
    """Returns the seconds of the products in the passes of a step if nothing but their operations took time, and each
    had ``times`` as many."""
    found = 0.0
    for factor, trace in counts.traces:
        works = [event for event in trace.events if not isinstance(event, Event) and event.phase in PASSES]
        for kernel, number in (each for work in works for each in work.kernels):
            if kernel.kind in _MULTIPLIES:
                operations = times * kernel.operations
                found += factor * number * operations / _rate(machine, kernel.kind, kernel.dtype).at(operations)
    return found


def kernel_seconds(machine: Machine, kernel: Kernel, bound: Bound = "likely") -> float:
    """Returns the time of one kernel, called alone, without its fixed cost, by the roofline."""
    if kernel.kind not in _MULTIPLIES:
        return kernel.moved / _rate(machine, kernel.kind, kernel.dtype).at(kernel.moved, bound)
    computing = kernel.operations / _rate(machine, kernel.kind, kernel.dtype).at(kernel.operations, bound)
    moving = kernel.moved / _rate(machine, "element-wise", kernel.dtype).at(kernel.moved, bound)
    return max(computing, moving)


def _rate(machine: Machine, kind: str, dtype: str) -> Constant:
    group = "product" if kind in _MULTIPLIES else "element-wise"
    by_dtype = machine.kernels.get(kind) or machine.kernels[group]
    return by_dtype.get(dtype) or by_dtype.get("") or next(iter(by_dtype.values()))


# ---- Collectives -----------------------------------------------------------------------------------------------------
def collective_seconds(machine: Machine, message: Message, bound: Bound = "likely") -> float:
    """Returns the time of one collective, from its start, if nothing else is sent."""
    ranks = message.ranks
    measured = machine.collectives.get("permute" if message.op == "send" else message.op)
    inside = not machine.measured_ranks or len({rank // machine.measured_ranks for rank in ranks}) == 1
    if measured and (inside or not machine.levels):
        return _measured(measured, len(ranks), message.sent, bound)
    return _ring(machine.levels, message, bound)


def _measured(measured: Mapping[int, Constant], ranks: int, sent: int, bound: Bound) -> float:
    """From the measurements with as many ranks, or the nearest number of them. The time of more bytes than were sent
    grows with them; that of more ranks with the messages in a ring."""
    nearest = min(measured, key=lambda number: (abs(math.log(number / ranks)), number))
    constant = measured[nearest]
    largest = constant.points[-1][0]
    seconds = constant.at(sent, bound) * (sent / largest if sent > largest else 1.0)
    if nearest == ranks:
        return seconds
    latency = constant.at(0, bound)
    return seconds + max(0.0, latency * ((ranks - 1) / max(1, nearest - 1) - 1))


def _ring(levels: Sequence[Level], message: Message, bound: Bound) -> float:
    """A ring through all ranks of the group, in their order."""
    ranks = message.ranks
    rounds = _ROUNDS.get(message.op, 1)
    transfer = latency = 0.0
    for index, level in enumerate(levels):
        places = {rank // level.ranks for rank in ranks}
        if len(places) == 1:
            break
        members = len(ranks) / len(places)
        groups = level.ranks / members  # that leave a place; one of the ranks of each sends
        transfer = max(transfer, groups * message.sent / level.bandwidth.at(message.sent, bound))
        outer = levels[index + 1].ranks if index + 1 < len(levels) else None
        beyond = len({rank // outer for rank in ranks}) if outer else 1
        if message.op in _ONE_HOP:
            hops = 1
        elif outer is None:
            hops = min(len(places) - 1, math.ceil(math.log2(len(places))))
        else:
            hops = len(places) // beyond - 1
        latency += rounds * hops * level.latency.at(bound=bound)
    return transfer + latency
