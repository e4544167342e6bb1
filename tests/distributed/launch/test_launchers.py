"""A training has the same results under ``torchrun``, ``accelerate launch`` and ``neuron-accel launch``."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest

from neuron_accel.testing import run_ranks

TRAINING = """
import json, os, sys, torch
from neuron_accel import NeuronAccelerator
accelerator = NeuronAccelerator(zero_1=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
losses = []
for x, y in loader:
    loss = (model(x) - y).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())
with open(os.path.join(sys.argv[1], f"{accelerator.state.process_index}.json"), "w") as file:
    json.dump([accelerator.world_size, accelerator.device.type, losses], file)
accelerator.end_training()
"""

ACCELERATE = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate": ["accelerate.commands.launch", *ACCELERATE, "--dynamo_backend", "no", "--main_process_port", "0"],
}


def as_a_rank(script, folder):
    sys.argv = [script, folder]
    runpy.run_path(script, run_name="__main__")


def run(launcher, training, folder):
    """What each rank reports. The CPU is asked for by Accelerate's variable, which every launcher passes on."""
    ours = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_", "TORCHELASTIC", "GROUP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", *LAUNCHERS[launcher], str(training), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_does_not_matter_who_starts_the_ranks(launcher, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    found = run(launcher, script, tmp_path)
    run_ranks(as_a_rank, 2, str(script), str(tmp_path))
    assert found == [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [world for world, _, _ in found] == [2, 2]
    assert {device for _, device, _ in found} == {"cpu"}
