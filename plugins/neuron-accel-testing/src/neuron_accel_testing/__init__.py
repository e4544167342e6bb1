# SPDX-License-Identifier: Apache-2.0
"""The modules of ``neuron_accel.testing``: import them by that name."""

__version__ = "0.1.0"
