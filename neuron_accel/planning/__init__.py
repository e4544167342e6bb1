"""What a training run needs, counted without hardware: one rank of any number of ranks runs dry."""

from neuron_accel.planning.layout import LayoutCount, plan

__all__ = ["LayoutCount", "plan"]
