# SPDX-License-Identifier: Apache-2.0
"""Everything that a strategy plugin may use, in one module.

Built-in strategies import this module and ``neuron_accel.errors``, which needs no torch, and nothing else of the core.
A plugin of a third party does the same, and may also import ``neuron_accel`` and ``neuron_accel.testing``. All other
modules are private and may change in any release. Names may be added here; any other change raises :data:`API_VERSION`.
"""

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
from neuron_accel.backends.events import Collective, Event, Events, Observer, Traffic, Transfer
from neuron_accel.backends.group import Group, Pending
from neuron_accel.backends.randomness import RankRandomness
from neuron_accel.doors import moved

# gradients, their norms; optimizers, copies of them for other parameters, their state in terms of the original
# parameters
from neuron_accel.engine.optim import norms
from neuron_accel.engine.optim.elementwise import needs_closure, why_not_elementwise
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
from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord, WeightShard
from neuron_accel.engine.sharding.product_hooks import WithProductHooks, register_product_hook

# an optimizer whose state is sharded over ranks; weights that are, too
from neuron_accel.engine.shards.fully_sharded import ShardedWeights
from neuron_accel.engine.shards.gathered_shard import GatheredShard
from neuron_accel.engine.shards.gradients import ShardedGradients
from neuron_accel.engine.shards.optimizer import ShardedOptimizer
from neuron_accel.engine.shards.unit import Unit, UnitsOfModel

# errors
from neuron_accel.errors import (
    ConfigurationError,
    DesyncError,
    LayoutError,
    NeuronAccelError,
    PlanError,
    UnsupportedModelError,
    UsageError,
    did_you_mean,
)

# families of models as data: their blocks, how each projection is sharded, where they can be cut
from neuron_accel.models.architecture import Architecture, join_fqn, model_without_weights
from neuron_accel.models.attention import BlockwiseAttention
from neuron_accel.models.plan import Style, matches_fqn
from neuron_accel.models.resize import install_resize
from neuron_accel.models.stages import Stack

__all__ = [
    "API_VERSION",
    "Architecture",
    "AxisKind",
    "AxisSpec",
    "Backend",
    "BlockwiseAttention",
    "Board",
    "BufferBroadcast",
    "Claim",
    "Collective",
    "ConfigurationError",
    "Cut",
    "DesyncError",
    "Event",
    "Events",
    "GatheredShard",
    "GradientPart",
    "GradientReducer",
    "Gradients",
    "Group",
    "Join",
    "Layout",
    "LayoutError",
    "LogitsTensor",
    "Mesh",
    "NeuronAccelError",
    "Observer",
    "ParameterMap",
    "ParameterRecord",
    "Pending",
    "Phase",
    "Plan",
    "PlanContext",
    "PlanError",
    "PluginSpec",
    "PreparedModel",
    "RankRandomness",
    "ReplicaState",
    "Run",
    "ShardedGradients",
    "ShardedOptimizer",
    "ShardedState",
    "ShardedWeights",
    "Stack",
    "StrategyPlugin",
    "Style",
    "Traffic",
    "Transfer",
    "Unit",
    "UnitsOfModel",
    "UnsupportedModelError",
    "UsageError",
    "WeightShard",
    "WithProductHooks",
    "all_to_all",
    "all_to_all_uneven",
    "chunk_to_group",
    "copy_to_group",
    "did_you_mean",
    "gather_from_group",
    "global_norm",
    "gradient_parts",
    "import_object",
    "install_resize",
    "join_fqn",
    "matches_fqn",
    "model_without_weights",
    "needs_closure",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "register_product_hook",
    "take_weights",
    "twin",
    "why_not_elementwise",
    "wrap_forward",
]


def __getattr__(name: str) -> Any:
    if name in version_3.NAMES:
        return getattr(norms, name)
    return moved(name, __name__)
