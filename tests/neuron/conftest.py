"""Skips these tests, with the reason, on machines that cannot emulate a Neuron device."""

from __future__ import annotations

import pytest

from neuron_accel.testing.neuron_ranks import missing


def pytest_collection_modifyitems(items):
    reason = missing()
    if reason:
        for item in items:
            if "tests/neuron/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
