# SPDX-License-Identifier: Apache-2.0
"""Plans of model families, which describe as data how their modules are sharded.

An :class:`ArchitecturePlan` describes a family; :meth:`Architecture.of` binds it to a model.
"""

from __future__ import annotations

from neuron_accel.models.architecture import Architecture
from neuron_accel.models.catalog import known_model_types, plan_for, register_tensor_parallel_plan
from neuron_accel.models.plan import ArchitecturePlan, Style, colwise, rowwise, sharded, shared, spanning
from neuron_accel.models.upstream import upstream_plan

__all__ = [
    "Architecture",
    "ArchitecturePlan",
    "Style",
    "colwise",
    "known_model_types",
    "plan_for",
    "register_tensor_parallel_plan",
    "rowwise",
    "sharded",
    "shared",
    "spanning",
    "upstream_plan",
]
