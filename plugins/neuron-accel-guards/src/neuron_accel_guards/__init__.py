# SPDX-License-Identifier: Apache-2.0
"""Plugins that watch a training and report errors. They change nothing, except that :class:`FiniteGuard` can skip
steps."""

from neuron_accel_guards.desync import DesyncGuard
from neuron_accel_guards.finite import FiniteGuard, NonFiniteWarning
from neuron_accel_guards.recompile import RecompileGuard, RecompileWarning
from neuron_accel_guards.replicas import ReplicaCheck
from neuron_accel_guards.sums import SumCheck

__all__ = [
    "DesyncGuard",
    "FiniteGuard",
    "NonFiniteWarning",
    "RecompileGuard",
    "RecompileWarning",
    "ReplicaCheck",
    "SumCheck",
]
