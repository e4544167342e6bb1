# SPDX-License-Identifier: Apache-2.0
"""Lazy loading: models are built without memory for their weights, and each rank then loads only its shards.

A model is built inside :func:`lazy_load_for_parallelism`. Preparing it, or :func:`materialize`, loads the weights.
"""

from __future__ import annotations

from neuron_accel.lazy.context import lazy_load_for_parallelism
from neuron_accel.lazy.filling import Filled, Origin, materialize

__all__ = ["Filled", "Origin", "lazy_load_for_parallelism", "materialize"]
