"""A rank is killed, the launcher restarts the job, and training resumes without intervention."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, pathlib, signal, sys
import torch
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from neuron_accel import NeuronAccelerator

folder, plugins, die_at, epochs = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
accelerator = NeuronAccelerator(config={"plugins": plugins}, project_config=project)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
loader = DataLoader(data, batch_size=12 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
resumed = bool(accelerator.load_state(resume="latest"))
losses = []
while loader.iteration < epochs:
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        number = accelerator.save_iteration
        if number == die_at and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.save_state(async_save=True)
if accelerator.is_main_process:
    weights = torch.cat([p.flatten() for p in model.parameters()]).tolist()
    (folder / "result.json").write_text(json.dumps({"losses": losses, "resumed": resumed, "weights": weights}))
accelerator.end_training()
"""


def launch(tmp_path, folder, ranks, *, die_at=-1, epochs, plugins=("zero1",)):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "neuron_accel.cli.main", "launch", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", "1", str(tmp_path / "train.py"), str(tmp_path / folder)]
    (tmp_path / folder).mkdir(exist_ok=True)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, json.dumps(list(plugins)), str(die_at), str(epochs)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / folder / "result.json").read_text())


@pytest.mark.slow  # tests/distributed/launch/test_restarts.py restarts ranks too
def test_a_killed_rank_brings_the_job_back_and_fewer_ranks_go_on(tmp_path):
    whole = launch(tmp_path, "whole", 2, epochs=4)
    assert (len(whole["losses"]), whole["resumed"]) == (8, False)
    broken = launch(tmp_path, "broken", 2, die_at=3, epochs=2)
    assert broken["resumed"]
    assert whole["losses"][:4][-len(broken["losses"]) :] == broken["losses"]
    fewer = launch(tmp_path, "broken", 1, epochs=4, plugins=())
    assert fewer["resumed"]
    assert len(fewer["losses"]) == 4
    # Order and position are the same; sums over ranks are rounded differently.
    assert max(abs(a - b) for a, b in zip(whole["losses"][4:], fewer["losses"], strict=True)) < 1e-5
    assert max(abs(a - b) for a, b in zip(whole["weights"], fewer["weights"], strict=True)) < 1e-4
