# SPDX-License-Identifier: Apache-2.0
"""What a training run needs, counted without hardware by a dry run of one rank of any number of ranks."""

from neuron_accel.planning.entry import plan
from neuron_accel.planning.layout import LayoutCount

__all__ = ["LayoutCount", "plan"]
