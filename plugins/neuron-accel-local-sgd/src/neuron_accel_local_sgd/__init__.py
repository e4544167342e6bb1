# SPDX-License-Identifier: Apache-2.0
"""Local SGD and DiLoCo: islands of ranks train independently and synchronise periodically."""

from __future__ import annotations

from neuron_accel_local_sgd.plugin import LocalSGDPlugin, synchronize

__all__ = ["LocalSGDPlugin", "synchronize"]
