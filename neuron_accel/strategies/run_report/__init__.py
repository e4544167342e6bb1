# SPDX-License-Identifier: Apache-2.0
"""Reports each step of a run: in files, in trackers, and on the terminal while it runs."""

from neuron_accel.strategies.run_report.plugin import RunReportPlugin, RunReportWarning

__all__ = ["RunReportPlugin", "RunReportWarning"]
