"""Programs exit without hanging, and processes that are not connected to each other raise an error."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TRAIN = """
import sys
import torch
from neuron_accel import NeuronAccelerator

accelerator = NeuronAccelerator(config={"plugins": [name for name in sys.argv[1].split(",") if name]})
net = torch.nn.Linear(4, 4)
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
for _ in range(2):
    accelerator.backward(net(torch.randn(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
if "end" in sys.argv:
    accelerator.end_training()
print(f"rank {accelerator.process_index} of {accelerator.num_processes}: the end", flush=True)
"""

STATE_FIRST = """
from accelerate import PartialState
PartialState()
from neuron_accel import NeuronAccelerator
NeuronAccelerator()
"""


def launch(tmp_path, source, *arguments, cpu_wanted=True):
    script = tmp_path / "script.py"
    script.write_text(source)
    environ = {key: value for key, value in os.environ.items() if key != "ACCELERATE_USE_CPU"}
    if cpu_wanted:
        environ["ACCELERATE_USE_CPU"] = "true"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*launcher, str(script), *arguments], env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [("",), ("zero1",), ("", "end"), ("zero1", "end")], ids=" ".join)
def test_a_program_ends_by_itself(tmp_path, arguments):
    result = launch(tmp_path, TRAIN, *arguments)
    assert result.returncode == 0, result.stderr
    assert all(f"rank {rank} of 2: the end" in result.stdout for rank in range(2))  # lines may run together


def test_nobody_has_to_ask_for_the_cpu(tmp_path):
    result = launch(tmp_path, TRAIN, "", cpu_wanted=False)
    assert result.returncode == 0, result.stderr
    assert all(f"rank {rank} of 2: the end" in result.stdout for rank in range(2))  # lines may run together


def test_a_state_that_was_settled_wrongly_before_is_an_error(tmp_path):
    result = launch(tmp_path, STATE_FIRST, cpu_wanted=False)
    assert result.returncode != 0
    assert "Accelerate's state was created for 1 processes, but there are 2." in result.stderr
