"""``neuron-accel launch --max-restarts``: ranks are killed, and the run ends with the losses of one that was not
interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time

import pytest
import torch

from tests.faults import Fault, run_command
from tests.injector import PREAMBLE

SCRIPT = (
    PREAMBLE
    + """
import json, os, pathlib, signal, sys
import torch
from accelerate.utils import ProjectConfiguration
from neuron_accel import NeuronAccelerator

folder, kills = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])  # by number of the start: rank and step
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
faults.reach("rendezvous")
accelerator = NeuronAccelerator(project_config=project, config={"plugins": json.loads(sys.argv[3])})
faults.reach("rendezvous")
faults.watch(accelerator)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
accelerator.load_state(resume="latest", keep_batch=True)
losses = []
while loader.iteration < 2:
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if accelerator.sync_gradients:
            if kills.get(attempt) == [accelerator.state.process_index, accelerator.save_iteration]:
                os.kill(os.getpid(), signal.SIGKILL)
            accelerator.save_state()
weights = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    done = {"ranks": accelerator.world_size, "rate": scheduler.get_last_lr(), "losses": losses}
    done["weights"] = torch.cat([weight.flatten() for weight in weights.values()]).tolist()
    (folder / "result.json").write_text(json.dumps(done))
accelerator.end_training()
"""
)


def uninterrupted(ranks):
    """The same training in one process: weights and learning rate."""
    weights, rate, _ = uninterrupted_run(ranks)
    return weights, rate


def uninterrupted_losses(ranks):
    """The loss of each step of the same training in one process."""
    return uninterrupted_run(ranks)[2]


def uninterrupted_run(ranks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for step in range(2 * 12 // ranks):
        optimizer.param_groups[0]["lr"] = 0.05 * 0.9 ** (ranks * step)
        losses.append(0.0)
        for part in data.split(4 * ranks)[step % (12 // ranks)].split(4):
            loss = model(part).square().mean() / ranks
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, 0.05 * 0.9 ** (ranks * (step + 1)), torch.tensor(losses)


# ---- killed wherever a seed says -------------------------------------------------------------------------------------
PLUGINS = [["data_parallel"], ["zero1"], [{"fully_sharded": {"modules": ["0", "2"]}}]]
ANYWHERE = ["forward", "backward", "collective", "step", "save.open", "save.write", "save.fsync"]
BY_DEFAULT = [3]
"""Seeds of the cases that are not slow."""


def killed(seed):
    """A case: plugins, ranks, what is killed, and options of launch."""
    random_ = random.Random(seed)
    ranks = 4 if seed % 5 == 4 else 2
    count = 2 if ranks == 4 else random_.choice([1, 2, 3])
    faults = [
        Fault(point=random_.choice(ANYWHERE), count=random_.randint(1, 5), rank=random_.randrange(ranks))
        for _ in range(count)
    ]
    launch = ["--nproc-per-node", str(ranks), "--max-restarts", str(count)]
    return random_.choice(PLUGINS), ranks, faults, launch


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in BY_DEFAULT else [pytest.mark.slow]) for n in range(10)]
)
def test_a_restarted_run_ends_as_one_that_was_not_interrupted(tmp_path, seed):
    plugins, ranks, faults, launch = killed(seed)
    (tmp_path / "train.py").write_text(SCRIPT)
    script = [str(tmp_path / "train.py"), str(tmp_path), "{}", json.dumps(plugins)]
    outcome = run_command(["launch", "--cpu", "--quiet", "--grace", "5", *launch, *script], faults, timeout=120)
    assert outcome.is_good, outcome.errors
    assert outcome.starts == 1  # all of it was one launch
    assert [fault.named for fault in outcome.faults] == [fault.rank_hit for fault in outcome.faults]
    assert all(fault.at and fault.started_again for fault in outcome.faults)
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(ranks)
    assert result["ranks"] == ranks
    assert outcome.steps == 24 // ranks
    assert result["rate"] == [pytest.approx(rate)]
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)
    expected = uninterrupted_losses(ranks)
    losses = torch.tensor(result["losses"])  # of the last start
    torch.testing.assert_close(losses, expected[len(expected) - len(losses) :], rtol=1e-4, atol=1e-5)


# ---- several machines ------------------------------------------------------------------------------------------------
def test_two_machines_name_their_ranks_that_failed_and_go_on(start, tmp_path):
    """Restarted twice: each start has a store of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    options += ["--cpu", "--quiet", "--max-restarts", "2", "--grace", "5"]
    kills = json.dumps({"0": (1, 2), "1": (0, 4)})
    script = [str(tmp_path / "train.py"), str(tmp_path), kills, '["zero1"]']
    machines = [start(*options, "--node-rank", str(node), *script) for node in (0, 1)]
    ends = [machine.finish(timeout=100) for machine in machines]
    assert [code for code, _, _ in ends] == [0, 0], ends
    for node, (_, _, err) in enumerate(ends):  # each says which rank of its own or of the other machine it was
        assert f"neuron-accel: rank {node} failed first: ended by SIGKILL" in err
        assert f"): rank {1 - node} failed first: ended by SIGKILL; ending the ranks of this machine" in err
        assert err.count("neuron-accel: restart 1 of 2\n") == 1
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(2)
    assert (result["ranks"], result["rate"]) == (2, [pytest.approx(rate)])
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)


TOGETHER = """losses = []
if accelerator.world_size == 2:
    (folder / "together").touch()
while not (folder / "together").exists():  # a machine that is there alone is started again when the other comes
    time.sleep(0.1)
"""


def test_a_machine_that_is_lost_is_gone_on_without(start, tmp_path):
    """By torch's elastic rendezvous: the launcher of one of two machines is killed, with its rank. The one that is left
    has the samples of a step of both."""
    script = SCRIPT.replace("import json, os", "import json, time, os").replace("losses = []\n", TOGETHER)
    (tmp_path / "train.py").write_text(
        script.replace("        losses.append", "        time.sleep(0.1)\n        losses.append")
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--cpu", "--quiet", "--max-restarts", "3"]
    options += ["--rdzv-conf", "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3", "--grace", "5"]
    options += ["--heartbeat", "15", str(tmp_path / "train.py"), str(tmp_path), "{}", '["zero1"]']
    first = start(*options, forked=True)  # has the store
    wait_for(lambda: listens(port))
    second = start(*options, forked=True)
    wait_for((tmp_path / "checkpoints" / "checkpoint_2" / "manifest.json").exists)
    second.signal(signal.SIGKILL)
    code, _, err = first.finish(timeout=100)
    assert code == 0, err
    assert "data-parallel size 1 instead of 2: each rank accumulates 2 micro-batches instead of 1" in err
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(2)
    assert (result["ranks"], result["rate"]) == (1, [pytest.approx(rate)])
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0
