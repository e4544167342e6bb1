"""Plugins that look on and say when something is wrong; they change nothing about a training."""

from neuron_accel.strategies.guards.desync import DesyncGuard
from neuron_accel.strategies.guards.recompile import RecompileGuard, RecompileWarning
from neuron_accel.strategies.guards.replicas import ReplicaCheck

__all__ = ["DesyncGuard", "RecompileGuard", "RecompileWarning", "ReplicaCheck"]
