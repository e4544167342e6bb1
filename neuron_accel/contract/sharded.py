# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose state is sharded over ranks, and weights that are gathered for their use."""

from neuron_accel.engine.optim.elementwise import needs_closure, why_not_elementwise
from neuron_accel.engine.sharding.parameters import WeightShard
from neuron_accel.engine.shards.fully_sharded import ShardedWeights
from neuron_accel.engine.shards.gathered_shard import GatheredShard
from neuron_accel.engine.shards.optimizer import ShardedGradients, ShardedOptimizer
from neuron_accel.engine.shards.unit import Unit, UnitsOfModel

__all__ = [
    "GatheredShard",
    "ShardedGradients",
    "ShardedOptimizer",
    "ShardedWeights",
    "Unit",
    "UnitsOfModel",
    "WeightShard",
    "needs_closure",
    "why_not_elementwise",
]
