"""The kit that every plugin passes."""

from __future__ import annotations

import pytest
from neuron_accel_context_parallel import ContextParallelPlugin

from neuron_accel.testing import PluginConformance


class TestContextParallel(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return ContextParallelPlugin(context_parallel_size=2)
