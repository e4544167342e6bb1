"""The plugin keeps the contract: alone, and beside every built-in strategy."""

from __future__ import annotations

import pytest
from neuron_accel_report import RunReportPlugin

from neuron_accel.testing import PluginConformance


class TestRunReport(PluginConformance):
    @pytest.fixture
    def plugin(self, tmp_path):
        return RunReportPlugin(folder=tmp_path / "report", show="nothing", trace_steps=(0, 1), compare_every=1)
