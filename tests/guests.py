"""Plugins of packages under ``plugins/`` that tests of the core compose with, where they are installed."""

from __future__ import annotations

import importlib.util
from typing import Any


def guards(*plugins: Any) -> list[Any]:
    """The guards, or none: a composition is then tested without them."""
    return [*plugins] if importlib.util.find_spec("neuron_accel_guards") else []
