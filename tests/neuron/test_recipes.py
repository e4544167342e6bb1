"""Recipes for trn1 with tiny models: compiled ahead of time, and then trained with the graphs that were compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from neuron_accel_emulation import emulated_instance

from tests.guests import is_installed
from tests.neuron.test_launch import NEURON_ACCEL, run

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", ["pretrain", "lora"])
def test_a_recipe_is_compiled_ahead_and_trained(task, tmp_path):
    if task == "lora" and not is_installed("neuron-accel-lora"):
        pytest.skip("neuron-accel-lora is not installed")
    recipe = FOLDER / "gemma-3-1b" / f"{task}-trn1.32xlarge.yaml"
    command = ["launch", "--nproc-per-node", "2", FOLDER / "train.py", recipe, "--tiny", f"--output={tmp_path}"]
    with emulated_instance("trn1.2xlarge") as machine:
        said = run(machine, "precompile", "--max-steps", 4, "--", *NEURON_ACCEL, *command)
        assert "Compilation summary" in said
        collected = {c.module for c in machine.compilations if c.outcome == "collected"}
        assert collected
        assert not (tmp_path / "result.json").exists(), "nothing is trained while graphs are collected"
        run(machine, *command)
        assert all(c.module in collected for c in machine.compilations)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 6
    assert result["losses"][-1] < result["losses"][0]
