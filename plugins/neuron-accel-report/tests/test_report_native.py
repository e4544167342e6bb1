"""A report of a run on the native Neuron device's stand-in: values are read a step later."""

from __future__ import annotations

import pytest
from neuron_accel_report.records import read_run
from test_report_runs import train

from neuron_accel.testing import run_ranks


def test_losses_and_norms_are_those_of_the_loop(tmp_path):
    pytest.importorskip("neuron_accel_emulation")
    results = run_ranks(train, 2, ["zero1"], options={"folder": str(tmp_path)}, batches=4, backend="native")
    for each, result in zip(read_run(tmp_path).ranks, results, strict=True):
        assert each.header.device == "neuron"
        assert [step.loss for step in each.steps] == pytest.approx(result["losses"])
        assert [step.grad_norm for step in each.steps] == pytest.approx(result["norms"])
        assert all(sum(step.parts.values()) == pytest.approx(step.seconds, abs=1e-9) for step in each.steps)
        assert each.end is not None
