"""The tests train on the CPU also where torch_xla is installed, which Accelerate would choose when peft imports it."""

from __future__ import annotations

import os

from neuron_accel.backends.select import settle

os.environ.setdefault("ACCELERATE_USE_CPU", "true")
settle(os.environ)
