# SPDX-License-Identifier: Apache-2.0
"""Measures the steps of one rank: a stack of open ranges, to the innermost of which each moment belongs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.contract import OpenRange, RangeObserver
from neuron_accel.run_report.records import PARTS, Collectives, Memory, Range, Step

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Traffic

STEP = "optimizer step"
"""Name of the range whose end is the end of a step."""
_BEGINNINGS = ("loader", "forward")
"""Parts with which the first step begins."""


@dataclass(slots=True)
class _Open:
    """A range on the stack.

    Args:
        opened: the range.
        part: the part of the step that its time belongs to.
        start: when it began, by ``perf_counter``.
        step: number of the step in which it began.
        exclusive: its seconds so far in which no range inside it was open.
    """

    opened: OpenRange
    part: str
    start: float
    step: int
    exclusive: float = 0.0


@dataclass
class Observed:
    """What plugin hooks have seen since the last step.

    Args:
        losses: of each micro-batch, 0-dim.
        norm: gradient norm, 0-dim.
        samples, tokens: of the batches; None if not known.
        lr: learning rates.
        stepped: whether an optimizer has updated weights.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    norm: torch.Tensor | None = None
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
        losses, norm: still to be read.
        ready: an event to wait for before they are read; None if there is none.
    """

    step: Step
    ranges: list[Range]
    losses: list[torch.Tensor]
    norm: torch.Tensor | None
    ready: torch.Event | None = None


class Recorder(RangeObserver):
    """Divides the time of this rank into steps, and each step into parts.

    At each moment the time belongs to the innermost open range, so that the parts of a step add up to its wall time.
    Ranges of other threads are left out, unless the thread of the loop is in a backward pass, which autograd may run in
    another thread.

    Args:
        backend: of the run.
        traffic: a recording of the run's collectives; is emptied.
        clock: seconds to add to this machine's clock.
        traced: numbers of the steps whose ranges are kept.
        finished: called at the end of each step.
    """

    def __init__(
        self,
        backend: Backend,
        traffic: Traffic,
        *,
        clock: float,
        traced: frozenset[int],
        finished: Callable[[Measured], None],
    ) -> None:
        self._backend, self._traffic, self._traced, self._finished = backend, traffic, traced, finished
        self._unix = time.time() - time.perf_counter() + clock
        self._thread = threading.get_ident()
        self._stack: list[_Open] = []
        self._optimizer: Any = None  # the one whose steps are counted
        self._ranges: list[Range] = []
        self._compiled = backend.compilations
        self._resident = resident_memory()
        self._begun = False
        self.step, self.observed, self.memory = 0, Observed(), Memory()
        self.own = 0.0
        """Seconds that the report itself has taken since the last step."""
        self._begin_step(time.perf_counter())

    def _begin_step(self, now: float) -> None:
        self._began = self._last = now
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._collectives: Counter[tuple[str, str]] = Counter()  # seconds
        self._waiting, self._backward_passes = 0.0, 0

    # ---- ranges ------------------------------------------------------------------------------------------------------
    def begin(self, opened: OpenRange) -> None:
        now = time.perf_counter()
        stack = self._stack
        if threading.get_ident() != self._thread and all(each.part != "backward" for each in stack):
            return
        if not self._begun and opened.part in _BEGINNINGS:
            self._begun = True
            self._began = self._last = now
            self._parts = dict.fromkeys(PARTS, 0.0)
        self._charge(now)
        part = opened.part or (stack[-1].part if stack else "other")
        if part not in self._parts:  # of a range that another plugin or the script has opened
            part = "other"
        stack.append(_Open(opened, part, now, self.step))
        if opened.part == "backward" and opened.category == "part":
            self._backward_passes += 1
        self.own += time.perf_counter() - now

    def end(self, opened: OpenRange) -> None:
        now = time.perf_counter()
        stack = self._stack
        if not stack or (stack[-1].opened is not opened and all(each.opened is not opened for each in stack)):
            return
        self._charge(now)
        while True:
            closed = stack.pop()
            self._close(closed, now)
            if closed.opened is opened:
                break
        if opened.name == STEP and self._optimizer in (None, opened.arguments["optimizer"]):
            self._optimizer = opened.arguments["optimizer"]
            self._end_step(now)
        self.own += time.perf_counter() - now

    def _charge(self, now: float) -> None:
        """Adds the time since the last change of the stack to the innermost range and its part."""
        spent = now - self._last
        self._last = now
        if self._stack:
            innermost = self._stack[-1]
            innermost.exclusive += spent
            self._parts[innermost.part] += spent
        else:
            self._parts["other"] += spent

    def _close(self, closed: _Open, now: float) -> None:
        opened = closed.opened
        if opened.category == "collective":
            key = (opened.arguments["op"], opened.arguments["group"])
            self._collectives[key] += closed.exclusive  # type: ignore[assignment]  # a counter of seconds
            if opened.arguments.get("waits"):
                self._waiting += closed.exclusive
        if closed.step in self._traced and self._begun:
            self._ranges.append(
                Range(
                    step=closed.step,
                    name=opened.name,
                    category=opened.category,
                    start=self._unix + closed.start,
                    seconds=now - closed.start,
                    arguments={key: value for key, value in opened.arguments.items() if key != "optimizer"},
                )
            )

    # ---- steps -------------------------------------------------------------------------------------------------------
    def _end_step(self, now: float) -> None:
        seen, compiled = self.observed, self._backend.compilations
        before = self._compiled
        used = self._backend.device_memory or (None, None)
        step = Step(
            step=self.step,
            time=self._unix + self._began,
            seconds=now - self._began,
            samples=seen.samples,
            tokens=seen.tokens,
            micro_batches=self._backward_passes,
            parts=self._parts,
            waiting=None if self._backend.is_lazy else self._waiting,
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
            own_seconds=self.own,
        )
        ranges, self._ranges, self._compiled = self._ranges, [], compiled
        self.observed, self.own = Observed(), 0.0
        self.step += 1
        self._begin_step(now)
        self._finished(Measured(step, ranges, seen.losses, seen.norm))

    def _take_traffic(self) -> tuple[Collectives, ...]:
        """The collectives since the last step, by kind and group."""
        count: Counter[tuple[str, str]] = Counter()
        sent: Counter[tuple[str, str]] = Counter()
        for transfer in self._traffic.transfers:
            key = (transfer.op, transfer.group)
            count[key] += 1
            sent[key] += transfer.sent
        self._traffic.transfers.clear()
        lazy = self._backend.is_lazy
        return tuple(
            Collectives(
                op=op,
                group=group,
                count=number,
                bytes=sent[op, group],
                seconds=None if lazy else float(self._collectives.get((op, group), 0.0)),
            )
            for (op, group), number in count.items()
        )

    def rest(self) -> list[Range]:
        """Ranges that have ended since the last step."""
        ranges, self._ranges = self._ranges, []
        return ranges


def resident_memory() -> Callable[[], int]:
    """Returns a function that returns the bytes of resident memory of this process. Reading them costs a tenth of
    finding the process."""
    import psutil

    process = psutil.Process()
    return lambda: int(process.memory_info().rss)


class Scalars:
    """0-dim tensors that are read after the device has computed them.

    A lazy device has them as outputs of the step's graph, and CUDA copies them beside its other work: they are read one
    step later, when reading them does not wait. Other devices are read one step later, too.

    Args:
        backend: of the run.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy, which later changes of ``tensor`` leave alone."""
        kept = tensor.detach()
        return kept.to("cpu", non_blocking=True) if self._copies_beside else kept.clone()

    @property
    def _copies_beside(self) -> bool:
        return self._backend.device.type == "cuda"

    @property
    def at_once(self) -> bool:
        """Whether copies can be read in the step in which they were made."""
        return self._backend.reads_are_free

    def event(self) -> torch.Event | None:
        """Returns an event after which the copies so far can be read; None if they are read without one."""
        if not self._copies_beside:
            return None
        event = torch.Event("cuda")
        event.record()
        return event

    @staticmethod
    def mean(kept: Sequence[torch.Tensor]) -> float | None:
        """Mean of copies; None without any."""
        return sum(float(tensor.cpu()) for tensor in kept) / len(kept) if kept else None
