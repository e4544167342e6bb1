# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for neuron_accel: sequences sharded over ranks, with exact attention."""

from __future__ import annotations

from neuron_accel_context_parallel.plugin import ContextParallelPlugin

__all__ = ["ContextParallelPlugin"]
