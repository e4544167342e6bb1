"""Plugins that look on and say when something is wrong. They change nothing about a training, but for steps that a
:class:`FiniteGuard` is told to skip."""

from neuron_accel.strategies.guards.desync import DesyncGuard
from neuron_accel.strategies.guards.finite import FiniteGuard, NonFiniteWarning
from neuron_accel.strategies.guards.recompile import RecompileGuard, RecompileWarning
from neuron_accel.strategies.guards.replicas import ReplicaCheck

__all__ = ["DesyncGuard", "FiniteGuard", "NonFiniteWarning", "RecompileGuard", "RecompileWarning", "ReplicaCheck"]
