# SPDX-License-Identifier: Apache-2.0
"""Reads checkpoints of other libraries, so that ``neuron-accel consolidate`` writes them as folders of transformers."""

from __future__ import annotations

__version__ = "0.1.0"
