# SPDX-License-Identifier: Apache-2.0
"""Everything that a strategy plugin may use, in one module.

Built-in strategies import this module and nothing else of the core. A plugin of a third party does the same, and may
also import ``neuron_accel`` and ``neuron_accel.testing``. All other modules are private and may change in any release.
Names may be added here; any other change raises :data:`API_VERSION`.

Names are resolved on first use, so that importing a name that does not need torch, such as an error or a specification,
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # devices, groups, collectives
    from neuron_accel.backends.autograd import (
        all_to_all,
        all_to_all_uneven,
        chunk_to_group,
        copy_to_group,
        gather_from_group,
        permute,
        reduce_from_group,
        reduce_scatter_to_group,
    )
    from neuron_accel.backends.base import (
        Backend,
        Board,
        CollectiveObserver,
        Done,
        Group,
        Pending,
        Traffic,
        TrafficTotals,
        Transfer,
    )
    from neuron_accel.backends.failures import reported
    from neuron_accel.backends.payload import object_to_tensor, tensor_to_object
    from neuron_accel.backends.randomness import DeviceGenerator, RankRandomness
    from neuron_accel.backends.ranges import OpenRange, RangeObserver, Ranges

    # gradients: their reduction over ranks, in buckets; norms and clipping
    from neuron_accel.engine.optim.buckets import Bucket, FlatGradients, check_dense, make_buckets, used_anywhere

    # optimizers: copies for other parameters, their properties, and their state in terms of the original parameters
    from neuron_accel.engine.optim.elementwise import is_elementwise, is_separable, needs_closure, why_not_elementwise
    from neuron_accel.engine.optim.full_parameter import FullParameterOptimizer
    from neuron_accel.engine.optim.held import state_of
    from neuron_accel.engine.optim.norms import (
        GradientPart,
        clip_by_norm,
        clip_by_value,
        clip_coefficient,
        elsewhere,
        global_norm,
        unsharded_gradients,
    )
    from neuron_accel.engine.optim.own_methods import OwnMethods
    from neuron_accel.engine.optim.reducer import BackwardWatcher, GradientReducer
    from neuron_accel.engine.optim.twin import (
        ReplicaState,
        ShardedState,
        StandIn,
        StatePiece,
        attributes_of,
        copy_options,
        extend_group,
        knows_by_parameter,
        put_state,
        recipe_of,
        take_weights,
        translate,
        twin,
    )

    # the plugin interface and the plan
    from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
    from neuron_accel.engine.plan.plan import Plan
    from neuron_accel.engine.plan.plugin import (
        API_VERSION,
        Claim,
        LayoutSpace,
        Phase,
        PlanContext,
        PluginSpec,
        Stages,
        StrategyPlugin,
    )
    from neuron_accel.engine.plan.registry import import_object, register_plugin

    # the state of a run
    from neuron_accel.engine.runtime.buffers import BufferBroadcast
    from neuron_accel.engine.runtime.forward import wrap_forward
    from neuron_accel.engine.runtime.join import Join, JoinAction
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.runtime.tensors import broadcast_tensors, full_tensor

    # how the parameters of the original model are sharded on this rank
    from neuron_accel.engine.sharding.layout import Cut, Layout, Piece, Segment
    from neuron_accel.engine.sharding.logits import LogitsTensor
    from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord, WeightShard
    from neuron_accel.engine.sharding.product_hooks import ProductHook, WithProductHooks, register_product_hook

    # errors
    from neuron_accel.errors import (
        CheckpointError,
        CommunicationError,
        ConfigurationError,
        CorruptionError,
        DesyncError,
        LayoutError,
        NeuronAccelError,
        NonFiniteError,
        ParameterError,
        PlanError,
        PluginError,
        RecompileError,
        UnsupportedModelError,
        UsageError,
        did_you_mean,
    )

_NAMES = {
    "backends.autograd": (
        "all_to_all",
        "all_to_all_uneven",
        "chunk_to_group",
        "copy_to_group",
        "gather_from_group",
        "permute",
        "reduce_from_group",
        "reduce_scatter_to_group",
    ),
    "backends.base": (
        "Backend",
        "Board",
        "CollectiveObserver",
        "Done",
        "Group",
        "Pending",
        "Traffic",
        "TrafficTotals",
        "Transfer",
    ),
    "backends.failures": ("reported",),
    "backends.payload": (
        "object_to_tensor",
        "tensor_to_object",
    ),
    "backends.randomness": (
        "DeviceGenerator",
        "RankRandomness",
    ),
    "backends.ranges": (
        "OpenRange",
        "RangeObserver",
        "Ranges",
    ),
    "engine.optim.buckets": (
        "Bucket",
        "FlatGradients",
        "check_dense",
        "make_buckets",
        "used_anywhere",
    ),
    "engine.optim.elementwise": (
        "is_elementwise",
        "is_separable",
        "needs_closure",
        "why_not_elementwise",
    ),
    "engine.optim.full_parameter": ("FullParameterOptimizer",),
    "engine.optim.held": ("state_of",),
    "engine.optim.norms": (
        "GradientPart",
        "clip_by_norm",
        "clip_by_value",
        "clip_coefficient",
        "elsewhere",
        "global_norm",
        "unsharded_gradients",
    ),
    "engine.optim.own_methods": ("OwnMethods",),
    "engine.optim.reducer": (
        "BackwardWatcher",
        "GradientReducer",
    ),
    "engine.optim.twin": (
        "ReplicaState",
        "ShardedState",
        "StandIn",
        "StatePiece",
        "attributes_of",
        "copy_options",
        "extend_group",
        "knows_by_parameter",
        "put_state",
        "recipe_of",
        "take_weights",
        "translate",
        "twin",
    ),
    "engine.plan.mesh": (
        "AxisKind",
        "AxisSpec",
        "Mesh",
    ),
    "engine.plan.plan": ("Plan",),
    "engine.plan.plugin": (
        "API_VERSION",
        "Claim",
        "LayoutSpace",
        "Phase",
        "PlanContext",
        "PluginSpec",
        "Stages",
        "StrategyPlugin",
    ),
    "engine.plan.registry": (
        "import_object",
        "register_plugin",
    ),
    "engine.runtime.buffers": ("BufferBroadcast",),
    "engine.runtime.forward": ("wrap_forward",),
    "engine.runtime.join": (
        "Join",
        "JoinAction",
    ),
    "engine.runtime.run": (
        "PreparedModel",
        "Run",
    ),
    "engine.runtime.tensors": (
        "broadcast_tensors",
        "full_tensor",
    ),
    "engine.sharding.layout": (
        "Cut",
        "Layout",
        "Piece",
        "Segment",
    ),
    "engine.sharding.logits": ("LogitsTensor",),
    "engine.sharding.parameters": (
        "ParameterMap",
        "ParameterRecord",
        "WeightShard",
    ),
    "engine.sharding.product_hooks": (
        "ProductHook",
        "WithProductHooks",
        "register_product_hook",
    ),
    "errors": (
        "CheckpointError",
        "CommunicationError",
        "ConfigurationError",
        "CorruptionError",
        "DesyncError",
        "LayoutError",
        "NeuronAccelError",
        "NonFiniteError",
        "ParameterError",
        "PlanError",
        "PluginError",
        "RecompileError",
        "UnsupportedModelError",
        "UsageError",
        "did_you_mean",
    ),
}
"""Modules of this package, and the public names of each."""

_WHERE = {name: f"neuron_accel.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "API_VERSION",
    "AxisKind",
    "AxisSpec",
    "Backend",
    "BackwardWatcher",
    "Board",
    "Bucket",
    "BufferBroadcast",
    "CheckpointError",
    "Claim",
    "CollectiveObserver",
    "CommunicationError",
    "ConfigurationError",
    "CorruptionError",
    "Cut",
    "DesyncError",
    "DeviceGenerator",
    "Done",
    "FlatGradients",
    "FullParameterOptimizer",
    "GradientPart",
    "GradientReducer",
    "Group",
    "Join",
    "JoinAction",
    "Layout",
    "LayoutError",
    "LayoutSpace",
    "LogitsTensor",
    "Mesh",
    "NeuronAccelError",
    "NonFiniteError",
    "OpenRange",
    "OwnMethods",
    "ParameterError",
    "ParameterMap",
    "ParameterRecord",
    "Pending",
    "Phase",
    "Piece",
    "Plan",
    "PlanContext",
    "PlanError",
    "PluginError",
    "PluginSpec",
    "PreparedModel",
    "ProductHook",
    "RangeObserver",
    "Ranges",
    "RankRandomness",
    "RecompileError",
    "ReplicaState",
    "Run",
    "Segment",
    "ShardedState",
    "Stages",
    "StandIn",
    "StatePiece",
    "StrategyPlugin",
    "Traffic",
    "TrafficTotals",
    "Transfer",
    "UnsupportedModelError",
    "UsageError",
    "WeightShard",
    "WithProductHooks",
    "all_to_all",
    "all_to_all_uneven",
    "attributes_of",
    "broadcast_tensors",
    "check_dense",
    "chunk_to_group",
    "clip_by_norm",
    "clip_by_value",
    "clip_coefficient",
    "copy_options",
    "copy_to_group",
    "did_you_mean",
    "elsewhere",
    "extend_group",
    "full_tensor",
    "gather_from_group",
    "global_norm",
    "import_object",
    "is_elementwise",
    "is_separable",
    "knows_by_parameter",
    "make_buckets",
    "needs_closure",
    "object_to_tensor",
    "permute",
    "put_state",
    "recipe_of",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "register_plugin",
    "register_product_hook",
    "reported",
    "state_of",
    "take_weights",
    "tensor_to_object",
    "translate",
    "twin",
    "unsharded_gradients",
    "used_anywhere",
    "why_not_elementwise",
    "wrap_forward",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
