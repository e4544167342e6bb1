# SPDX-License-Identifier: Apache-2.0
"""ZeRO stage 1: the optimizer's state is sharded over data-parallel ranks."""

from neuron_accel.strategies.zero1.plugin import Zero1Plugin

__all__ = ["Zero1Plugin"]
