# SPDX-License-Identifier: Apache-2.0
"""The constants from which the time of a step is predicted: those of an instance, from public sources, or those
measured on a machine. Each has a source and bounds. Without torch.

A constant is "public (source)", "calibrated (on what)" or "assumed (why)". Assumed ones have wide bounds, and the
interval of a prediction is as wide as they are.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from neuron_accel.commands import load_dataclass
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel import Instance

FORMAT = 1
"""Version of the file that ``neuron-accel calibrate`` writes."""

Bound = Literal["likely", "best", "worst"]
"""Which constants: the likely ones, or those that make a step fastest or slowest."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number, or one that depends on a size, with bounds.

    Args:
        points: ``(size, value)``, sizes ascending: between two points the logarithm of the value is linear in that of
            the size, outside of them it is that of the nearest point.
        best, worst: factors of the value for which a step is fastest and slowest.
        source: where it is from: "public (...)", "calibrated (...)" or "assumed (...)".
    """

    points: tuple[tuple[float, float], ...]
    best: float = 1.0
    worst: float = 1.0
    source: str

    @classmethod
    def of(cls, value: float, source: str, *, best: float = 1.0, worst: float = 1.0) -> Constant:
        """Returns a constant that does not depend on a size."""
        return cls(points=((1.0, value),), best=best, worst=worst, source=source)

    def at(self, size: float = 1.0, bound: Bound = "likely") -> float:
        """Returns the value for a size."""
        factor = {"likely": 1.0, "best": self.best, "worst": self.worst}[bound]
        return factor * interpolate(self.points, size)


def interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """Returns the value at ``size``, linear between points on logarithmic scales, constant outside of them."""
    index = bisect.bisect_left([at for at, _ in points], size)
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (left, low), (right, high) = points[index - 1], points[index]
    if low <= 0 or high <= 0:
        return low
    share = math.log(size / left) / math.log(right / left)
    return low * (high / low) ** share


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level of the network between ranks: ranks next to each other share a place, such as a chip or a machine.

    Args:
        name: what connects the places of this level.
        ranks: number of ranks in a place.
        bandwidth: bytes per second out of a place, in one direction.
        latency: seconds of one message between two places.
    """

    name: str
    ranks: int
    bandwidth: Constant
    latency: Constant


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Constants of one rank's core, and of what connects it to others.

    Args:
        name: the instance type, or what was measured.
        kernels: operations per second of kernels that multiply, and bytes per second of others, by kind of kernel
            (:data:`~neuron_accel_plan.trace.KINDS`) and dtype, as a function of the operations or bytes of one
            kernel. The dtype ``""`` stands for all that are not named, and a kind that is missing is like the first
            of its group, ``"product"`` or ``"element-wise"``.
        fixed: seconds that a kernel takes whatever its size, by phase of the step; ``""`` stands for other phases.
        in_training: by how much the work of a kernel takes longer in a training step than called alone again and
            again, with operands in the caches and memory that is in use already, by phase of the step; 1 for phases
            that are not named.
        fuses: whether memory-bound kernels between two products are compiled into one.
        overlap: share of a collective's time in which the core can compute.
        levels: the network, from the innermost level to the outermost, for collectives that were not measured.
        collectives: seconds of a collective as a function of the bytes that a rank sends, by name and number of ranks.
        measured_ranks: number of ranks of the machine on which collectives were measured; 0 if none were.
    """

    name: str
    kernels: Mapping[str, Mapping[str, Constant]]
    fixed: Mapping[str, Constant]
    fuses: bool
    overlap: Constant
    in_training: Mapping[str, Constant] = field(default_factory=dict)
    levels: tuple[Level, ...] = ()
    collectives: Mapping[str, Mapping[int, Constant]] = field(default_factory=dict)
    measured_ranks: int = 0

    def sources(self) -> dict[str, str]:
        """Where each constant is from."""
        found = {f"{kind} kernels": next(iter(by.values())).source for kind, by in self.kernels.items()}
        for phase, constant in self.fixed.items():
            found[f"fixed cost of a kernel{f', {phase}' * bool(phase)}"] = constant.source
        for phase, constant in self.in_training.items():
            found[f"kernels in training, {phase}"] = constant.source
        for op, by_ranks in self.collectives.items():
            found[op] = next(iter(by_ranks.values())).source
        for level in self.levels:
            found[f"bandwidth of {level.name}"] = level.bandwidth.source
            found[f"latency of {level.name}"] = level.latency.source
        return {**found, "overlap": self.overlap.source}


# ---- Public constants of instances -----------------------------------------------------------------------------------
RESERVE = 0.1
"""Fraction of a core's memory that is left to the runtime, to code and constants of compiled graphs, and to buffers and
descriptors of collectives. Assumed, on all instances alike. Of these the Neuron SDK's page "Neuron device memory" gives
the micro-code, 96 MB for each physical core, which is less than 1% of its memory; the rest depends on the graph. It was
15% in a report of a failed allocation (issue 92 of aws-neuron/transformers-neuronx: Llama 3 70B for inference, on cores
of 16 GB)."""


def reserve_of(core_bytes: int) -> int:
    """Returns the bytes of a core that a step is assumed not to have."""
    return round(RESERVE * core_bytes)


def machine_of(instance: Instance, lnc: int | None = None) -> Machine:
    """Returns the constants of an instance, of one logical core. Rates are those that AWS publishes; the shares of them
    that a training achieves, latencies and overlap are not published in a usable form and are assumed, with wide
    bounds, for all instances alike. They were fixed before any comparison with a measured training.

    Args:
        instance: the instance.
        lnc: physical cores in a logical one; None: the default of the runtime.
    """
    cores = instance.cores(lnc)
    on_chip = max(1, cores // instance.chips)
    peak = instance.peak_tflops(lnc) * 1e12
    # Share 0.6 of the peak: a product of tiles that fill the tensor engine is at most at its peak; 0.35 if tiles, or
    # the transposition of operands, leave it idle most of the time.
    product = Constant.of(
        0.6 * peak,
        "public (tensor engine, pages neuron-core-v2 to -v4 of the Neuron SDK); kernels are assumed to reach 0.6 of it "
        "(0.35 to 0.9)",
        best=0.9 / 0.6,
        worst=0.35 / 0.6,
    )
    single = replace(
        product,
        points=((1.0, 0.6 * peak / 4),),
        source="public (a fourth of BF16, pages neuron-core-v2 to -v4); kernels are assumed to reach 0.6 of it "
        "(0.35 to 0.9)",
    )
    memory = Constant.of(
        0.7 * instance.hbm_gb_per_s * 1e9 / on_chip,
        "public (bandwidth of the chip's HBM, page neuron-hardware); kernels are assumed to reach 0.7 of it "
        "(0.4 to 0.9)",
        best=0.9 / 0.7,
        worst=0.4 / 0.7,
    )
    levels = [
        Level(
            name="the chip's memory",
            ranks=1,
            bandwidth=replace(memory, points=((1.0, memory.at() / 2),)),  # written and read
            latency=Constant.of(2e-6, "assumed (not published; 1 to 5 us)", best=0.5, worst=2.5),
        )
    ]
    if instance.link_gb_per_s:
        levels.append(
            Level(
                name="NeuronLink",
                ranks=on_chip,
                bandwidth=Constant.of(
                    0.7 * instance.link_gb_per_s * 1e9 / 2,
                    "public (NeuronLink of a chip, page neuron-hardware; half in each direction); "
                    "rings are assumed to reach 0.7 of it (0.35 to 0.9)",
                    best=0.9 / 0.7,
                    worst=0.5,
                ),
                latency=Constant.of(4e-6, "assumed (not published; 2 to 10 us)", best=0.5, worst=2.5),
            )
        )
    if instance.multi_node and instance.efa_gbps:
        levels.append(
            Level(
                name="EFA",
                ranks=cores,
                bandwidth=Constant.of(
                    0.7 * instance.efa_gbps * 1e9 / 8,
                    "public (network bandwidth of the instance, its product page); collectives are assumed to reach "
                    "0.7 of it (0.35 to 0.9)",
                    best=0.9 / 0.7,
                    worst=0.5,
                ),
                latency=Constant.of(25e-6, "assumed (not published; 15 to 60 us)", best=0.6, worst=2.4),
            )
        )
    return Machine(
        name=instance.name,
        kernels={
            "product": {"": product, "float32": single},
            "element-wise": {"": memory},
        },
        fixed={"": Constant.of(0.0, "public (a step is one compiled graph, without a launch for each kernel)")},
        fuses=True,
        overlap=Constant.of(
            0.8,
            "public (collectives have engines of their own, page neuron-core-v2); the compiler's order is assumed "
            "to leave 0.8 of their time to them (0.3 to 1)",
            best=1.0 / 0.8,
            worst=0.3 / 0.8,
        ),
        levels=tuple(levels),
    )


# ---- The file of measured constants ----------------------------------------------------------------------------------
Points = list[tuple[float, float]]
FORM_ERROR = 0.15
"""By how much a prediction with measured constants may be off for reasons that are not in them: the aim of
``benchmarks/plan.py``."""
FAMILIES = ("kernels", "fixed", "collectives")


@dataclass(frozen=True, kw_only=True)
class CalibrationFile:
    """What ``neuron-accel calibrate`` writes, field by field.

    Args:
        neuron_accel_calibration: version of the format.
        machine: what was measured.
        ranks: number of ranks that measured at the same time.
        date: the day, as text.
        fuses: whether the device compiles memory-bound kernels into one.
        kernels: by kind and dtype, rate by size: operations per second by operations, or bytes per second by bytes.
        fixed: seconds of a kernel without work, by phase of a step; ``""`` for other phases.
        in_training: time of a kernel's work in a training step by that of the same kernel alone, by phase of a step.
        collectives: by name and number of ranks, seconds by the bytes that a rank sends.
        overlap: share of a collective's time in which a core computes, from 0 to 1.
        spread: by family of constants, lower and upper quartile of rounds by the median.

    Raises:
        ConfigurationError: for another version, or numbers that no machine has.
    """

    neuron_accel_calibration: int
    machine: str
    ranks: int
    date: str = ""
    fuses: bool = False
    kernels: dict[str, dict[str, Points]]
    fixed: dict[str, float]
    collectives: dict[str, dict[int, Points]] = field(default_factory=dict)
    in_training: dict[str, float] = field(default_factory=dict)
    overlap: float = 0.0
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from neuron_accel_plan.trace import KINDS

        if self.neuron_accel_calibration != FORMAT:
            _refuse(
                f"The calibration has version {self.neuron_accel_calibration}.",
                where="neuron_accel_calibration",
                why=f"this release reads version {FORMAT}",
            )
        unknown = [kind for kind in self.kernels if kind not in KINDS]
        if unknown:
            _refuse(f"{unknown[0]!r} is not a kind of kernel.", where="kernels", why=f"kinds are {', '.join(KINDS)}")
        for kind in ("product", "element-wise"):
            if not self.kernels.get(kind):
                _refuse(f"There is no rate of {kind} kernels.", where="kernels", why="others are derived from it")
        if "" not in self.fixed:
            _refuse("There is no fixed cost for phases that are not named.", where="fixed", why="the key '' is missing")
        if self.ranks < 1:
            _refuse(f"ranks is {self.ranks}.", where="ranks")
        if not 0 <= self.overlap <= 1:
            _refuse(f"overlap is {self.overlap}.", where="overlap", why="it is a share from 0 to 1")
        for phase, seconds in self.fixed.items():
            if not 0 <= seconds < 1:
                _refuse(f"A fixed cost of {seconds} seconds is not possible.", where=f"fixed.{phase}")
        for phase, factor in self.in_training.items():
            if not 0 < factor < math.inf:
                _refuse(f"A factor of {factor} is not possible.", where=f"in_training.{phase}")
        for family, factors in self.spread.items():
            if family not in FAMILIES or not 0 < factors[0] <= 1 <= factors[1] < math.inf:
                _refuse(f"A spread of {list(factors)} is not possible.", where=f"spread.{family}")
        tables: dict[str, Points] = {
            **{f"kernels.{kind}.{dtype}": p for kind, by in self.kernels.items() for dtype, p in by.items()},
            **{f"collectives.{op}.{n}": p for op, by in self.collectives.items() for n, p in by.items()},
        }
        for where, points in tables.items():
            sizes = [size for size, _ in points]
            if not points or sizes != sorted(set(sizes)) or not all(0 < n < math.inf for p in points for n in p):
                _refuse(
                    "The points of a constant are not in order.",
                    where=where,
                    why="it is a list of [size, value] with growing sizes, all finite numbers above 0",
                )

    def to_machine(self) -> Machine:
        """Returns the constants."""
        source = f"calibrated (on {self.machine}, {self.ranks} ranks{f', {self.date}' * bool(self.date)})"
        spread = {family: self.spread.get(family, (1.0, 1.0)) for family in FAMILIES}
        least, most = 1 / (1 + FORM_ERROR), 1 + FORM_ERROR

        def rate(points: Points) -> Constant:
            low, high = spread["kernels"]  # of seconds
            return Constant(points=tuple(points), best=1 / (low * least), worst=1 / (high * most), source=source)

        def seconds(points: Points, family: str) -> Constant:
            low, high = spread[family]
            return Constant(points=tuple(points), best=low * least, worst=high * most, source=source)

        return Machine(
            name=self.machine,
            kernels={kind: {dtype: rate(p) for dtype, p in by.items()} for kind, by in self.kernels.items()},
            fixed={phase: seconds([(1.0, value)], "fixed") for phase, value in self.fixed.items()},
            fuses=self.fuses,
            overlap=Constant.of(self.overlap, source),
            in_training={phase: Constant.of(factor, source) for phase, factor in self.in_training.items()},
            collectives={
                op: {n: seconds(p, "collectives") for n, p in by.items()} for op, by in self.collectives.items()
            },
            measured_ranks=self.ranks,
        )


def _refuse(what: str, *, where: str, why: str | None = None) -> NoReturn:
    raise ConfigurationError(what, where=where, why=why, fix="measure again, with neuron-accel calibrate")


def dump_calibration(found: CalibrationFile) -> str:
    """Returns the text of the file."""
    import yaml

    plain = _rounded(asdict(found))
    return yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, width=110)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def load_calibration(source: str | os.PathLike[str] | Mapping[str, Any]) -> Machine:
    """Reads what ``neuron-accel calibrate`` wrote. The file is read as data: it cannot name code.

    Args:
        source: the file, or a mapping of the same form.

    Raises:
        ConfigurationError: if it cannot be read, or a field is unknown, missing, or has a value that no machine has.
    """
    return load_dataclass(CalibrationFile, source, "the calibration").to_machine()
