# SPDX-License-Identifier: Apache-2.0
"""Names of the package neuron-accel-plan; where it is installed, they can be imported from here."""

from __future__ import annotations

from typing import Any

from neuron_accel.doors import moved


def __getattr__(name: str) -> Any:
    return moved(name, __name__, "neuron-accel-plan")
