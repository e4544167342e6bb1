# SPDX-License-Identifier: Apache-2.0
"""What a run does, step by step: written to files, handed to trackers, and shown while it runs."""

from neuron_accel.strategies.run_report.plugin import RunReportPlugin, RunReportWarning

__all__ = ["RunReportPlugin", "RunReportWarning"]
