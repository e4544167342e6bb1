"""``NeuronAccelerator`` with the plugins that an environment variable names; a class that other modules can import, so
that scripts can pickle what they make of it."""

from __future__ import annotations

import os
from typing import Any

from neuron_accel import NeuronAccelerator

PLUGINS = "CONFORMANCE_PLUGINS"


class SwappedAccelerator(NeuronAccelerator):
    """Replaces ``accelerate.Accelerator``."""

    def __init__(self, **options: Any) -> None:
        names = [name for name in os.environ[PLUGINS].split(",") if name]
        super().__init__(**{"config": {"plugins": names}, **options})
