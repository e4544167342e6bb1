# SPDX-License-Identifier: Apache-2.0
"""Data parallelism, the default."""

from neuron_accel.strategies.data_parallel.plugin import DataParallelPlugin

__all__ = ["DataParallelPlugin"]
