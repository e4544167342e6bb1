"""ZeRO stage 1: the optimizer's state is divided over data-parallel ranks."""

from neuron_accel.strategies.zero1.plugin import Zero1Plugin

__all__ = ["Zero1Plugin"]
