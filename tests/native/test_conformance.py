"""The built-in plugins keep the contract on a stand-in for the native Neuron device."""

from __future__ import annotations

from typing import ClassVar

import pytest

from neuron_accel import DataParallelPlugin, PipelineParallelPlugin, TensorParallelPlugin, Zero1Plugin
from neuron_accel.errors import PlanError
from neuron_accel.testing import PluginConformance, RanksError, run_ranks

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


def plans_fully_sharded():
    from neuron_accel import NeuronAccelerator

    NeuronAccelerator(config={"plugins": ["fully_sharded"]})


def test_fully_sharded_parameters_are_refused():
    with pytest.raises(RanksError) as raised:
        run_ranks(plans_fully_sharded, 2, backend="native")
    assert all(isinstance(error, PlanError) for error in raised.value.errors.values())
    assert "cannot be resized" in str(raised.value)
