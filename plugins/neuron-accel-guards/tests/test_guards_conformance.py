"""Each guard keeps the contract: alone, beside every built-in strategy, and beside the other guards."""

from __future__ import annotations

import pytest
from neuron_accel_guards import DesyncGuard, FiniteGuard, RecompileGuard, ReplicaCheck, SumCheck

from neuron_accel.testing import PluginConformance


class TestDesyncGuard(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return DesyncGuard(timeout_s=30.0)


class TestRecompileGuard(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return RecompileGuard(action="raise")


class TestReplicaCheck(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return ReplicaCheck(every=1)


class TestSumCheck(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return SumCheck()


class TestFiniteGuard(PluginConformance):
    @pytest.fixture
    def plugin(self):
        return FiniteGuard()
