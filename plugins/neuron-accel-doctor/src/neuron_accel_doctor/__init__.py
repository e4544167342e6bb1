# SPDX-License-Identifier: Apache-2.0
"""``neuron-accel doctor``: what a machine lacks to train on Trainium."""

from neuron_accel_doctor.checks import Check, examine
from neuron_accel_doctor.machine import Machine, look

__all__ = ["Check", "Machine", "examine", "look"]
__version__ = "0.1.0"
