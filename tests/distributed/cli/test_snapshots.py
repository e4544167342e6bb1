"""``save_state(in_memory=True)``: ranks are killed, and the next ones continue from memory."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from neuron_accel.cli.run_secret import VARIABLE
from tests.distributed.cli.test_restarts import uninterrupted

SCRIPT = """
import json, os, pathlib, resource, signal, sys
import torch
from accelerate.utils import ProjectConfiguration
from neuron_accel import NeuronAccelerator

folder, fault, every = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
first = attempt == "0"
project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
accelerator = NeuronAccelerator(project_config=project, config={"plugins": ["zero1"]})
rank = accelerator.state.process_index
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
memory = pathlib.Path(os.environ.get("NEURON_ACCEL_SNAPSHOTS", "/nonexistent"))
if not first and fault in ("damaged", "incomplete") and rank == 0:
    for path in memory.glob("snapshot_*/optimizer/*"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.unlink() if fault == "incomplete" else path.write_bytes(content)
accelerator.wait_for_everyone()
accelerator.load_state(resume="latest")


def kill_in_this_save():
    events = []

    def receive(event, arguments):
        if event.startswith("neuron_accel.save."):
            events.append(event)
            if len(events) == 9:  # it writes
                (folder / "killed_at").write_text(event)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(receive)


steps = 0
while loader.iteration < 2:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        steps += 1
        if attempt == "1" and fault == "twice" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if first and steps == 8 and rank == 1 and fault == "midway":
            kill_in_this_save()
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if first and steps == 8 and rank == 1 and fault == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        if first and steps == 9:
            if fault == "hangs":
                (folder / "here").touch()
                signal.pause()
            if rank == 1 and fault == "lost":
                os.kill(os.getppid(), signal.SIGKILL)  # the launcher, with which its machine is lost
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if steps % 5 == 0:
            accelerator.save_state()
        elif steps % every == 0:
            accelerator.save_state(in_memory=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
if accelerator.is_main_process:
    sizes = sum(path.stat().st_size for path in memory.rglob("*") if path.is_file()) if memory.is_dir() else 0
    done = {"ranks": accelerator.world_size, "steps": steps, "rate": scheduler.get_last_lr(), "memory": str(memory)}
    done |= {"bytes": sizes, "next": accelerator.save_iteration}
    done["weights"] = torch.cat([p.flatten() for p in model.parameters()]).tolist()
    (folder / "result.json").write_text(json.dumps(done))
accelerator.end_training()
"""
ONE_MACHINE = ["--nproc-per-node", "2", "--max-restarts", "2", "--cpu", "--quiet"]
STEPS = 12  # two epochs of 12 batches of 4 on 2 ranks


def result_of(tmp_path):
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(2)
    assert result["rate"] == [pytest.approx(rate)]
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)
    assert not Path(result["memory"]).exists()
    return result


def test_restarted_ranks_lose_the_steps_since_the_last_snapshot(start, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, err = start(*ONE_MACHINE, str(tmp_path / "train.py"), str(tmp_path), "killed", "2").finish(timeout=100)
    assert code == 0, err
    assert re.search(r"resumed from \S+/snapshot_\d, saved .* by 2 ranks: epoch 1, after 16 samples; from memory", err)
    result = result_of(tmp_path)
    assert result["steps"] == STEPS - 8  # killed in step 9, after the snapshot of step 8 and the checkpoint of step 5
    assert result["next"] == 1  # step 5 is the only checkpoint


@pytest.mark.parametrize("fault", ["midway", "full"])
def test_a_snapshot_that_is_not_completed_leaves_the_one_before_it(start, tmp_path, fault):
    """Rank 1 is killed while it writes the snapshot of step 8, or its files may not get larger."""
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, err = start(*ONE_MACHINE, str(tmp_path / "train.py"), str(tmp_path), fault, "2").finish(timeout=100)
    assert code == 0, err
    if fault == "full":
        assert err.count("a snapshot in memory was not taken: ") == 1
        assert "File too large" in err
        assert "Training continues, and the previous snapshot is kept" in err
    else:
        assert (tmp_path / "killed_at").read_text() == "neuron_accel.save.write"
    assert re.search(r"resumed from \S+/snapshot_\d, saved .* by 2 ranks: epoch 0, after \d+ samples; from memory", err)
    assert result_of(tmp_path)["steps"] == STEPS - 6


def test_fewer_ranks_continue_from_the_snapshot_of_more(start, tmp_path):
    """Rank 1 is killed in step 9, and again in the first step after the restart."""
    (tmp_path / "train.py").write_text(SCRIPT)
    options = [*ONE_MACHINE, "--min-nproc-per-node", "1"]
    code, _, err = start(*options, str(tmp_path / "train.py"), str(tmp_path), "twice", "2").finish(timeout=100)
    assert code == 0, err
    assert "restart 2 of 2, on 1 rank instead of 2" in err
    assert len(re.findall(r"resumed from \S+/snapshot_\d, saved .* by 2 ranks: .*; from memory", err)) == 2
    result = result_of(tmp_path)
    assert (result["ranks"], result["steps"]) == (1, STEPS - 8)


@pytest.mark.parametrize("fault", ["damaged", "incomplete"])
def test_a_snapshot_that_cannot_be_used_leaves_the_checkpoint(start, tmp_path, fault):
    (tmp_path / "train.py").write_text(SCRIPT)
    code, _, err = start(*ONE_MACHINE, str(tmp_path / "train.py"), str(tmp_path), fault, "2").finish(timeout=100)
    assert code == 0, err
    said = {"damaged": "is damaged: its checksum does not match", "incomplete": "No machine has 'optimizer/"}[fault]
    assert "a snapshot in memory is not used, and an earlier state is loaded instead: " in err
    assert said in err
    assert re.search(r"resumed from \S+/checkpoint_0, saved", err)
    assert result_of(tmp_path)["steps"] == STEPS - 5


def test_without_restarts_nothing_is_saved_and_that_is_said_once(start, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("steps == 9", "steps == 99"))
    options = ["--nproc-per-node", "2", "--cpu", "--quiet"]
    code, _, err = start(*options, str(tmp_path / "train.py"), str(tmp_path), "", "2").finish(timeout=100)
    assert code == 0, err
    assert err.count("save_state(in_memory=True) has no effect here") == 1
    assert result_of(tmp_path)["bytes"] == 0


def test_the_snapshots_of_a_killed_launcher_are_removed_by_the_next_one(start, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    script = [str(tmp_path / "train.py"), str(tmp_path)]
    first = start(*ONE_MACHINE, *script, "hangs", "2")
    deadline = time.monotonic() + 60
    while not (tmp_path / "here").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pid = first.process.pid
    left = [path for path in Path("/dev/shm").glob("neuron_accel_snapshots_*") if _locked_by(path, pid)]
    assert len(left) == 1
    os.kill(pid, signal.SIGKILL)
    first.process.join()
    code, _, err = start(*ONE_MACHINE, *script, "", "2").finish(timeout=100)
    assert code == 0, err
    assert not left[0].exists()


def _locked_by(folder, pid):
    inode = (folder / "owner.lock").stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(
        line[1] == "FLOCK" and int(line[4]) == pid and int(line[5].rpartition(":")[2]) == inode for line in locks
    )


def test_a_rank_of_one_of_two_machines_continues_from_the_memory_of_both(start, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    options += ["--cpu", "--quiet", "--max-restarts", "2", "--grace", "5"]
    script = [str(tmp_path / "train.py"), str(tmp_path), "killed", "2"]
    machines = [start(*options, "--node-rank", str(node), *script) for node in (0, 1)]
    ends = [machine.finish(timeout=100) for machine in machines]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert re.search(r"resumed from \S+/snapshot_\d, saved .* by 2 ranks: .*; from memory", ends[0][2])
    assert result_of(tmp_path)["steps"] == STEPS - 8


def test_a_machine_that_is_lost_costs_the_steps_since_the_last_snapshot(start, environment, tmp_path):
    """The other machine has a copy of its shards, and continues alone."""
    environment[VARIABLE] = "0123456789abcdef0123456789abcdef"
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    options += ["--cpu", "--quiet", "--max-restarts", "2", "--grace", "5", "--min-nnodes", "1"]
    script = [str(tmp_path / "train.py"), str(tmp_path), "lost", "2"]
    first, _ = (start(*options, "--node-rank", str(node), *script) for node in (0, 1))
    code, _, err = first.finish(timeout=110)
    assert code == 0, err
    assert "machine 1 is lost; 1 of 2 continue, with 1 rank" in err
    assert re.search(r"resumed from \S+/snapshot_\d, saved .* by 2 ranks: .*; from memory", err)
    result = result_of(tmp_path)
    assert (result["ranks"], result["steps"]) == (1, STEPS - 8)
