"""The built-in plugins pass the conformance kit."""

from __future__ import annotations

from typing import ClassVar

import pytest

from neuron_accel import (
    ActivationCheckpointingPlugin,
    ChunkedLossPlugin,
    DataParallelPlugin,
    FlashAttentionPlugin,
    FullyShardedPlugin,
    ModelParallelismPlugin,
    PipelineParallelPlugin,
    SequenceParallelPlugin,
    TensorParallelPlugin,
    Zero1Plugin,
)
from neuron_accel.testing import PluginConformance


class TestDataParallel(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return DataParallelPlugin(bucket_cap_mb=0.01)

    conflicts: ClassVar = {"zero1": "has nothing left to own", "tp2-zero1": "has nothing left to own"}


class TestZero1(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return Zero1Plugin(bucket_cap_mb=0.01)


class TestFullySharded(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return FullyShardedPlugin()

    conflicts: ClassVar = {
        "zero1": "claim",
        "tp2-zero1": "claim",
    }


class TestFullyShardedStage2(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return FullyShardedPlugin(reshard_after_forward=False, partition="parameters")

    conflicts: ClassVar = {**TestFullySharded.conflicts, "xla": "different graphs"}


class TestTensorParallel(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return TensorParallelPlugin(tensor_parallel_size=2)


class TestPipeline(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2)

    opt_out: ClassVar = {"[xla]": "pipelines send from rank to rank, which XLA devices do not"}


class TestModelParallelism(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return ModelParallelismPlugin(tensor_parallel_size=2)

    opt_out: ClassVar = {
        "test_keeps_the_form_of_the_contract": "its size is given by position, too, as in optimum-neuron"
    }


class TestActivationCheckpointing(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return ActivationCheckpointingPlugin()


class TestFlashAttention(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return FlashAttentionPlugin(block_size=3)


class TestChunkedLoss(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return ChunkedLossPlugin(chunks=3)


class TestSequenceParallel(PluginConformance):
    beside = (TensorParallelPlugin(tensor_parallel_size=2),)

    @pytest.fixture
    def plugin(self):
        return SequenceParallelPlugin()


class TestSequenceParallelOverlapping(TestSequenceParallel):
    @pytest.fixture
    def plugin(self):
        return SequenceParallelPlugin(overlap_gather=True)

    conflicts: ClassVar = {"xla": "cannot be gathered while the layer computes"}


class TestSequenceParallelKeeping(TestSequenceParallel):
    @pytest.fixture
    def plugin(self):
        return SequenceParallelPlugin(regather=False)
