# SPDX-License-Identifier: Apache-2.0
"""What a training run needs, counted without hardware: one rank of any number of ranks runs dry."""

from neuron_accel.planning.entry import plan
from neuron_accel.planning.layout import LayoutCount

__all__ = ["LayoutCount", "plan"]
