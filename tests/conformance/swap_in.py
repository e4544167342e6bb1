"""A plugin of pytest: what is collected after it finds ``NeuronAccelerator`` in the place of ``Accelerator``."""

from __future__ import annotations

import os

from swapped import PLUGINS, SwappedAccelerator  # isort: skip  # before accelerate: it settles the backend
import accelerate

os.environ.setdefault(PLUGINS, "")
accelerate.Accelerator = accelerate.accelerator.Accelerator = SwappedAccelerator
