"""How a run begins: every rank plans, ranks compare their plans, and the groups of the mesh are made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuron_accel.engine.plan.plan import agree_on_plan
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.runtime.replica_groups import PartitionLimit
from neuron_accel.engine.runtime.run import Run
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.engine.plan.hardware import Hardware
    from neuron_accel.engine.plan.plugin import StrategyPlugin
    from neuron_accel.engine.plan.registry import Registry


def begin(plugins: Sequence[StrategyPlugin], backend: Backend, registry: Registry, hardware: Hardware | None) -> Run:
    """A run of ``plugins``, in any order, on the ranks of ``backend``. Collective.

    Raises:
        PlanError: if the plugins cannot run together on this many ranks, or on this hardware.
        DesyncError: on every rank, if ranks were configured differently.
    """
    plan = agree_on_plan(
        lambda: make_plan(
            plugins,
            world_size=backend.world_size,
            backend_capabilities=backend.capabilities,
            backend_missing=backend.missing,
            default_owners=registry.default_owners(),
            provenance=registry.provenance,
            hardware=hardware,
        ),
        backend,
    )
    if hardware is not None:
        backend.limit_rings(hardware.ring_problem)
    if hardware is not None and hardware.partitions is not None:
        backend.observe(PartitionLimit(hardware.partitions, hardware.name))
    run = Run(plan=plan, backend=backend)
    mesh = plan.mesh
    for axes in ((), mesh.gradient_axes, mesh.data_axes, mesh.model_axes, (*mesh.model_axes, *mesh.gradient_axes)):
        run.group(*axes)  # now, in the same order on every rank
    return run


def check_connected(world_size: int, known_to_accelerate: int) -> None:
    """Checks that this process has found the others.

    Args:
        world_size: ranks that the backend is connected to, this one included.
        known_to_accelerate: processes that Accelerate believes in.

    Raises:
        UsageError: if the environment, Accelerate and the backend disagree.
    """
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced > world_size:  # of processes; ranks can also be threads
        raise UsageError(
            f"The environment announces {announced} processes, but this one is connected to {world_size - 1} others.",
            why="every process would train alone, on the same data",
            fix="start with `neuron-accel launch`, or check that the launcher's variables reach the processes",
        )
    if known_to_accelerate != world_size:
        raise UsageError(
            f"Accelerate was set up for {known_to_accelerate} processes before, but there are {world_size}.",
            where="accelerate.state.PartialState",
            why="something (a PartialState, another Accelerator) asked it for the number of processes before this run "
            "had chosen the device; every process would consider itself the main one",
            fix="create the NeuronAccelerator first, or call PartialState(cpu=True)",
        )
