"""``neuron-accel test``, the first command on a Trn1, on an emulated one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from neuron_accel_emulation import emulated_instance

from neuron_accel.cli import smoke
from neuron_accel.cli.smoke_test import RESULT_FILE, RUNGS


def climb_with_and_without_a_fault():
    """The whole ladder, and the step again with another graph on each rank."""
    found = smoke.climb(list(RUNGS))
    smoke.Perceptron = OfTheRank
    return found, smoke.climb(["graph", "objects"])


class OfTheRank(smoke.Perceptron):
    """Every rank has other operations."""

    def forward(self, inputs, targets):
        loss = super().forward(inputs, targets)
        return loss.exp() if os.environ["RANK"] == "0" else loss


@pytest.mark.timeout(300)
def test_the_ladder_is_climbed_to_its_end_with_one_graph_for_all_ranks():
    with emulated_instance("trn1.2xlarge") as machine:
        results = machine.run(climb_with_and_without_a_fault, 2, timeout=280)
        graphs = [[path.read_bytes() for path in machine.graphs(rank)] for rank in range(2)]
    (found, faulty), (other, _) = results
    assert [(one["name"], one["status"]) for one in found] == [(name, "passed") for name in RUNGS]
    assert [one["compilations"] for one in found] == [one["compilations"] for one in other]
    counts = {one["name"]: one["compilations"] for one in found}
    assert sum(counts.values()) <= 40, "each is a run of the compiler on the device"
    assert counts["graph"] == 1
    before = sum(counts[name] for name in list(RUNGS)[: list(RUNGS).index("pp")])  # stages have graphs of their own
    assert graphs[0][:before] == graphs[1][:before]
    assert all(one["compile_seconds"] <= one["seconds"] for one in found)
    assert [(one["name"], one["status"]) for one in faulty] == [("graph", "failed")]
    assert "ranks record different graphs" in faulty[0]["problems"][0]


@pytest.mark.timeout(300)
def test_the_command_passes_on_the_machine(tmp_path):
    """Quick, since the whole ladder is climbed above."""
    with emulated_instance("trn1.2xlarge") as machine:
        command = [sys.executable, "-m", "neuron_accel.cli.main", "test", "--quick"]
        done = subprocess.run(command, env=machine.environ, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / RESULT_FILE).read_text())["device"] == "xla"
