# SPDX-License-Identifier: Apache-2.0
"""What most strategy plugins use. The modules of this package have the rest: :mod:`~neuron_accel.contract.sharded`
optimizers and weights, :mod:`~neuron_accel.contract.events`, and :mod:`~neuron_accel.contract.families` of models.

Built-in strategies import these modules and ``neuron_accel.errors``, which needs no torch, and nothing else of the
core. A plugin of a third party does the same, and may also import ``neuron_accel`` and ``neuron_accel.testing``. All
other modules are private and may change in any release. Names may be added; any other change raises
:data:`API_VERSION`.
"""

import importlib
from typing import Any

# devices, groups, collectives, events
from neuron_accel.backends.autograd import (
    all_to_all,
    all_to_all_uneven,
    chunk_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
)
from neuron_accel.backends.base import Backend
from neuron_accel.backends.board import Board
from neuron_accel.backends.group import Group, Pending
from neuron_accel.backends.randomness import RankRandomness
from neuron_accel.doors import moved

# gradients, their norms; optimizers, copies of them for other parameters, their state in terms of the original
# parameters
from neuron_accel.engine.optim.norms import GradientPart, Gradients, global_norm, gradient_parts
from neuron_accel.engine.optim.reducer import GradientReducer
from neuron_accel.engine.optim.state import ReplicaState, ShardedState, take_weights
from neuron_accel.engine.optim.twin import twin

# the plugin interface and the plan
from neuron_accel.engine.plan import version_3
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.engine.plan.plan import Plan
from neuron_accel.engine.plan.plugin import (
    API_VERSION,
    Claim,
    Phase,
    PlanContext,
    PluginSpec,
    StrategyPlugin,
)
from neuron_accel.engine.plan.registry import import_object

# the state of a run
from neuron_accel.engine.runtime.forward import wrap_forward
from neuron_accel.engine.runtime.join import Join
from neuron_accel.engine.runtime.run import PreparedModel, Run
from neuron_accel.engine.runtime.tensors import BufferBroadcast

# how the parameters of the original model are sharded on this rank
from neuron_accel.engine.sharding.layout import Cut, Layout
from neuron_accel.engine.sharding.logits import LogitsTensor
from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord
from neuron_accel.engine.sharding.product_hooks import WithProductHooks, register_product_hook

__all__ = [
    "API_VERSION",
    "AxisKind",
    "AxisSpec",
    "Backend",
    "Board",
    "BufferBroadcast",
    "Claim",
    "Cut",
    "GradientPart",
    "GradientReducer",
    "Gradients",
    "Group",
    "Join",
    "Layout",
    "LogitsTensor",
    "Mesh",
    "ParameterMap",
    "ParameterRecord",
    "Pending",
    "Phase",
    "Plan",
    "PlanContext",
    "PluginSpec",
    "PreparedModel",
    "RankRandomness",
    "ReplicaState",
    "Run",
    "ShardedState",
    "StrategyPlugin",
    "WithProductHooks",
    "all_to_all",
    "all_to_all_uneven",
    "chunk_to_group",
    "copy_to_group",
    "gather_from_group",
    "global_norm",
    "gradient_parts",
    "import_object",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "register_product_hook",
    "take_weights",
    "twin",
    "wrap_forward",
]


def __getattr__(name: str) -> Any:
    if name in version_3.NAMES:
        return getattr(importlib.import_module(version_3.NAMES[name]), name)
    return moved(name, __name__)
