"""Models that are built without memory for their weights, and get what each rank needs of them when it is known.

:func:`lazy_load_for_parallelism` is the context in which such a model is built; preparing the model, or
:func:`materialize`, fills it.
"""

from __future__ import annotations

from neuron_accel.lazy.context import lazy_load_for_parallelism
from neuron_accel.lazy.filling import Filled, Origin, materialize

__all__ = ["Filled", "Origin", "lazy_load_for_parallelism", "materialize"]
