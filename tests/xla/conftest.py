"""Nothing here is collected where torch_xla cannot be imported, but the reason is shown."""

from __future__ import annotations

import pytest

from neuron_accel.backends.select import Machine


def pytest_collection_modifyitems(items):
    if not Machine().torch_xla:
        for item in items:
            if "tests/xla/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="torch_xla is not installed: nox -s xla"))
