# SPDX-License-Identifier: Apache-2.0
"""ZeRO stages 2 and 3: parameters, gradients and the optimizer's state are sharded over data-parallel ranks."""

from neuron_accel.strategies.fully_sharded.plugin import FullyShardedPlugin

__all__ = ["FullyShardedPlugin"]
