"""The kit that every plugin passes."""

from __future__ import annotations

import functools

import ep_models
import pytest
from neuron_accel_expert_parallel import ExpertParallelPlugin

from neuron_accel.testing import PluginConformance


class TestExpertParallel(PluginConformance):
    model = staticmethod(ep_models.mixtral)
    batches = staticmethod(functools.partial(ep_models.batches, size=8))  # two for each of four ranks in a pipeline
    tied_model = staticmethod(ep_models.tied)

    @pytest.fixture
    def plugin(self):
        return ExpertParallelPlugin(expert_parallel_size=2)
