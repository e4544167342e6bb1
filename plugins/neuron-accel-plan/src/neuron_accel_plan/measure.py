# SPDX-License-Identifier: Apache-2.0
"""Measures the constants of the machine it runs on: the script that each rank of ``neuron-accel calibrate`` runs.

``python -m neuron_accel_plan.measure FILE [quick]``. Every rank measures at the same time, so that what ranks
share (cores, memory bandwidth) is shared as in a training. A measurement is the median of rounds on each rank, then the
mean over ranks; the quartiles of rounds give its bounds.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel import NeuronAccelerator
from neuron_accel.contract import Backend, Group
from neuron_accel.contract.events import Traffic
from neuron_accel_plan.calibration import FORMAT, CalibrationFile, Machine, dump_calibration
from neuron_accel_plan.memory import StepCounter
from neuron_accel_plan.time import kernel_seconds
from neuron_accel_plan.trace import (
    BATCHED_PRODUCT,
    ELEMENTWISE,
    INDEXED,
    PRODUCT,
    REDUCTION,
    SPECIAL,
    Kernel,
    Tracer,
    Work,
)

ROUNDS = 5
_IN_TURN = 12  # steps in a round of those whose phases are timed
_LEAST, _QUICK = 0.012, 0.001
"""Seconds that a round takes at least, and in a quick calibration."""

PRODUCTS = ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 256, 512), (512, 512, 1024), (1024, 1024, 1024))
"""Rows, inner dim and columns."""
BATCHED = ((16, 32, 16, 32), (16, 64, 32, 64), (16, 128, 32, 128), (32, 128, 64, 128), (32, 256, 64, 256))
"""Matrices, rows, inner dim and columns."""
ELEMENTS = (1 << 10, 1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23)
REFERENCE = (192, 320)
"""Width and tokens of the blocks that are trained to compare kernels in a step with kernels alone."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast")
BYTES = (1 << 8, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Sizes of the tensors of collectives."""

Points = list[tuple[float, float]]
_T = TypeVar("_T")


class Meter:
    """Times functions on all ranks at once.

    Args:
        backend: of the ranks.
        world: the group of all ranks.
        quick: whether to measure two sizes of everything, for a shorter time.

    Attributes:
        spread: of the measurements so far, the lower and the upper quartile of rounds by their median.
    """

    def __init__(self, backend: Backend, world: Group, quick: bool = False) -> None:
        self.backend, self.world, self.quick = backend, world, quick
        self.spread: list[tuple[float, float]] = []

    def of(self, sizes: Sequence[_T]) -> Sequence[_T]:
        """The sizes that are measured, of all."""
        return sizes[1:4:2] if self.quick else sizes

    def seconds(self, function: Callable[[], Any]) -> float:
        """Returns the seconds that one call takes. Collective."""
        self._finish(function())
        begin = time.perf_counter()
        self._finish(function())
        once = max(self.backend.all_gather_object(time.perf_counter() - begin, self.world))
        calls = max(1, min(1000, round((_QUICK if self.quick else _LEAST) / max(once, 1e-7))))
        rounds = []
        for _ in range(ROUNDS if once < 0.2 and not self.quick else 3):
            self.backend.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                result = function()
                self.backend.step_boundary()
            self._finish(result)
            rounds.append((time.perf_counter() - begin) / calls)
        low, middle, high = statistics.quantiles(rounds, n=4)
        self.spread.append((low / middle, high / middle))
        return statistics.mean(self.backend.all_gather_object(middle, self.world))

    def of_phases(self, phases: Mapping[str, Callable[[], Any]], after: Callable[[], Any]) -> dict[str, float]:
        """Returns the seconds of several functions that are called in turn, each by its name, and ``after`` them.

        Collective.
        """
        rounds: dict[str, list[float]] = {phase: [] for phase in phases}
        for _ in range(3 if self.quick else ROUNDS):
            spent = dict.fromkeys(phases, 0.0)
            self.backend.barrier()
            for _ in range(_IN_TURN):  # without waiting for other ranks, which share the cores throughout
                for phase, function in phases.items():
                    begin = time.perf_counter()
                    self._finish(function())
                    spent[phase] += time.perf_counter() - begin
                after()
            for phase, seconds in spent.items():
                rounds[phase].append(seconds / _IN_TURN)
        medians = {phase: statistics.median(seconds) for phase, seconds in rounds.items()}
        of_ranks = self.backend.all_gather_object(medians, self.world)
        return {phase: statistics.mean(seconds[phase] for seconds in of_ranks) for phase in phases}

    def _finish(self, result: Any) -> None:
        """Waits for the device."""
        result = result[-1] if isinstance(result, tuple) else result
        self.backend.step_boundary()
        if isinstance(result, torch.Tensor) and result.device.type != "cpu":
            self.backend.to_host(result.reshape(-1)[:1])

    def take_spread(self) -> tuple[float, float]:
        """Returns the medians of the quartiles of the measurements since the last call."""
        lows, highs = zip(*self.spread, strict=True)
        self.spread = []
        return statistics.median(lows), statistics.median(highs)


# ---- kernels ---------------------------------------------------------------------------------------------------------
def _products(meter: Meter, dtype: torch.dtype) -> Points:
    device, points = meter.backend.device, []
    tiny = torch.ones(2, 2, dtype=dtype, device=device)
    call = meter.seconds(partial(F.linear, tiny, tiny))
    for rows, inner, columns in meter.of(PRODUCTS):
        one, other = (torch.ones(shape, dtype=dtype, device=device) for shape in ((rows, inner), (columns, inner)))
        seconds = meter.seconds(partial(F.linear, one, other))
        points.append(_rate(2 * rows * inner * columns, seconds, call))
    return points


def _batched(meter: Meter, dtype: torch.dtype) -> Points:
    device, points = meter.backend.device, []
    tiny = torch.ones(1, 2, 2, dtype=dtype, device=device)
    call = meter.seconds(partial(torch.bmm, tiny, tiny))
    for batch, rows, inner, columns in meter.of(BATCHED):
        one = torch.ones(batch, rows, inner, dtype=dtype, device=device)
        other = torch.ones(batch, columns, inner, dtype=dtype, device=device).transpose(1, 2)
        points.append(_rate(2 * batch * rows * inner * columns, meter.seconds(partial(torch.bmm, one, other)), call))
    return points


def _rate(size: float, seconds: float, call: float) -> tuple[float, float]:
    """The point of a rate. What a call costs whatever its size is a constant of its own, and left out."""
    return float(size), size / max(seconds - call, 0.1 * seconds)


def _elementwise(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + y, x * 0.5, x.view(2, 4, -1, 8).transpose(1, 2).contiguous()


def _special(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.silu(x), torch.softmax(x, -1), x / y


def _reductions(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.mean(-1), x.sum(0), torch.linalg.vector_norm(x)


def _indexed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = torch.arange(x.shape[0], device=x.device).flip(0)
    return F.embedding(rows, x), torch.ops.aten.embedding_dense_backward(x, rows, x.shape[0], -1, False)


_MEMORY: Mapping[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    ELEMENTWISE: _elementwise,
    SPECIAL: _special,
    REDUCTION: _reductions,
    INDEXED: _indexed,
}


def _memory_bound(meter: Meter, kind: str, dtype: torch.dtype) -> Points:
    """Bytes per second by the bytes of one kernel, of several kernels of a kind in turn."""
    function, points, call = _MEMORY[kind], [], None
    for elements in (128, *meter.of(ELEMENTS)):
        x = torch.ones(elements // 128, 128, dtype=dtype, device=meter.backend.device)
        y = torch.ones_like(x)
        seconds = meter.seconds(partial(function, x, y))
        if call is None:
            call = seconds
            continue
        work = _traced(meter.backend.device, [x, y], partial(function, x, y))
        kernels = [(kernel, number) for kernel, number in work if kernel.kind == kind]
        moved = sum(number * kernel.moved for kernel, number in kernels)
        number = sum(number for _, number in kernels)
        points.append((moved / number, _rate(moved, seconds, call)[1]))
    return points


def _traced(
    device: torch.device, tensors: Sequence[torch.Tensor], function: Callable[[], Any]
) -> list[tuple[Kernel, int]]:
    """The kernels of a function, with their numbers."""
    with StepCounter(device) as counter:
        counter.label(tensors, "")
        counter.tracer = Tracer(Traffic(), counter.find)
        function()
        trace = counter.tracer.trace()
    return [kernel for work in trace.events if isinstance(work, Work) for kernel in work.kernels]


# ---- fixed costs -----------------------------------------------------------------------------------------------------
class _Block(nn.Module):
    """A block of tiny layers, whose time is that of Python, autograd and dispatch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.gate, self.up, self.down = (nn.Linear(size, size, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        heads = normed.view(*x.shape[:-1], 2, -1).transpose(1, 2)
        mixed = torch.matmul(torch.softmax(torch.matmul(heads, heads.transpose(2, 3)), -1), heads)
        y = x + mixed.transpose(1, 2).reshape(x.shape)
        return y + self.down(F.silu(self.gate(y)) * self.up(y))


def _fixed(meter: Meter) -> dict[str, float]:
    """Seconds of a kernel without work in each phase."""
    device = meter.backend.device
    model = nn.Sequential(*(_Block(16) for _ in range(4))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(1, 4, 16, device=device)
    losses: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        losses[:] = [model(x).sum()]
        return losses[0]

    def both() -> torch.Tensor:
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        return loss

    def update() -> torch.Tensor:
        optimizer.step()
        return x

    both()
    update()
    tensors = [*model.parameters(), x]
    numbers = {
        name: sum(number for _, number in _traced(device, tensors, function))
        for name, function in (("forward", forward), ("both", both), ("update", update))
    }
    seconds = {name: meter.seconds(function) for name, function in (("forward", forward), ("both", both))}
    seconds["update"] = meter.seconds(update)
    backward = max(0.0, seconds["both"] - seconds["forward"]) / (numbers["both"] - numbers["forward"])
    step = seconds["update"] / numbers["update"]
    return {"forward": seconds["forward"] / numbers["forward"], "backward": backward, "optimizer step": step, "": step}


def _in_training(meter: Meter, machine: Machine) -> dict[str, float]:
    """Time of kernels in steps of a model of a few blocks, without their fixed cost, by that of the same kernels alone,
    by phase. A step runs on memory that was given back in the meantime and on operands that have left the caches."""
    device = meter.backend.device
    size, sequence = (32, 16) if meter.quick else REFERENCE
    model = nn.Sequential(*(_Block(size) for _ in range(4))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(2, sequence, size, device=device)
    tensors = [*model.parameters(), x]
    losses: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        losses[:] = [model(x).square().mean()]
        return losses[0]

    def backward() -> torch.Tensor:
        loss = losses.pop()
        loss.backward()
        return loss

    def update() -> torch.Tensor:
        optimizer.step()
        return x

    phases = {"forward": forward, "backward": backward, "optimizer step": update}
    for function in phases.values():  # creates the state of the optimizer
        function()
    kernels = {phase: _traced(device, tensors, function) for phase, function in phases.items()}
    seconds = meter.of_phases(phases, optimizer.zero_grad)
    found = {}
    for phase in phases:
        alone = sum(number * kernel_seconds(machine, kernel) for kernel, number in kernels[phase])
        fixed = sum(number for _, number in kernels[phase]) * machine.fixed[phase].at()
        found[phase] = max(0.1, (seconds[phase] - fixed) / alone)
    return found


# ---- collectives -----------------------------------------------------------------------------------------------------
def _collective(meter: Meter, op: str, group: Group) -> Points:
    """Seconds by the bytes that a rank sends."""
    backend, points = meter.backend, []
    for size in meter.of(BYTES):
        shape = (-(-size // (4 * group.size)) * group.size,)
        tensor = torch.ones(shape, device=backend.device)
        call = getattr(backend, op)
        with backend.record() as traffic:
            call(tensor, group)
        seconds = meter.seconds(partial(call, tensor, group))
        sent = max(meter.backend.all_gather_object(traffic.sent(), meter.world))
        points.append((float(sent), seconds))
    return points


def _overlap(meter: Meter) -> float:
    """Share of a collective's time in which the core computes."""
    backend = meter.backend
    x = torch.ones(256, 256, device=backend.device)
    buffer = torch.ones(1 << 20, device=backend.device)
    alone = meter.seconds(lambda: backend.all_reduce(buffer, meter.world))
    number = max(1, round(alone / meter.seconds(lambda: x @ x)))

    def compute() -> torch.Tensor:
        for _ in range(number):
            result = x @ x
        return result

    def together() -> torch.Tensor:
        pending = backend.start_all_reduce(buffer, meter.world)
        compute()
        return pending.wait()

    computing, both = meter.seconds(compute), meter.seconds(together)
    return min(1.0, max(0.0, (alone + computing - both) / min(alone, computing)))


# ---- all of it -------------------------------------------------------------------------------------------------------
def measure(
    backend: Backend, world: Group, note: Callable[[str], None] = lambda _: None, *, quick: bool = False
) -> CalibrationFile:
    """Returns the constants of the machine that the ranks run on. Collective.

    Args:
        backend: of the ranks.
        world: the group of all ranks.
        note: receives a line for each stage.
        quick: whether to measure two sizes of everything only.
    """
    meter, dtypes = Meter(backend, world, quick), (torch.float32, torch.bfloat16)
    kernels: dict[str, dict[str, Points]] = {}
    spread: dict[str, tuple[float, float]] = {}
    for kind, stage in ((PRODUCT, _products), (BATCHED_PRODUCT, _batched)):
        note(f"{kind}s of matrices" if kind == PRODUCT else "products of batches of matrices")
        kernels[kind] = {str(dtype).removeprefix("torch."): stage(meter, dtype) for dtype in dtypes}
    for kind in _MEMORY:
        note(f"kernels bound by memory: {kind}")
        kernels[kind] = {str(dtype).removeprefix("torch."): _memory_bound(meter, kind, dtype) for dtype in dtypes}
    spread["kernels"] = meter.take_spread()
    note("fixed cost of a kernel")
    fixed = {"": 0.0} if backend.is_lazy else _fixed(meter)
    spread["fixed"] = (1.0, 1.0) if backend.is_lazy else meter.take_spread()
    found = CalibrationFile(
        neuron_accel_calibration=FORMAT,
        machine=f"{platform.machine()}, {backend.name} backend on {backend.device.type}, torch {torch.__version__}",
        ranks=world.size,
        date=time.strftime("%Y-%m-%d"),
        fuses=backend.is_lazy,
        kernels=kernels,
        fixed=fixed,
    )
    if not backend.is_lazy:
        note("kernels in a training step")
        found = replace(found, in_training=_in_training(meter, found.to_machine()))
    collectives: dict[str, dict[int, Points]] = {op: {} for op in COLLECTIVES} if world.size > 1 else {}
    degrees = [degree for degree in range(2, world.size + 1) if world.size % degree == 0 and degree & (degree - 1) == 0]
    for degree in dict.fromkeys([*degrees, world.size] if world.size > 1 else []):
        partition = [range(first, first + degree) for first in range(0, world.size, degree)]
        group = backend.new_group(partition, f"calibrate {degree}")
        for op in COLLECTIVES:
            note(f"{op} between {degree} ranks")
            collectives[op][degree] = _collective(meter, op, group)
    spread["collectives"] = meter.take_spread() if collectives else (1.0, 1.0)
    note("overlap of collectives and kernels")
    overlap = _overlap(meter) if world.size > 1 else 0.0
    return replace(found, collectives=collectives, overlap=overlap, spread=spread)


def main(file: str, *options: str) -> None:
    run = NeuronAccelerator().run
    first = run.backend.rank == 0

    def note(stage: str) -> None:
        if first:
            print(f"measuring {stage}", file=sys.stderr, flush=True)

    found = measure(run.backend, run.world, note, quick="quick" in options)
    if first:
        Path(file).write_text(dump_calibration(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
