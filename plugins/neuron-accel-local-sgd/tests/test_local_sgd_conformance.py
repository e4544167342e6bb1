"""The kit that every plugin passes, with DiLoCo in one process as reference."""

from __future__ import annotations

import pytest
import torch
from local_sgd_support import NESTEROV, Batch, train_islands
from neuron_accel_local_sgd import LocalSGDPlugin

from neuron_accel.testing import PluginConformance


class TestDiLoCo(PluginConformance):
    steps = 5  # two rounds, and a checkpoint between two outer steps
    train_reference = staticmethod(train_islands)

    @staticmethod
    def batches(count: int) -> list[Batch]:
        """Eight samples each: two for every rank of the largest composition, a pipeline in each of two islands."""
        generator = torch.Generator().manual_seed(7)
        tokens = [torch.randint(96, (8, 16), generator=generator) for _ in range(count)]
        return [{"input_ids": ids, "labels": ids.clone()} for ids in tokens]

    @pytest.fixture
    def plugin(self) -> LocalSGDPlugin:
        return LocalSGDPlugin(islands=2, inner_steps=2, outer_options=NESTEROV)
