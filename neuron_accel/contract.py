"""Everything that a strategy plugin may use: the contract as one module.

A plugin of a third party imports from here, from ``neuron_accel`` and from ``neuron_accel.testing``; everything else is
private and may change in any release. What is here changes only together with :data:`API_VERSION`, or by additions. The
built-in strategies are written with the same names.
"""

from __future__ import annotations

from neuron_accel.backends.autograd import (
    all_to_all,
    chunk_to_group,
    copy_to_group,
    gather_from_group,
    permute,
    reduce_from_group,
    reduce_scatter_to_group,
)
from neuron_accel.backends.base import Backend, Group, Pending, Traffic, Transfer
from neuron_accel.backends.randomness import RankRandomness
from neuron_accel.engine.optim.norms import GradientPart, clip_coefficient, global_norm, whole_gradients
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.engine.plan.plan import Plan
from neuron_accel.engine.plan.plugin import API_VERSION, Claim, Phase, PlanContext, PluginSpec, StrategyPlugin
from neuron_accel.engine.plan.registry import register_plugin
from neuron_accel.engine.runtime.run import PreparedModel, Run
from neuron_accel.engine.sharding.layout import Cut, Layout, Piece, Segment
from neuron_accel.engine.sharding.parameters import ParameterMap, ParameterRecord
from neuron_accel.engine.sharding.product_hooks import ProductHook, register_product_hook
from neuron_accel.errors import (
    CheckpointError,
    CommunicationError,
    ConfigurationError,
    DesyncError,
    LayoutError,
    NeuronAccelError,
    ParameterError,
    PlanError,
    PluginError,
    UnsupportedModelError,
    UsageError,
    did_you_mean,
)

__all__ = [
    "API_VERSION",
    "AxisKind",
    "AxisSpec",
    "Backend",
    "CheckpointError",
    "Claim",
    "CommunicationError",
    "ConfigurationError",
    "Cut",
    "DesyncError",
    "GradientPart",
    "Group",
    "Layout",
    "LayoutError",
    "Mesh",
    "NeuronAccelError",
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
    "RankRandomness",
    "Run",
    "Segment",
    "StrategyPlugin",
    "Traffic",
    "Transfer",
    "UnsupportedModelError",
    "UsageError",
    "all_to_all",
    "chunk_to_group",
    "clip_coefficient",
    "copy_to_group",
    "did_you_mean",
    "gather_from_group",
    "global_norm",
    "permute",
    "reduce_from_group",
    "reduce_scatter_to_group",
    "register_plugin",
    "register_product_hook",
    "whole_gradients",
]
