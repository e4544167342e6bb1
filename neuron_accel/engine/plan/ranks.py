# SPDX-License-Identifier: Apache-2.0
"""The plan of plugins on the ranks of a backend, or on ranks that do not exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.registry import Registry, default_registry

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend
    from neuron_accel.engine.plan.hardware import Hardware
    from neuron_accel.engine.plan.plan import Plan
    from neuron_accel.engine.plan.plugin import StrategyPlugin


def plan_for(
    plugins: Sequence[StrategyPlugin], backend: Backend, registry: Registry, hardware: Hardware | None
) -> Plan:
    """Makes the plan of ``plugins`` on the ranks of ``backend``.

    Raises:
        PlanError: if the plugins cannot run together on this many ranks, or on this hardware.
    """
    return make_plan(
        plugins,
        world_size=backend.world_size,
        backend_capabilities=backend.capabilities,
        backend_missing=backend.missing,
        default_owners=registry.default_owners(),
        provenance=registry.provenance,
        hardware=hardware,
    )


def dry_plan(plugins: Sequence[StrategyPlugin], *, world_size: int, hardware: Hardware | None = None) -> Plan:
    """Returns the plan that a dry run of these plugins would have, without beginning one.

    Args:
        plugins: the strategies, in any order.
        world_size: number of ranks.
        hardware: limits of the machines, such as those of ``find_instance("trn1.32xlarge").hardware()``; None: not
            checked.

    Raises:
        PlanError: if the plugins cannot run together on this many ranks, or on this hardware.
    """
    from neuron_accel.backends.dry_run import DryRunBackend

    return plan_for(plugins, DryRunBackend(world_size=world_size), default_registry(), hardware)
