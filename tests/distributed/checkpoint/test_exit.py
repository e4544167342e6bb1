"""If a program ends while a save is in progress, its exit waits for the save and reports its failure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from neuron_accel.checkpoint.tools.report import verify

SCRIPT = """
import resource, signal, sys, weakref
import torch
from neuron_accel import NeuronAccelerator

def train():
    accelerator = NeuronAccelerator(plugins=[], zero_1=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    if sys.argv[2] == "full" and accelerator.state.process_index == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write fails then, in the middle of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    accelerator.save_state(sys.argv[1], async_save=True)
    return accelerator

accelerator = train()
if sys.argv[2] == "gone":
    gone = weakref.ref(accelerator)
    del accelerator
    assert gone() is None
print("last line", flush=True)
"""


def run(tmp_path, disk):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "neuron_accel.cli.main", "launch", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(tmp_path / "train.py"), str(tmp_path / "c"), disk],
        capture_output=True,
        text=True,
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
    )


def test_a_program_that_simply_ends_waits_for_its_save(tmp_path):
    done = run(tmp_path, "gone")  # its accelerator, too
    assert done.returncode == 0, done.stderr
    assert verify(tmp_path / "c") == []


@pytest.mark.parametrize("disk", ["full"])
def test_a_program_that_simply_ends_reports_that_its_save_failed(tmp_path, disk):
    """On one of two ranks the file system refuses to write."""
    done = run(tmp_path, disk)
    assert done.returncode != 0
    assert "the last checkpoint was not saved" in done.stdout + done.stderr
    assert "File too large" in done.stdout + done.stderr
    assert not (tmp_path / "c" / "manifest.json").exists()
