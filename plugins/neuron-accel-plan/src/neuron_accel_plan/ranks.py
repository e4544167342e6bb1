# SPDX-License-Identifier: Apache-2.0
"""The ranks of a run that exists, for a search: of an instance, all of its cores or some, or of CPUs."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import ConfigurationError
from neuron_accel_plan.calibration import Constant, Level, Machine

if TYPE_CHECKING:
    from neuron_accel import Instance


@dataclass(frozen=True, kw_only=True)
class CpuRanks:
    """Ranks without an instance: what a search asks an :class:`~neuron_accel.Instance` for. Time is predicted with a
    calibration.

    Args:
        ranks: number of ranks.
        memory: bytes of one of them.
    """

    ranks: int
    memory: int
    name: None = None
    multi_node: bool = False

    def core_bytes(self, lnc: int | None = None) -> int:
        return self.memory

    def runtime(self, torch: str) -> None:
        """There is no Neuron runtime."""

    def native(self, torch: str) -> bool:
        """The device is no Neuron device."""
        return False

    def hardware(self, lnc: int | None = None, runtime: None = None) -> Any:
        """The limits that a plan is checked against: ranks can form groups of every size."""
        from neuron_accel import find_instance

        sizes = tuple(size for size in range(2, self.ranks + 1) if self.ranks % size == 0)
        return dataclasses.replace(
            find_instance("trn1.2xlarge").hardware(),
            name="CPU ranks",
            ranks_per_host=(self.ranks,),
            model_groups=sizes,
            several_hosts=False,
            partitions=None,
            torus=(),
            ranks_per_chip=1,
            core_bytes=self.memory,
            peak_flops=None,
        )


def cpu_machine() -> Machine:
    """Returns the constants of CPU ranks that were not calibrated: round numbers for a core of a server and processes
    of one machine, with wide bounds. They order layouts; ``neuron-accel calibrate`` gives those of a machine."""

    def assumed(what: str, *points: tuple[float, float], best: float, worst: float) -> Constant:
        return Constant(points=points, best=best, worst=worst, source=f"assumed ({what}; not measured here)")

    rate = "a core of a server with one thread"
    product = assumed(rate, (5e5, 15e9), (3e7, 40e9), (1e9, 50e9), best=2.0, worst=0.4)
    memory = assumed(rate, (1e4, 6e9), (1e6, 8e9), (5e7, 3e9), best=2.0, worst=0.4)
    link = "gloo between processes of one machine"
    return Machine(
        name="CPU ranks",
        kernels={"product": {"": product}, "element-wise": {"": memory}},
        fixed={"": assumed(rate, (1.0, 10e-6), best=0.5, worst=2.5)},
        fuses=False,
        overlap=assumed(link, (1.0, 0.3), best=2.0, worst=0.0),
        in_training={phase: assumed(rate, (1.0, 1.5), best=0.8, worst=1.5) for phase in ("forward", "backward")},
        levels=(
            Level(
                name="processes",
                ranks=1,
                bandwidth=assumed(link, (1.0, 1.5e9), best=2.5, worst=0.3),
                latency=assumed(link, (1.0, 150e-6), best=0.3, worst=4.0),
            ),
        ),
    )


def memory_of_cpu_rank(ranks: int) -> int:
    """Bytes of this machine's memory, divided by the number of ranks on it."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def used_part(instance: Instance, ranks: int, lnc: int) -> tuple[Instance, int]:
    """Returns an instance whose full number of ranks is that of a run on it, and the number of instances.

    Raises:
        ConfigurationError: if so many ranks do not fill instances.
    """
    full = instance.cores(lnc)
    each, instances = (ranks, 1) if ranks <= full else (full, ranks // full)
    if each * instances != ranks:
        raise ConfigurationError(
            f"{ranks} ranks do not fill instances of {instance.name}.",
            why=f"each has {full} cores",
            fix=f"start {ranks // full * full} or {(ranks // full + 1) * full} ranks",
        )
    groups = tuple(size for size in instance.model_groups[lnc] if size <= each)
    part = dataclasses.replace(instance, lnc=(lnc,), workers={lnc: (each,)}, model_groups={lnc: groups})
    return part, instances
