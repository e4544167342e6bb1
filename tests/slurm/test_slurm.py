"""Batch files that ``neuron-accel launch --slurm`` writes, run by Slurm: machines meet, exit codes arrive, and a job
that loses a machine or is preempted goes on with the losses of one that was not interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)

STEPS = 12
SCRIPT = """
import json, os, pathlib, sys, time
import torch
from accelerate.utils import ProjectConfiguration
from neuron_accel import NeuronAccelerator

folder, stop = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1], "stop")
project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
accelerator = NeuronAccelerator(project_config=project, config={"plugins": ["zero1"]})
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.randn(8 * %(steps)d, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.load_state(resume="latest", keep_batch=True)
interruption = accelerator.watch_for_interruption()
for batch in loader:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    loss = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.save_state()
    if accelerator.is_main_process:
        with (folder / "losses").open("a") as file:
            print(json.dumps([accelerator.save_iteration - 1, loss]), file=file, flush=True)
    if interruption.requested():
        break
    if accelerator.save_iteration == %(steps)d // 2:  # here others interrupt the first start
        while not stop.exists():
            time.sleep(0.05)
            if interruption.requested():
                accelerator.end_training()
                sys.exit(143)
if interruption.requested():
    accelerator.end_training()
    sys.exit(143)
accelerator.end_training()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT % {"steps": STEPS})
    return path


def batch_file(script: Path, *options: str, arguments: tuple[str, ...] = ()) -> Path:
    """The file that the command writes, for two machines with a rank each."""
    path = script.with_name("train.sbatch")
    command = [sys.executable, "-m", "neuron_accel.cli.main", "launch", "--nnodes", "2", "--cpu", "--grace", "20"]
    words = [*command, *options, "--slurm", str(path), str(script), *arguments]
    subprocess.run(words, check=True, capture_output=True, timeout=60, env=os.environ)
    # The tests run this interpreter's command, wherever the shell of a job looks first.
    folder = Path(sys.executable).parent
    line = "set -euo pipefail\n"
    path.write_text(path.read_text().replace(line, f'{line}export PATH="{folder}:$PATH"\n', 1))
    return path


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step; a step that was done twice must have the same loss twice."""
    found: dict[int, float] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = json.loads(line)
        assert abs(found.setdefault(step, loss) - loss) < 1e-6
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cluster):
    folder = tmp_path_factory.mktemp("whole")
    path = folder / "train.py"
    path.write_text(SCRIPT % {"steps": STEPS})
    (folder / "stop").touch()
    number = cluster.submit(str(batch_file(path, arguments=(str(folder),))), cwd=folder)
    job = cluster.end(number)
    output = Path(job["StdOut"]).read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert "2 ranks of" in output
    found = losses(folder)
    assert sorted(found) == list(range(STEPS))
    return found


def test_two_machines_train(uninterrupted):
    half = STEPS // 2
    assert sum(uninterrupted[step] for step in range(half, STEPS)) < sum(uninterrupted[step] for step in range(half))


def test_a_job_array_has_ports_of_its_own(cluster, script, tmp_path):
    (tmp_path / "stop").touch()
    path = batch_file(script, arguments=(str(tmp_path / "task$SLURM_ARRAY_TASK_ID"),))
    text = path.read_text().replace(f"'{tmp_path}/task$SLURM_ARRAY_TASK_ID'", f'"{tmp_path}/task$SLURM_ARRAY_TASK_ID"')
    path.write_text(text)
    for task in (0, 1):
        (tmp_path / f"task{task}").mkdir()
        (tmp_path / f"task{task}" / "stop").touch()
    number = cluster.submit("--array=0-1", "--oversubscribe", str(path), cwd=tmp_path)
    jobs = [cluster.end(f"{number}_{task}") for task in (0, 1)]
    assert [job["ExitCode"] for job in jobs] == ["0:0", "0:0"], [Path(job["StdOut"]).read_text() for job in jobs]
    assert losses(tmp_path / "task0") == losses(tmp_path / "task1")


def test_the_exit_code_of_a_rank_is_that_of_the_job(cluster, tmp_path):
    """And a job that fails by itself is not queued again."""
    script = tmp_path / "fails.py"
    script.write_text("import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)\n")
    job = cluster.end(cluster.submit(str(batch_file(script, "--requeue")), cwd=tmp_path))
    output = Path(job["StdOut"]).read_text()
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "7:0", "0"), output
    assert "rank 1" in output


def test_a_preempted_job_saves_and_goes_on(cluster, script, tmp_path, uninterrupted):
    """SIGTERM to the steps of the job, as before its time limit."""
    number = cluster.submit(str(batch_file(script, "--requeue", arguments=(str(tmp_path),))), cwd=tmp_path)
    cluster.wait(lambda: (tmp_path / "losses").exists() and len(losses(tmp_path)) >= STEPS // 2, "first half")
    cluster.run("scancel", "--signal=TERM", number)
    (tmp_path / "stop").touch()
    cluster.start_at_once(number)
    job = cluster.end(number)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), Path(job["StdOut"]).read_text()
    assert losses(tmp_path) == pytest.approx(uninterrupted, abs=1e-6)


def test_a_job_that_loses_a_machine_goes_on_with_another(cluster, script, tmp_path, uninterrupted):
    number = cluster.submit(str(batch_file(script, "--requeue", arguments=(str(tmp_path),))), cwd=tmp_path)
    cluster.wait(lambda: (tmp_path / "losses").exists() and len(losses(tmp_path)) >= STEPS // 2, "first half")
    lost = cluster.run("scontrol", "show", "hostnames", cluster.job(number)["NodeList"]).split()[1]
    cluster.run("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=test")
    try:
        (tmp_path / "stop").touch()
        cluster.start_at_once(number)
        job = cluster.end(number)
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), Path(job["StdOut"]).read_text()
        assert lost not in cluster.run("scontrol", "show", "hostnames", job["NodeList"]).split()
        assert losses(tmp_path) == pytest.approx(uninterrupted, abs=1e-6)
    finally:
        cluster.run("scontrol", "update", f"NodeName={lost}", "State=RESUME")
