# SPDX-License-Identifier: Apache-2.0
"""Measures the steps of one rank: a stack of open ranges, to the innermost of which each moment belongs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.contract.events import Event, Events, Observer
from neuron_accel_report.records import PARTS, Collectives, Memory, Range, Step

if TYPE_CHECKING:
    from neuron_accel.contract import Backend
    from neuron_accel.contract.events import Collective

_BEGINNINGS = ("loader", "forward")
"""Parts with which the first step begins."""


_Open = list[Any]
"""A range on the stack: the range, the part of the step that its time belongs to, when it began by ``perf_counter_ns``,
in which step, and its nanoseconds so far in which no range inside it was open, since it began or since the step began.
A list costs a quarter of what an object does."""
_RANGE, _PART, _START, _STEP, _EXCLUSIVE = range(5)
_CALIBRATION = (9, 40)
"""Rounds, and ranges in each, by which the time of a range is measured."""


@dataclass
class Observed:
    """What plugin hooks have seen since the last step.

    Args:
        losses: of each micro-batch, 0-dim; a number where reading is free.
        norm: gradient norm, likewise.
        samples, tokens: of the batches; None if not known.
        lr: learning rates.
        stepped: whether an optimizer has updated weights.
    """

    losses: list[torch.Tensor | float] = field(default_factory=list)
    norm: torch.Tensor | float | None = None
    samples: int | None = None
    tokens: int | None = None
    lr: tuple[float, ...] = ()
    stepped: bool = False


@dataclass
class Measured:
    """A step, whose loss and gradient norm may still be on the device.

    Args:
        step: everything else.
        ranges: ranges of traced steps that ended in it.
        losses, norm: still to be read; numbers where reading is free.
        ready: an event to wait for before they are read; None if there is none.
    """

    step: Step
    ranges: list[Range]
    losses: list[torch.Tensor | float]
    norm: torch.Tensor | float | None
    ready: torch.Event | None = None


class Recorder(Observer):
    """Divides the time of this rank into steps, and each step into parts.

    At each moment the time belongs to the innermost open range, so that the parts of a step add up to its wall time.
    Ranges of other threads are left out, unless the thread of the loop is in a backward pass, which autograd may run in
    another thread.

    A step has up to hundreds of ranges, so :meth:`begin` and :meth:`end` do little: they read the clock once, and do
    not measure themselves. What ranges cost is estimated from their number and the time of one, which is measured at
    the start.

    Args:
        backend: of the run.
        origin: when the run began, by ``perf_counter_ns`` of this process; times are nanoseconds since then.
        traced: numbers of the steps whose ranges are kept.
        finished: called at the end of each step.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        origin: int,
        traced: frozenset[int],
        finished: Callable[[Measured], None],
    ) -> None:
        self._backend, self._traced, self._finished = backend, frozenset[int](), finished
        self._sent: dict[tuple[str, str], list[int]] = {}  # numbers and bytes of the collectives of a step
        self._now, self._origin = time.perf_counter_ns, origin
        self._calls = 0  # collectives that have a number
        self._thread = get_ident()
        self._stack: list[_Open] = [[None, "other", 0, -1, 0]]  # the lowest one stands for no range
        self._count = 0  # ranges that have ended in this step
        self._ranges: list[Range] = []
        self._compiled = backend.compilations
        self._resident = ResidentMemory()
        self._begun = False
        self.step, self.observed, self.memory = 0, Observed(), Memory()
        self.optimizer: int | None = None
        """The ``id`` of the optimizer whose steps are counted; None before the first."""
        self.own = 0.0
        """Seconds that the report itself has taken since the last step, without ranges."""
        self._begin_step(self._now())
        self._seconds_of_range = self._time_ranges()
        self._count = 0
        self._traced = traced
        self._begin_step(self._now())

    def _time_ranges(self) -> float:
        """Returns the seconds that the recorder takes for a range."""
        events = Events()
        events.observe(self)
        rounds, count = _CALIBRATION
        times = []
        for _ in range(rounds):
            began = self._now()
            for _ in range(count):
                with events.open("", part="communication", op="", group=""):
                    pass
            times.append(self._now() - began)
        return min(times) / count / 1e9

    def _begin_step(self, now: int) -> None:
        self._began = self._last = now
        self._parts = dict.fromkeys(PARTS, 0)  # nanoseconds, as those of collectives
        self._collectives: dict[tuple[str, str], int] = {}
        self._waiting = self._backward_passes = 0

    def close(self) -> None:
        """Ends recording."""
        self._resident.close()

    # ---- ranges ------------------------------------------------------------------------------------------------------
    def begin(self, event: Event) -> None:
        if event.category == "collective" or event.category == "deferred":
            self._count_sent(event)  # type: ignore[arg-type]  # it is one
            if event.category == "deferred":  # takes no time but that of making a graph
                return
        now, stack = self._now(), self._stack
        if get_ident() != self._thread and all(each[_PART] != "backward" for each in stack):
            return
        part, around = event.part, stack[-1]
        if not self._begun and part in _BEGINNINGS:
            self._begun = True
            self._began = self._last = now
            self._parts = dict.fromkeys(PARTS, 0)
            for each in stack:
                each[_EXCLUSIVE] = 0
        around[4] += now - self._last
        self._last = now
        if not part:
            part = around[1]
        elif part not in self._parts:  # of a range that another plugin or the script has opened
            part = "other"
        elif part == "backward" and event.category == "part":
            self._backward_passes += 1
        stack.append([event, part, now, self.step, 0])

    def _count_sent(self, event: Collective) -> None:
        if event.dtype is None:  # objects
            return
        key = event.name, event.group.name
        if key in self._sent:
            total = self._sent[key]
            total[0] += 1
            total[1] += event.sent
        else:
            self._sent[key] = [1, event.sent]

    def end(self, event: Event) -> None:
        now, stack = self._now(), self._stack
        innermost = stack[-1]
        if innermost[0] is not event and all(each[_RANGE] is not event for each in stack):
            return
        innermost[4] += now - self._last
        self._last = now
        while True:
            ended = stack.pop()
            closed, part, _, step, spent = ended
            self._parts[part] += spent
            if closed.category == "collective" or closed.category == "wait":
                found = closed.arguments
                key = found["op"], found["group"]
                self._collectives[key] = self._collectives.get(key, 0) + spent
                if found.get("waits"):
                    self._waiting += spent
            if self._traced and self._begun and step in self._traced:
                self._keep(ended, now)
            self._count += 1
            if closed is event:
                break
        if event.category == "step" and self.optimizer in (None, event.arguments["optimizer"]):
            self.optimizer = event.arguments["optimizer"]
            self._end_step(now)
            self.own += (self._now() - now) / 1e9

    def _keep(self, ended: _Open, now: int) -> None:
        """Keeps a range of a traced step; of a collective with its ranks, by which a trace finds it on the others, and
        its number, by which it finds the wait for it."""
        closed, start, step = ended[_RANGE], ended[_START], ended[_STEP]
        arguments = {key: value for key, value in closed.arguments.items() if key != "optimizer"}
        if (group := getattr(closed, "group", None)) is not None:
            arguments["ranks"] = list(group.ranks)
        if closed.category in ("collective", "wait"):
            collective: Any = getattr(closed, "collective", closed)  # a wait has that which it is for
            arguments["call"] = self._number_of(collective)
        self._ranges.append(
            Range(
                step=step,
                name=closed.name,
                category=closed.category,
                begin=start - self._origin,
                end=now - self._origin,
                arguments=arguments,
            )
        )

    def _number_of(self, collective: Event) -> int:
        """The number of a collective. The collective keeps it, as nothing here knows when it is complete."""
        if "call" not in collective.arguments:
            self._calls += 1
            collective.arguments["call"] = self._calls
        return int(collective.arguments["call"])

    def _divide_open(self) -> None:
        """Adds the time of ranges that are still open to the parts of the step that ends, and that of no range."""
        for each in self._stack:
            self._parts[each[_PART]] += each[_EXCLUSIVE]
            each[_EXCLUSIVE] = 0

    # ---- steps -------------------------------------------------------------------------------------------------------
    def _end_step(self, now: int) -> None:
        self._divide_open()
        seen, compiled = self.observed, self._backend.compilations
        before = self._compiled
        used = self._backend.device_memory or (None, None)
        step = Step(
            step=self.step,
            begin=self._began - self._origin,
            end=now - self._origin,
            samples=seen.samples,
            tokens=seen.tokens,
            micro_batches=self._backward_passes,
            parts={part: spent / 1e9 for part, spent in self._parts.items()},
            waiting=None if self._backend.is_lazy else self._waiting / 1e9,
            collectives=self._take_traffic(),
            memory=Memory(
                device_peak=used[1],
                device=used[0],
                host=self._resident(),
                parameters=self.memory.parameters,
                gradients=self.memory.gradients,
                optimizer=self.memory.optimizer,
            ),
            compilations=None if compiled is None or before is None else compiled - before,
            lr=seen.lr,
            skipped=not seen.stepped,
            own_seconds=self.own + self._count * self._seconds_of_range,
        )
        ranges, self._ranges, self._compiled = self._ranges, [], compiled
        self.observed, self.own, self._count = Observed(), 0.0, 0
        self.step += 1
        self._begin_step(now)
        self._finished(Measured(step, ranges, seen.losses, seen.norm))

    def _take_traffic(self) -> tuple[Collectives, ...]:
        """The collectives since the last step, by kind and group."""
        lazy, spent = self._backend.is_lazy, self._collectives
        sent, self._sent = self._sent, {}
        return tuple(
            Collectives(
                op=op,
                group=group,
                count=count,
                bytes=size,
                seconds=None if lazy else spent.get((op, group), 0) / 1e9,
            )
            for (op, group), (count, size) in sent.items()
        )

    def rest(self) -> list[Range]:
        """Ranges that have ended since the last step."""
        ranges, self._ranges = self._ranges, []
        return ranges


class ResidentMemory:
    """Returns the bytes of resident memory of this process when it is called. On Linux it keeps the file open in which
    the kernel writes them, since finding and opening it takes ten times as long as reading it."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._file = os.open("/proc/self/statm", os.O_RDONLY)
        self._page = os.sysconf("SC_PAGE_SIZE")

    def __call__(self) -> int:
        if self._file is not None:
            return int(os.pread(self._file, 256, 0).split(maxsplit=2)[1]) * self._page
        import psutil

        return int(psutil.Process().memory_info().rss)

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


class Scalars:
    """0-dim tensors that are read after the device has computed them.

    A lazy device has them as outputs of the step's graph, and CUDA copies them beside its other work: they are read one
    step later, when reading them does not wait. Other devices are read one step later, too.

    Args:
        backend: of the run.
    """

    def __init__(self, backend: Backend) -> None:
        self.at_once = backend.reads_are_free
        """Whether values are read in the step in which they are kept."""
        self._copies_beside = backend.device.type == "cuda"

    def keep(self, tensor: torch.Tensor) -> torch.Tensor | float:
        """Returns the value where reading it is free, else a copy, which later changes of ``tensor`` leave alone."""
        if self.at_once:
            return float(tensor.item())
        kept = tensor.detach()
        return kept.to("cpu", non_blocking=True) if self._copies_beside else kept.clone()

    def event(self) -> torch.Event | None:
        """Returns an event after which the copies so far can be read; None if they are read without one."""
        if not self._copies_beside:
            return None
        event = torch.Event("cuda")
        event.record()
        return event

    @staticmethod
    def mean(kept: Sequence[torch.Tensor | float]) -> float | None:
        """Mean of copies and values; None without any."""
        return sum(map(float, kept)) / len(kept) if kept else None
