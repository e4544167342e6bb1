# SPDX-License-Identifier: Apache-2.0
"""Families of models as data: their blocks, how each projection is sharded, where they can be cut."""

from neuron_accel.models.architecture import Architecture, join_fqn, model_without_weights
from neuron_accel.models.attention import BlockwiseAttention
from neuron_accel.models.plan import Style, matches_fqn
from neuron_accel.models.resize import install_resize
from neuron_accel.models.stages import Stack

__all__ = [
    "Architecture",
    "BlockwiseAttention",
    "Stack",
    "Style",
    "install_resize",
    "join_fqn",
    "matches_fqn",
    "model_without_weights",
]
