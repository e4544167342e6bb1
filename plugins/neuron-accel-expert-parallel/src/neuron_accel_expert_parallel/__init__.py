# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism for neuron_accel: mixtures of experts over ranks that have other samples and other experts."""

from __future__ import annotations

from neuron_accel_expert_parallel.load import ExpertLoad, expert_load
from neuron_accel_expert_parallel.plugin import ExpertParallelPlugin

__all__ = ["ExpertLoad", "ExpertParallelPlugin", "expert_load"]
