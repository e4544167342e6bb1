"""The built-in plugins keep the contract on CUDA ranks."""

from __future__ import annotations

from typing import ClassVar

import pytest

from neuron_accel import (
    DataParallelPlugin,
    FullyShardedPlugin,
    PipelineParallelPlugin,
    TensorParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.testing import PluginConformance
from tests.native.test_conformance import HERE


class TestDataParallel(PluginConformance):
    """Beside it: tensor and sequence parallelism, pipelines, activation checkpointing and guards."""

    backends = ("cuda",)
    opt_out = HERE
    conflicts: ClassVar = {"zero1": "has nothing left to own", "tp2-zero1": "has nothing left to own"}

    @pytest.fixture
    def plugin(self):
        return DataParallelPlugin(bucket_cap_mb=0.01)


class TestZero1(PluginConformance):
    backends = ("cuda",)
    opt_out = HERE

    @pytest.fixture
    def plugin(self):
        return Zero1Plugin(bucket_cap_mb=0.01)


class TestTensorParallel(PluginConformance):
    backends = ("cuda",)
    opt_out = HERE

    @pytest.fixture
    def plugin(self):
        return TensorParallelPlugin(tensor_parallel_size=2)


class TestPipeline(PluginConformance):
    backends = ("cuda",)
    opt_out = HERE

    @pytest.fixture
    def plugin(self):
        return PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2)


class TestFullySharded(PluginConformance):
    """Beside it: tensor and sequence parallelism, pipelines and activation checkpointing."""

    backends = ("cuda",)
    opt_out = HERE
    conflicts: ClassVar = {"zero1": "claim", "tp2-zero1": "claim"}

    @pytest.fixture
    def plugin(self):
        return FullyShardedPlugin()
