"""Nothing here runs where torch is too old for a device that is made in Python, but the reason is shown; nothing is
collected without the package that has this device, neuron-accel-emulation.

Every test here runs on the stand-in for the native Neuron device, and is marked so (``pytest -m native``).
"""

from __future__ import annotations

import pytest
from torch.utils import backend_registration

from tests.guests import is_installed

if not is_installed("neuron-accel-emulation"):
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items):
    old = not hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    for item in items:
        if "tests/native/" in item.path.as_posix():
            item.add_marker(pytest.mark.native)
            if old:
                item.add_marker(pytest.mark.skip(reason="this torch has no devices made in Python: use 2.13 or newer"))
