# SPDX-License-Identifier: Apache-2.0
"""Everything that a strategy plugin may use, in one module.

Built-in strategies import this module and nothing else of the core. A plugin of a third party does the same, and may
also import ``neuron_accel`` and ``neuron_accel.testing``. All other modules are private and may change in any release.
Names may be added here; any other change raises :data:`API_VERSION`.

Names are resolved on first use, so that importing a name that does not need torch, such as an error or a specification,
does not import torch.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # devices, groups, collectives, events
    from neuron_accel.backends.autograd import all_to_all as all_to_all
    from neuron_accel.backends.autograd import all_to_all_uneven as all_to_all_uneven
    from neuron_accel.backends.autograd import chunk_to_group as chunk_to_group
    from neuron_accel.backends.autograd import copy_to_group as copy_to_group
    from neuron_accel.backends.autograd import gather_from_group as gather_from_group
    from neuron_accel.backends.autograd import reduce_from_group as reduce_from_group
    from neuron_accel.backends.autograd import reduce_scatter_to_group as reduce_scatter_to_group
    from neuron_accel.backends.base import Backend as Backend
    from neuron_accel.backends.board import Board as Board
    from neuron_accel.backends.events import Collective as Collective
    from neuron_accel.backends.events import Event as Event
    from neuron_accel.backends.events import Events as Events
    from neuron_accel.backends.events import Observer as Observer
    from neuron_accel.backends.events import Traffic as Traffic
    from neuron_accel.backends.events import Transfer as Transfer
    from neuron_accel.backends.group import Group as Group
    from neuron_accel.backends.group import Pending as Pending
    from neuron_accel.backends.randomness import RankRandomness as RankRandomness

    # gradients, their norms; optimizers, copies of them for other parameters, their state in terms of the original
    # parameters
    from neuron_accel.engine.optim.buckets import Bucket as Bucket
    from neuron_accel.engine.optim.buckets import make_buckets as make_buckets
    from neuron_accel.engine.optim.elementwise import is_separable as is_separable
    from neuron_accel.engine.optim.elementwise import needs_closure as needs_closure
    from neuron_accel.engine.optim.elementwise import why_not_elementwise as why_not_elementwise
    from neuron_accel.engine.optim.norms import GradientPart as GradientPart
    from neuron_accel.engine.optim.norms import clip_by_norm as clip_by_norm
    from neuron_accel.engine.optim.norms import clip_by_value as clip_by_value
    from neuron_accel.engine.optim.norms import clip_coefficient as clip_coefficient
    from neuron_accel.engine.optim.norms import elsewhere as elsewhere
    from neuron_accel.engine.optim.norms import global_norm as global_norm
    from neuron_accel.engine.optim.norms import unsharded_gradients as unsharded_gradients
    from neuron_accel.engine.optim.reducer import GradientReducer as GradientReducer
    from neuron_accel.engine.optim.twin import ReplicaState as ReplicaState
    from neuron_accel.engine.optim.twin import ShardedState as ShardedState
    from neuron_accel.engine.optim.twin import take_weights as take_weights
    from neuron_accel.engine.optim.twin import twin as twin

    # the plugin interface and the plan
    from neuron_accel.engine.plan.coerce import load_dataclass as load_dataclass
    from neuron_accel.engine.plan.config import load_config as load_config
    from neuron_accel.engine.plan.config import to_config as to_config
    from neuron_accel.engine.plan.mesh import AxisKind as AxisKind
    from neuron_accel.engine.plan.mesh import AxisSpec as AxisSpec
    from neuron_accel.engine.plan.mesh import Mesh as Mesh
    from neuron_accel.engine.plan.plan import Plan as Plan
    from neuron_accel.engine.plan.plugin import API_VERSION as API_VERSION
    from neuron_accel.engine.plan.plugin import Claim as Claim
    from neuron_accel.engine.plan.plugin import LayoutSpace as LayoutSpace
    from neuron_accel.engine.plan.plugin import Phase as Phase
    from neuron_accel.engine.plan.plugin import PlanContext as PlanContext
    from neuron_accel.engine.plan.plugin import PluginSpec as PluginSpec
    from neuron_accel.engine.plan.plugin import Stages as Stages
    from neuron_accel.engine.plan.plugin import StrategyPlugin as StrategyPlugin
    from neuron_accel.engine.plan.ranks import dry_plan as dry_plan
    from neuron_accel.engine.plan.registry import import_object as import_object
    from neuron_accel.engine.plan.registry import plugin_classes as plugin_classes

    # the state of a run
    from neuron_accel.engine.runtime.buffers import BufferBroadcast as BufferBroadcast
    from neuron_accel.engine.runtime.forward import wrap_forward as wrap_forward
    from neuron_accel.engine.runtime.join import Join as Join
    from neuron_accel.engine.runtime.run import PreparedModel as PreparedModel
    from neuron_accel.engine.runtime.run import Run as Run

    # how the parameters of the original model are sharded on this rank
    from neuron_accel.engine.sharding.layout import Cut as Cut
    from neuron_accel.engine.sharding.layout import Layout as Layout
    from neuron_accel.engine.sharding.logits import LogitsTensor as LogitsTensor
    from neuron_accel.engine.sharding.parameters import ParameterMap as ParameterMap
    from neuron_accel.engine.sharding.parameters import ParameterRecord as ParameterRecord
    from neuron_accel.engine.sharding.parameters import WeightShard as WeightShard
    from neuron_accel.engine.sharding.product_hooks import WithProductHooks as WithProductHooks
    from neuron_accel.engine.sharding.product_hooks import register_product_hook as register_product_hook

    # an optimizer whose state is sharded over ranks, and the shards that it updates
    from neuron_accel.engine.shards.eager_shard import EagerShard as EagerShard
    from neuron_accel.engine.shards.eager_shard import SendBuffers as SendBuffers
    from neuron_accel.engine.shards.lazy_shard import HostCopy as HostCopy
    from neuron_accel.engine.shards.lazy_shard import LazyShard as LazyShard
    from neuron_accel.engine.shards.optimizer import ShardedOptimizer as ShardedOptimizer
    from neuron_accel.engine.shards.optimizer import refuse_closures as refuse_closures
    from neuron_accel.engine.shards.optimizer import return_freed_memory as return_freed_memory
    from neuron_accel.engine.shards.optimizer import scale_parts as scale_parts
    from neuron_accel.engine.shards.partition import Partition as Partition
    from neuron_accel.engine.shards.partition import make_partition as make_partition
    from neuron_accel.engine.shards.shard import ParameterShard as ParameterShard
    from neuron_accel.engine.shards.sharded_grad import ShardedGrad as ShardedGrad

    # errors
    from neuron_accel.errors import CheckpointError as CheckpointError
    from neuron_accel.errors import ConfigurationError as ConfigurationError
    from neuron_accel.errors import CorruptionError as CorruptionError
    from neuron_accel.errors import DesyncError as DesyncError
    from neuron_accel.errors import LayoutError as LayoutError
    from neuron_accel.errors import NeuronAccelError as NeuronAccelError
    from neuron_accel.errors import NonFiniteError as NonFiniteError
    from neuron_accel.errors import ParameterError as ParameterError
    from neuron_accel.errors import PlanError as PlanError
    from neuron_accel.errors import RecompileError as RecompileError
    from neuron_accel.errors import UnsupportedModelError as UnsupportedModelError
    from neuron_accel.errors import UsageError as UsageError
    from neuron_accel.errors import did_you_mean as did_you_mean

    # families of models as data: their blocks, how each projection is sharded, where they can be cut
    from neuron_accel.models.architecture import Architecture as Architecture
    from neuron_accel.models.architecture import join_fqn as join_fqn
    from neuron_accel.models.architecture import model_without_weights as model_without_weights
    from neuron_accel.models.attention import BlockwiseAttention as BlockwiseAttention
    from neuron_accel.models.plan import Style as Style
    from neuron_accel.models.plan import matches_fqn as matches_fqn
    from neuron_accel.models.resize import install_resize as install_resize
    from neuron_accel.models.stages import Stack as Stack


def _modules() -> dict[str, str]:
    """The module of each name: the imports above, which type checkers see, are the only list of them."""
    source = pkgutil.get_data("neuron_accel", "contract.py")
    assert source is not None
    nodes = ast.walk(ast.parse(source))
    return {a.name: n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module for a in n.names if a.asname}


_WHERE = _modules()

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
