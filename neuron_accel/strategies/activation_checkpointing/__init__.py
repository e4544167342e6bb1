# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: activations are computed again in the backward pass instead of kept for it."""

from neuron_accel.strategies.activation_checkpointing.plugin import ActivationCheckpointingPlugin

__all__ = ["ActivationCheckpointingPlugin"]
