"""Two hosts: network namespaces with addresses of their own, which train together through ``neuron-accel launch``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
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

WAITS = """
import os, sys, time
folder, ranks = sys.argv[1], os.environ["WORLD_SIZE"]
open(os.path.join(folder, os.environ["RANK"] + "_of_" + ranks), "w").close()
while ranks == "3" or not os.path.exists(os.path.join(folder, "lost")):
    time.sleep(0.1)
"""


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=60)


class Hosts:
    """Network namespaces with addresses of their own, each at a port of a switch."""

    def __init__(self, count):
        tag = uuid.uuid4().hex[:6]
        self.names = [f"na{tag}{i}" for i in range(count)]
        self._switch, self._ports = f"sw{tag}", [f"po{tag}{i}" for i in range(count)]
        network = f"10.{int(tag[:2], 16)}.{int(tag[2:4], 16)}"
        self.addresses = [f"{network}.{i + 1}" for i in range(count)]

    def make(self):
        """Returns why they cannot be made here; None if they were."""
        steps = [("netns", "add", name) for name in (self._switch, *self.names)]
        steps += [("-n", self._switch, "link", "add", "switch", "type", "bridge")]
        steps += [("-n", self._switch, "link", "set", "switch", "up")]
        for name, port, address in zip(self.names, self._ports, self.addresses, strict=True):
            steps.append(("-n", self._switch, "link", "add", port, "type", "veth", "peer", "eth0", "netns", name))
            steps.append(("-n", self._switch, "link", "set", port, "master", "switch", "up"))
            steps.append(("-n", name, "addr", "add", f"{address}/24", "dev", "eth0"))
            steps += [("-n", name, "link", "set", device, "up") for device in ("lo", "eth0")]
        for step in steps:
            done = ip(*step)
            if done.returncode:
                return f"`ip {' '.join(step)}`: {done.stderr.strip()}"
        return None

    def cut_off(self, host):
        """Nothing that is sent to a host or by it arrives any more, and no connection is closed, as when the power or
        the network fails."""
        done = ip("-n", self._switch, "link", "set", self._ports[host], "nomaster")
        assert done.returncode == 0, done.stderr

    def pids(self, host):
        """Processes on a host."""
        return [int(pid) for pid in ip("netns", "pids", self.names[host]).stdout.split()]

    def kill(self, host):
        for pid in self.pids(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self):
        for host, name in enumerate(self.names):
            self.kill(host)
            ip("netns", "del", name)
        ip("netns", "del", self._switch)


@pytest.fixture
def hosts():
    """Makes hosts that reach each other."""
    if shutil.which("ip") is None:
        pytest.skip("the command ip (iproute2) is not installed")
    made = []

    def make(count):
        made.append(Hosts(count))
        if lacks := made[-1].make():
            pytest.skip(f"network namespaces are not allowed here: {lacks}")
        return made[-1]

    yield make
    for one in made:
        one.remove()


@pytest.fixture
def launch(hosts, start, tmp_path):
    """Starts two launchers, one on each host, two ranks each."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    reports = tmp_path / "reports"
    reports.mkdir()

    def run(epochs):
        two = hosts(2)
        options = ["--nnodes", "2", "--master-addr", two.addresses[0], "--cpu", "--nproc-per-node", "2", "--grace", "5"]
        options += ["--heartbeat", "6"]
        words = [*options, str(script), str(reports), str(epochs)]
        return two, [start("--node-rank", str(node), *words, forked=True, host=two.names[node]) for node in (0, 1)]

    run.reports = lambda: {int(p.stem): json.loads(p.read_text()) for p in reports.glob("*.json")}
    return run


def until(condition, what, timeout=SECONDS):
    deadline = time.monotonic() + timeout * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


def both(machines):
    return lambda: "\n".join(machine.stderr.read_text() for machine in machines)


@pytest.mark.parametrize(("dies", "lives"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_two_hosts_train_together_and_one_that_is_killed_ends_the_other(launch, dies, lives):
    two, machines = launch(10_000)
    until(lambda: len(launch.reports()) == 4, both(machines))
    found = launch.reports()
    assert {rank: (r["world"], r["node"]) for rank, r in found.items()} == {
        0: (4, "0"),
        1: (4, "0"),
        2: (4, "1"),
        3: (4, "1"),
    }
    assert "2 machines, this is 0" in machines[0].stderr.read_text()
    two.kill(dies)
    code, _, output = machines[lives].finish(timeout=60)
    assert code != 0
    assert "failed first" in output or "is lost" in output, output
    assert two.pids(lives) == []


@pytest.mark.slow
def test_two_hosts_end_well_with_the_same_loss(launch):
    _, machines = launch(2)
    for machine in machines:
        code, _, output = machine.finish(timeout=SECONDS)
        assert code == 0, output
        assert "is lost" not in output
        assert "ending the ranks" not in output
    found = launch.reports()
    assert len({r["loss"] for r in found.values()}) == 1


# ---- machines that are cut off, with ranks that wait in a collective that never fails --------------------------------
@pytest.fixture
def three(hosts, start, tmp_path):
    """Starts a launcher on each of three hosts, with a rank each, and waits for the ranks."""
    (tmp_path / "waits.py").write_text(WAITS)

    def run(*options):
        found = hosts(3)
        words = [
            "--cpu",
            "--quiet",
            "--heartbeat",
            "6",
            "--grace",
            "5",
            *options,
            str(tmp_path / "waits.py"),
            str(tmp_path),
        ]
        words = [word.format(first=found.addresses[0]) for word in words]
        machines = []
        for node, name in enumerate(found.names):
            machines.append(start("--node-rank", str(node), *words, host=name))
        until(lambda: len(list(tmp_path.glob("*_of_3"))) == 3, both(machines))
        return found, machines

    return run


def test_a_machine_without_power_or_network_ends_all_in_the_time_of_the_heartbeat(three):
    """A machine that loses power, seen by the others; the side of a partition without the store, seen by itself."""
    found, machines = three("--nnodes", "3", "--master-addr", "{first}")
    found.cut_off(2)
    for node, lost in ((0, "machine 2 ("), (1, "machine 2 ("), (2, "the machine with the store, ")):
        code, _, output = machines[node].finish(timeout=60)
        assert code == LOST_CODE, output
        assert f"neuron-accel: the run has ended: {lost}" in output
        assert "failed first" not in output
        assert found.pids(node) == []


@pytest.mark.slow
def test_the_machines_of_a_partition_that_reach_the_store_go_on(three, tmp_path):
    """And the others end: no two sides train."""
    conf = "last_call_timeout=10,keep_alive_interval=10,keep_alive_max_attempt=2"
    found, machines = three("--nnodes", "2:3", "--rdzv-endpoint", "{first}:29500", "--rdzv-conf", conf)
    (tmp_path / "lost").touch()
    found.cut_off(2)
    codes = [machine.finish(timeout=90)[0] for machine in machines]
    assert codes == [0, 0, LOST_CODE], both(machines)()
    assert len(list(tmp_path.glob("*_of_2"))) == 2
    assert "machine 2 (" in machines[0].stderr.read_text()
