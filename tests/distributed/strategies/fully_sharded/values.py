"""Whether parameters have values."""

from __future__ import annotations

from neuron_accel.errors import UsageError


def has_values(parameter):
    try:
        parameter.sum()
    except UsageError:
        return False
    return True
