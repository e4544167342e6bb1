"""Two hosts: network namespaces with addresses of their own, which train together through ``neuron-accel launch``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest

from neuron_accel.launch.lost import LOST_CODE

SECONDS = 50

TRAINING = """
import json, os, sys, time, torch
from neuron_accel import NeuronAccelerator
accelerator = NeuronAccelerator(zero_1=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
folder, epochs = sys.argv[1], int(sys.argv[2])
rank = accelerator.state.process_index
for epoch in range(epochs):
    for x, y in loader:
        loss = (model(x) - y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    total = accelerator.reduce(loss.detach(), "mean").item()
    report = {"loss": total, "world": accelerator.world_size, "node": os.environ["GROUP_RANK"]}
    with open(os.path.join(folder, f"{rank}.partial"), "w") as file:
        json.dump(report, file)
    os.rename(file.name, os.path.join(folder, f"{rank}.json"))
    time.sleep(0.1 if epochs > 5 else 0)
accelerator.end_training()
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)


@pytest.fixture
def hosts():
    """Names of two namespaces that reach each other as 10.77.x.1 and 10.77.x.2."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not installed")
    tag = uuid.uuid4().hex[:6]
    names, links = [f"na{tag}{i}" for i in (0, 1)], [f"ve{tag}{i}" for i in (0, 1)]
    network = f"10.{int(tag[:2], 16)}.{int(tag[2:4], 16)}"
    made = ip("netns", "add", names[0])
    if made.returncode:
        pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
    try:
        steps = [("netns", "add", names[1]), ("link", "add", links[0], "type", "veth", "peer", "name", links[1])]
        for i, name in enumerate(names):
            steps.append(("link", "set", links[i], "netns", name))
            steps.append(("-n", name, "addr", "add", f"{network}.{i + 1}/24", "dev", links[i]))
            steps += [("-n", name, "link", "set", device, "up") for device in ("lo", links[i])]
        for step in steps:
            done = ip(*step)
            if done.returncode:
                pytest.skip(f"`ip {' '.join(step)}` is not allowed here: {done.stderr.strip()}")
        yield names, network, links
    finally:
        for name in names:
            pids = ip("netns", "pids", name).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            ip("netns", "del", name)


@pytest.fixture
def launch(hosts, environment, tmp_path):
    """Starts two launchers, one on each host, two ranks each."""
    names, network, links = hosts
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    reports = tmp_path / "reports"
    reports.mkdir()
    started = []

    def run(epochs):
        for node, name in enumerate(names):
            arguments = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", f"{network}.1", "--cpu"]
            command = [sys.executable, "-m", "neuron_accel.cli.main", "launch", *arguments, "--nproc-per-node", "2"]
            command += ["--grace", "5", "--heartbeat", "6", str(script), str(reports), str(epochs)]
            env = {**environment, "OMP_NUM_THREADS": "1"}
            with (tmp_path / f"launcher{node}").open("w") as output:
                words = ["ip", "netns", "exec", name, *command]
                started.append(subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT))
        return started

    run.reports = lambda: {int(p.stem): json.loads(p.read_text()) for p in reports.glob("*.json")}
    run.output = lambda node: (tmp_path / f"launcher{node}").read_text()
    run.names, run.links = names, links
    yield run
    for process in started:
        process.kill()
        process.wait(10)


def until(condition, what, timeout=SECONDS):
    deadline = time.monotonic() + timeout * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@pytest.mark.parametrize(("dies", "lives"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_two_hosts_train_together_and_one_that_is_killed_ends_the_other(launch, dies, lives):
    machines = launch(10_000)
    until(lambda: len(launch.reports()) == 4, lambda: launch.output(0) + launch.output(1))
    found = launch.reports()
    assert {rank: (r["world"], r["node"]) for rank, r in found.items()} == {
        0: (4, "0"),
        1: (4, "0"),
        2: (4, "1"),
        3: (4, "1"),
    }
    assert "2 machines, this is 0" in launch.output(0)
    for pid in ip("netns", "pids", launch.names[dies]).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    began = time.monotonic()
    assert machines[lives].wait(60) != 0
    assert time.monotonic() - began < 60
    output = launch.output(lives)
    assert "failed first" in output or "is lost" in output, output
    assert ip("netns", "pids", launch.names[lives]).stdout.split() == []


@pytest.mark.slow
def test_two_hosts_end_well_with_the_same_loss(launch):
    machines = launch(2)
    for node, machine in enumerate(machines):
        assert machine.wait(SECONDS) == 0, launch.output(node)
        assert "is lost" not in launch.output(node)
        assert "ending the ranks" not in launch.output(node)
    found = launch.reports()
    assert len({r["loss"] for r in found.values()}) == 1


@pytest.mark.slow
def test_a_host_that_vanishes_without_a_word_ends_the_other(launch):
    """Ends a host without closing its connections, as in a power failure."""
    machines = launch(10_000)
    until(lambda: len(launch.reports()) == 4, lambda: launch.output(0) + launch.output(1))
    ip("-n", launch.names[1], "link", "set", launch.links[1], "down")
    began = time.monotonic()
    for machine, other in ((0, "machine 1 ("), (1, "the machine with the store, ")):
        assert machines[machine].wait(60) == LOST_CODE, launch.output(machine)
        assert f"neuron-accel: the run has ended: {other}" in launch.output(machine)
        assert "failed first" not in launch.output(machine)
        assert ip("netns", "pids", launch.names[machine]).stdout.split() == []
    assert time.monotonic() - began < 60
