# SPDX-License-Identifier: Apache-2.0
"""Plans of model families, which describe as data how their modules are sharded.

An :class:`ArchitecturePlan` describes a family; :func:`architecture_of` binds it to a model.
"""

from __future__ import annotations

from neuron_accel.models.architecture import Architecture, architecture_of
from neuron_accel.models.catalog import known_model_types, plan_for, register_tensor_parallel_plan, registered_plans
from neuron_accel.models.plan import ArchitecturePlan, Style, colwise, rowwise, sharded, shared, spanning
from neuron_accel.models.support import SupportReport
from neuron_accel.models.upstream import upstream_plan
from neuron_accel.models.user_plan import given_architecture

__all__ = [
    "Architecture",
    "ArchitecturePlan",
    "Style",
    "SupportReport",
    "architecture_of",
    "colwise",
    "given_architecture",
    "known_model_types",
    "plan_for",
    "register_tensor_parallel_plan",
    "registered_plans",
    "rowwise",
    "sharded",
    "shared",
    "spanning",
    "upstream_plan",
]
