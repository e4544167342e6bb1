"""Where torch_xla is installed Accelerate chooses it, unless this package is imported before."""

from __future__ import annotations

import os

os.environ.setdefault("ACCELERATE_USE_CPU", "true")

from neuron_accel import NeuronAccelerator

assert NeuronAccelerator
