# SPDX-License-Identifier: Apache-2.0
"""Activations sharded along the sequence between tensor-parallel regions."""

from neuron_accel.strategies.sequence_parallel.plugin import SequenceParallelPlugin

__all__ = ["SequenceParallelPlugin"]
