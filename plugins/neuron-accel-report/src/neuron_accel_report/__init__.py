# SPDX-License-Identifier: Apache-2.0
"""Reports each step of a run, in files, in trackers, and on the terminal while it runs; and the pages and traces that
are made of these files, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from neuron_accel_report.records import (
    Collectives,
    End,
    Header,
    Memory,
    Prediction,
    Range,
    RankReport,
    RunReport,
    Step,
    Straggler,
    TrafficRow,
    read_run,
    stragglers,
    traffic_table,
)
from neuron_accel_report.trace import trace

if TYPE_CHECKING:
    from neuron_accel_report.plugin import RunReportPlugin as RunReportPlugin
    from neuron_accel_report.plugin import RunReportWarning as RunReportWarning

__all__ = [
    "Collectives",
    "End",
    "Header",
    "Memory",
    "Prediction",
    "Range",
    "RankReport",
    "RunReport",
    "RunReportPlugin",
    "RunReportWarning",
    "Step",
    "Straggler",
    "TrafficRow",
    "read_run",
    "stragglers",
    "trace",
    "traffic_table",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # the plugin imports torch
    if name not in ("RunReportPlugin", "RunReportWarning"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from neuron_accel_report import plugin

    return getattr(plugin, name)
