# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallelism under the name that optimum-neuron uses."""

from neuron_accel.strategies.model_parallelism.plugin import ModelParallelismPlugin

__all__ = ["ModelParallelismPlugin"]
