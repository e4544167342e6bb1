"""Commands for Trainium on an emulated instance: compiling ahead of time, launching, resuming."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from neuron_accel_emulation import emulated_instance

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2_xl_zero1" / "train.py"
NEURON_ACCEL = [sys.executable, "-m", "neuron_accel.cli.main"]


def run(machine, *words, **environ):
    """Runs the command line on the machine and returns what it printed."""
    found = subprocess.run(
        [*NEURON_ACCEL, *map(str, words)],
        env={**machine.environ, **environ},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-6000:]
    return found.stdout + found.stderr


def example(script, *options):
    """Runs it as Python does."""
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.timeout(600)
def test_gpt2_xl_is_compiled_ahead_launched_and_resumed(tmp_path):
    """The example, tiny, whose blocks are recomputed in the backward pass."""
    with emulated_instance("trn1.2xlarge") as machine:
        script = [EXAMPLE, "--scale=tiny", "--precision=MIXED", "--batch_size=2", f"--output_dir={tmp_path / 'out'}"]
        launch = ["launch", "--nproc-per-node", "2"]
        said = run(machine, "precompile", "--max-steps", 3, "--", *NEURON_ACCEL, *launch, *script, "--max_steps=3")
        assert "Compilation summary" in said
        collected = {c.module for c in machine.compilations if c.outcome == "collected"}
        assert collected
        assert [path.read_bytes() for path in machine.graphs(0)] == [path.read_bytes() for path in machine.graphs(1)]
        assert any(b"opt-barrier" in path.read_bytes() for path in machine.graphs(0)), "activations are recomputed"

        said = run(machine, *launch, *script, "--max_steps=3")
        assert "NEURON_RT_EXEC_TIMEOUT=600" in said, "what the launcher sets on Trainium"
        assert all(c.module in collected for c in machine.compilations)
        # as the launcher would, from processes that have imported torch_xla already, which takes most of a launch
        machine.run(example, 2, *map(str, script), "--max_steps=5", "--resume", timeout=150)
        assert all(c.module in collected for c in machine.compilations)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 5], "those of the resumed run"
    assert all(5 < line["loss"] < 9 for line in lines), "the logarithm of the vocabulary's size is 6.9"
    assert (tmp_path / "out" / "model" / "model.safetensors").exists()


LOOP = """
import sys, time
import torch
from neuron_accel import NeuronAccelerator
accelerator = NeuronAccelerator()
total = accelerator.reduce(torch.full((2,), 1.0).to(accelerator.device)).cpu()
print("sum", total.tolist(), flush=True)
accelerator.end_training()
"""


@pytest.mark.timeout(300)
def test_two_jobs_share_an_instance(tmp_path):
    """Two jobs use different cores, and different ports for their ranks."""
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    with emulated_instance("trn1.32xlarge") as machine:
        jobs = [
            subprocess.Popen(
                [*NEURON_ACCEL, "launch", "--nproc-per-node", "2", "--quiet", str(script)],
                env={**machine.environ, "NEURON_RT_VISIBLE_CORES": cores},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for cores in ("0-1", "2-3")
        ]
        for job in jobs:
            said = job.communicate()[0]
            assert job.returncode == 0, said[-6000:]
            assert "sum [2.0, 2.0]" in said
