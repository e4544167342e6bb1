# SPDX-License-Identifier: Apache-2.0
"""The start of a run: every rank makes a plan, ranks compare their plans, and the groups of the mesh are created."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuron_accel.engine.plan.plan import agree_on_plan
from neuron_accel.engine.plan.ranks import plan_for
from neuron_accel.engine.runtime.replica_groups import PartitionLimit
from neuron_accel.engine.runtime.run import Run
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.engine.plan.hardware import Hardware
    from neuron_accel.engine.plan.plugin import StrategyPlugin
    from neuron_accel.engine.plan.registry import Registry


def begin(plugins: Sequence[StrategyPlugin], backend: Backend, registry: Registry, hardware: Hardware | None) -> Run:
    """Starts a run of ``plugins``, given in any order, on the ranks of ``backend``. Collective.

    Args:
        plugins: the strategies.
        backend: connects the ranks.
        registry: known plugins, of which it names the default owners of responsibilities.
        hardware: limits of the instance that the run is on or is meant for; None: not checked.

    Raises:
        PlanError: if the plugins cannot run together on this many ranks, or on this hardware.
        DesyncError: on every rank, if ranks were configured differently.
    """
    plan = agree_on_plan(lambda: plan_for(plugins, backend, registry, hardware), backend)
    if hardware is not None:
        backend.limit_rings(hardware.ring_problem)
    if hardware is not None and hardware.partitions is not None:
        backend.events.observe(PartitionLimit(hardware.partitions, hardware.name))
    run = Run(plan=plan, backend=backend, hardware=hardware)
    mesh = plan.mesh
    for axes in ((), mesh.gradient_axes, mesh.data_axes, mesh.model_axes, (*mesh.model_axes, *mesh.gradient_axes)):
        run.group(*axes)  # created now, in the same order on every rank
    return run


def check_connected(world_size: int, known_to_accelerate: int) -> None:
    """Checks that the launcher, Accelerate and the backend agree on the number of processes.

    Args:
        world_size: number of ranks that the backend connects, this one included.
        known_to_accelerate: number of processes according to Accelerate.

    Raises:
        UsageError: if the environment, Accelerate and the backend disagree.
    """
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced > world_size:  # of processes; ranks can also be threads
        raise UsageError(
            f"WORLD_SIZE is {announced}, but this process is connected to {world_size - 1} others.",
            why="every process would train by itself, on the same data",
            fix="start with `neuron-accel launch`, or check that the launcher's variables reach the processes",
        )
    if known_to_accelerate != world_size:
        raise UsageError(
            f"Accelerate's state was created for {known_to_accelerate} processes, but there are {world_size}.",
            where="accelerate.state.PartialState",
            why="a PartialState or an Accelerator was created before the NeuronAccelerator, which chooses the device; "
            "every process would consider itself the main process",
            fix="create the NeuronAccelerator first, or call PartialState(cpu=True)",
        )
