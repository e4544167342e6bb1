"""Skips these tests, with the reason, on machines that cannot emulate a Neuron device; nothing is collected without the
package that emulates it, neuron-accel-emulation."""

from __future__ import annotations

import pytest

from tests.guests import is_installed

if not is_installed("neuron-accel-emulation"):
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    if not is_installed("neuron-accel-emulation"):
        return
    from neuron_accel_emulation.neuron_ranks import missing

    reason = missing()
    if reason:
        for item in items:
            if "tests/neuron/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=reason))
