"""Nothing here is run without a GPU, but the reason is shown."""

from __future__ import annotations

import pytest

from neuron_accel.testing import cuda_ranks


def pytest_collection_modifyitems(items):
    lacks = cuda_ranks.missing()
    for item in items:
        if lacks is not None and "tests/cuda/" in item.path.as_posix():
            item.add_marker(pytest.mark.skip(reason=f"no CUDA ranks: {lacks}"))
