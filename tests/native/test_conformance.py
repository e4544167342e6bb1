"""The built-in plugins keep the contract on a stand-in for the native Neuron device."""

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

_OF_THE_PLUGIN_ITSELF = "this has nothing to do with ranks; tests/conformance_kit checks it"
HERE: dict[str, str] = dict.fromkeys(
    (
        "test_is_found_by_name",
        "test_keeps_the_form_of_the_contract",
        "test_configuration_round_trip",
        "test_configuration_is_strict",
        "test_plan_is_pure",
        "test_plan_is_independent_of_order",
    ),
    _OF_THE_PLUGIN_ITSELF,
)


class TestDataParallel(PluginConformance):
    """Beside it: tensor and sequence parallelism, pipelines, activation checkpointing and guards."""

    backends = ("native-p2p",)
    opt_out = HERE
    conflicts: ClassVar = {"zero1": "has nothing left to own", "tp2-zero1": "has nothing left to own"}

    @pytest.fixture
    def plugin(self):
        return DataParallelPlugin(bucket_cap_mb=0.01)


class TestZero1(PluginConformance):
    backends = ("native-p2p",)
    opt_out = HERE

    @pytest.fixture
    def plugin(self):
        return Zero1Plugin(bucket_cap_mb=0.01)


class TestTensorParallel(PluginConformance):
    backends = ("native",)
    opt_out = HERE

    @pytest.fixture
    def plugin(self):
        return TensorParallelPlugin(tensor_parallel_size=2)


class TestPipeline(PluginConformance):
    backends = ("native-p2p",)
    opt_out = HERE

    @pytest.fixture
    def plugin(self):
        return PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2)


class TestFullySharded(PluginConformance):
    """Beside it: tensor and sequence parallelism, pipelines and activation checkpointing."""

    backends = ("native-p2p",)
    opt_out: ClassVar = {
        **HERE,
        "test_leaves_nothing_behind": _OF_THE_PLUGIN_ITSELF,
        "test_exits_cleanly": _OF_THE_PLUGIN_ITSELF,
    }
    conflicts: ClassVar = {"zero1": "claim", "tp2-zero1": "claim"}

    @pytest.fixture
    def plugin(self):
        return FullyShardedPlugin()
