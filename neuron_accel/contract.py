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
    # devices, groups, collectives, events
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
    from neuron_accel.backends.base import Backend
    from neuron_accel.backends.board import Board
    from neuron_accel.backends.events import Collective, Event, Events, Observer, Traffic, Transfer
    from neuron_accel.backends.failures import reported
    from neuron_accel.backends.group import Done, Group, Pending
    from neuron_accel.backends.payload import object_to_tensor, tensor_to_object
    from neuron_accel.backends.randomness import RankRandomness

    # gradients, their norms; optimizers, copies of them for other parameters, their state in terms of the original
    # parameters
    from neuron_accel.engine.optim.buckets import Bucket, FlatGradients, make_buckets
    from neuron_accel.engine.optim.elementwise import is_separable, needs_closure, why_not_elementwise
    from neuron_accel.engine.optim.norms import (
        GradientPart,
        clip_by_norm,
        clip_by_value,
        clip_coefficient,
        elsewhere,
        global_norm,
        unsharded_gradients,
    )
    from neuron_accel.engine.optim.reducer import BackwardWatcher, GradientOwner, GradientReducer
    from neuron_accel.engine.optim.twin import ReplicaState, ShardedState, StatePiece, take_weights, twin

    # the plugin interface and the plan
    from neuron_accel.engine.plan.coerce import load_dataclass
    from neuron_accel.engine.plan.config import load_config, to_config
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
    from neuron_accel.engine.plan.ranks import dry_plan
    from neuron_accel.engine.plan.registry import import_object, plugin_classes, register_plugin

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

    # an optimizer whose state is sharded over ranks, and the shards that it updates
    from neuron_accel.engine.shards.awaited import WEIGHTS_IN_PASSES
    from neuron_accel.engine.shards.eager_shard import EagerShard, SendBuffers
    from neuron_accel.engine.shards.lazy_shard import HostCopy, LazyShard
    from neuron_accel.engine.shards.optimizer import ShardedOptimizer, refuse_closures, return_freed_memory, scale_parts
    from neuron_accel.engine.shards.partition import Partition, make_partition
    from neuron_accel.engine.shards.shard import ParameterShard
    from neuron_accel.engine.shards.sharded_grad import ShardedGrad

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

    # families of models as data: their blocks, how each projection is sharded, where they can be cut; lazy loading
    from neuron_accel.lazy import lazy_load_for_parallelism
    from neuron_accel.models.architecture import Architecture, architecture_of, join_fqn
    from neuron_accel.models.attention import BlockwiseAttention, install_attention
    from neuron_accel.models.catalog import registered_plans
    from neuron_accel.models.plan import Style, matches_fqn
    from neuron_accel.models.resize import install_resize
    from neuron_accel.models.stages import Stack, container_of, stack_of
    from neuron_accel.models.support import SupportReport, model_without_weights
    from neuron_accel.models.user_plan import given_architecture

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
    "backends.base": ("Backend",),
    "backends.board": ("Board",),
    "backends.events": (
        "Collective",
        "Event",
        "Events",
        "Observer",
        "Traffic",
        "Transfer",
    ),
    "backends.failures": ("reported",),
    "backends.group": (
        "Done",
        "Group",
        "Pending",
    ),
    "backends.payload": (
        "object_to_tensor",
        "tensor_to_object",
    ),
    "backends.randomness": ("RankRandomness",),
    "engine.optim.buckets": (
        "Bucket",
        "FlatGradients",
        "make_buckets",
    ),
    "engine.optim.elementwise": (
        "is_separable",
        "needs_closure",
        "why_not_elementwise",
    ),
    "engine.optim.norms": (
        "GradientPart",
        "clip_by_norm",
        "clip_by_value",
        "clip_coefficient",
        "elsewhere",
        "global_norm",
        "unsharded_gradients",
    ),
    "engine.optim.reducer": (
        "BackwardWatcher",
        "GradientOwner",
        "GradientReducer",
    ),
    "engine.optim.twin": (
        "ReplicaState",
        "ShardedState",
        "StatePiece",
        "take_weights",
        "twin",
    ),
    "engine.plan.coerce": ("load_dataclass",),
    "engine.plan.config": (
        "load_config",
        "to_config",
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
    "engine.plan.ranks": ("dry_plan",),
    "engine.plan.registry": (
        "import_object",
        "plugin_classes",
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
    "engine.shards.awaited": ("WEIGHTS_IN_PASSES",),
    "engine.shards.eager_shard": (
        "EagerShard",
        "SendBuffers",
    ),
    "engine.shards.lazy_shard": (
        "HostCopy",
        "LazyShard",
    ),
    "engine.shards.optimizer": (
        "ShardedOptimizer",
        "refuse_closures",
        "return_freed_memory",
        "scale_parts",
    ),
    "engine.shards.partition": (
        "Partition",
        "make_partition",
    ),
    "engine.shards.shard": ("ParameterShard",),
    "engine.shards.sharded_grad": ("ShardedGrad",),
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
    "lazy": ("lazy_load_for_parallelism",),
    "models.architecture": (
        "Architecture",
        "architecture_of",
        "join_fqn",
    ),
    "models.attention": (
        "BlockwiseAttention",
        "install_attention",
    ),
    "models.catalog": ("registered_plans",),
    "models.plan": (
        "Style",
        "matches_fqn",
    ),
    "models.resize": ("install_resize",),
    "models.stages": (
        "Stack",
        "container_of",
        "stack_of",
    ),
    "models.support": (
        "SupportReport",
        "model_without_weights",
    ),
    "models.user_plan": ("given_architecture",),
}
"""Modules of this package, and the public names of each."""

_WHERE = {name: f"neuron_accel.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "API_VERSION",
    "WEIGHTS_IN_PASSES",
    "Architecture",
    "AxisKind",
    "AxisSpec",
    "Backend",
    "BackwardWatcher",
    "BlockwiseAttention",
    "Board",
    "Bucket",
    "BufferBroadcast",
    "CheckpointError",
    "Claim",
    "Collective",
    "CommunicationError",
    "ConfigurationError",
    "CorruptionError",
    "Cut",
    "DesyncError",
    "Done",
    "EagerShard",
    "Event",
    "Events",
    "FlatGradients",
    "GradientOwner",
    "GradientPart",
    "GradientReducer",
    "Group",
    "HostCopy",
    "Join",
    "JoinAction",
    "Layout",
    "LayoutError",
    "LayoutSpace",
    "LazyShard",
    "LogitsTensor",
    "Mesh",
    "NeuronAccelError",
    "NonFiniteError",
    "Observer",
    "ParameterError",
    "ParameterMap",
    "ParameterRecord",
    "ParameterShard",
    "Partition",
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
    "RankRandomness",
    "RecompileError",
    "ReplicaState",
    "Run",
    "Segment",
    "SendBuffers",
    "ShardedGrad",
    "ShardedOptimizer",
    "ShardedState",
    "Stack",
    "Stages",
    "StatePiece",
    "StrategyPlugin",
    "Style",
    "SupportReport",
    "Traffic",
    "Transfer",
    "UnsupportedModelError",
    "UsageError",
    "WeightShard",
    "WithProductHooks",
    "all_to_all",
    "all_to_all_uneven",
    "architecture_of",
    "broadcast_tensors",
    "chunk_to_group",
    "clip_by_norm",
    "clip_by_value",
    "clip_coefficient",
    "container_of",
    "copy_to_group",
    "did_you_mean",
    "dry_plan",
    "elsewhere",
    "full_tensor",
    "gather_from_group",
    "given_architecture",
    "global_norm",
    "import_object",
    "install_attention",
    "install_resize",
    "is_separable",
    "join_fqn",
    "lazy_load_for_parallelism",
    "load_config",
    "load_dataclass",
    "make_buckets",
    "make_partition",
    "matches_fqn",
    "model_without_weights",
    "needs_closure",
    "object_to_tensor",
    "permute",
    "plugin_classes",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "refuse_closures",
    "register_plugin",
    "register_product_hook",
    "registered_plans",
    "reported",
    "return_freed_memory",
    "scale_parts",
    "stack_of",
    "take_weights",
    "tensor_to_object",
    "to_config",
    "twin",
    "unsharded_gradients",
    "why_not_elementwise",
    "wrap_forward",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
