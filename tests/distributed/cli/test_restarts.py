"""``neuron-accel launch --max-restarts``: ranks are killed, and the run ends with the losses of one that was not
interrupted, on as many ranks or on fewer."""

from __future__ import annotations

import json
import random
import re
import signal
import socket
import time

import pytest
import torch

from neuron_accel.cli.run_secret import VARIABLE

SCRIPT = """
import json, os, pathlib, signal, sys
import torch
from accelerate.utils import ProjectConfiguration
from neuron_accel import NeuronAccelerator

folder, kills = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])  # by number of the start: rank and step
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
accelerator = NeuronAccelerator(project_config=project, config={"plugins": json.loads(sys.argv[3])})
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
data = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
accelerator.load_state(resume="latest")
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


@pytest.fixture
def train(start, tmp_path):
    """Runs the script under the launcher; returns the exit code, its messages and the result."""

    def run(*options, kills, plugins=("data_parallel",)):
        path = tmp_path / "train.py"
        path.write_text(SCRIPT)
        ends = {str(attempt): place for attempt, place in kills.items()}
        arguments = [str(path), str(tmp_path), json.dumps(ends), json.dumps(list(plugins))]
        code, _, err = start("--quiet", "--cpu", *options, *arguments).finish(timeout=100)
        result = tmp_path / "result.json"
        return code, err, json.loads(result.read_text()) if result.exists() else None

    return run


def test_a_rank_that_fails_twice_leaves_fewer_ranks_with_the_same_batch(train):
    """Killed in the first epoch and, one step after the checkpoint of the second start, again."""
    options = ["--nproc-per-node", "2", "--max-restarts", "3", "--min-nproc-per-node", "1"]
    code, err, result = train(*options, kills={0: (1, 2), 1: (1, 4)})
    assert code == 0, err
    assert err.count("neuron-accel: rank 1 failed first: ended by SIGKILL") == 2
    assert "neuron-accel: restart 1 of 3\n" in err
    assert (
        "restart 2 of 3, on 1 rank instead of 2, since rank 1 has failed first 2 times in a row; mesh: one rank" in err
    )
    assert "data-parallel size 1 instead of 2: each rank accumulates 2 micro-batches instead of 1" in err
    assert re.findall(r"epoch 0, after \d+ samples", err) == ["epoch 0, after 16 samples", "epoch 0, after 32 samples"]
    weights, rate = uninterrupted(2)
    assert result["ranks"] == 1
    assert len(result["losses"]) == 2 * 8  # of 12 steps, 4 were in the last checkpoint
    assert result["rate"] == [pytest.approx(rate)]
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)


# ---- killed wherever a seed says -------------------------------------------------------------------------------------
PLUGINS = [["data_parallel"], ["zero1"], [{"fully_sharded": {"modules": ["0", "2"]}}]]
ANYWHERE = ["forward", "backward", "collective", "step", "save.open", "save.write", "save.fsync"]
BY_DEFAULT = [3]
"""Seeds of the cases that are not slow."""


def elastic(seed):
    """A case: plugins, ranks at the first start, ranks at the end, and options of chaos and launch."""
    random_ = random.Random(seed)
    ranks = 4 if seed % 5 == 4 else 2
    shrinks = seed % 2 == 1 or ranks == 4
    count = 2 if shrinks or ranks == 4 else random_.choice([1, 2, 3])
    points = [f"{random_.choice(ANYWHERE)}:{random_.randint(1, 5)}" for _ in range(count)]
    chaos = [word for point in points for word in ("--point", point)]
    if shrinks:  # the same rank, twice in a row
        chaos += ["--rank", str(random_.randrange(ranks))]
    launch = ["--nproc-per-node", str(ranks), "--max-restarts", str(count)]
    launch += ["--min-nproc-per-node", "1"] if shrinks else []
    return random_.choice(PLUGINS), ranks, ranks // 2 if shrinks else ranks, ["--seed", str(seed), *chaos], launch


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in BY_DEFAULT else [pytest.mark.slow]) for n in range(20)]
)
def test_an_elastic_restart_ends_as_a_run_that_was_not_interrupted(start, tmp_path, seed):
    plugins, ranks, last, chaos, launch = elastic(seed)
    (tmp_path / "train.py").write_text(SCRIPT)
    script = [str(tmp_path / "train.py"), str(tmp_path), "{}", json.dumps(plugins)]
    words = [*chaos, "--json", "--timeout", "120", "--", "launch", "--cpu", "--quiet", "--grace", "5", *launch, *script]
    code, out, err = start(*words, command="chaos").finish(timeout=150)
    assert code == 0, err
    outcome = json.loads(out)
    assert outcome["is_good"]
    assert outcome["starts"] == 1  # all of it was one launch
    assert [fault["named"] for fault in outcome["faults"]] == [fault["rank_hit"] for fault in outcome["faults"]]
    assert all(fault["at"] and fault["started_again"] for fault in outcome["faults"])
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(ranks)
    assert result["ranks"] == last
    assert outcome["steps"] == 24 // ranks
    assert result["rate"] == [pytest.approx(rate)]
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)
    expected = uninterrupted_losses(ranks)
    losses = torch.tensor(result["losses"]).reshape(-1, ranks // last).mean(1)  # of the last start, a step each
    torch.testing.assert_close(losses, expected[len(expected) - len(losses) :], rtol=1e-4, atol=1e-5)


def test_the_cases_of_elastic_restarts_differ():
    cases = [elastic(seed) for seed in range(20)]
    assert {(ranks, last) for _, ranks, last, *_ in cases} == {(2, 2), (2, 1), (4, 2)}
    assert len({json.dumps(plugins) for plugins, *_ in cases}) == 3
    assert len({tuple(chaos) for *_, chaos, _ in cases}) == 20


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
    killed = "rank {} failed first: ended by SIGKILL"
    for node, machine in enumerate(machines):
        code, _, err = machine.finish(timeout=100)
        assert code == 0, err
        assert killed.format(node) in err
        assert err.count(f"neuron-accel: rank {node} failed first") == 2
        assert [err.count(f"neuron-accel: restart {number} of 2\n") for number in (1, 2)] == [1, 1]
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(2)
    assert (result["ranks"], result["rate"]) == (2, [pytest.approx(rate)])
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)


@pytest.fixture
def machines(start, environment, tmp_path):
    """Starts launchers of several machines, one rank each, which may go on without each other."""
    environment[VARIABLE] = "0123456789abcdef0123456789abcdef"
    slower = SCRIPT.replace("        losses.append", "        time.sleep(0.1)\n        losses.append")
    (tmp_path / "train.py").write_text(slower.replace("import json, os", "import json, time, os"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def run(node, *, nnodes=2, fewest=1, kills=None, options=()):
        options = [*options, "--nnodes", str(nnodes), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        options += ["--master-port", str(port), "--cpu", "--quiet", "--max-restarts", "3", "--grace", "5"]
        options += ["--min-nnodes", str(fewest), "--node-rank", str(node)]
        return start(*options, str(tmp_path / "train.py"), str(tmp_path), json.dumps(kills or {}), '["zero1"]')

    return run


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_checkpoint(tmp_path, number):
    wait_for((tmp_path / "checkpoints" / f"checkpoint_{number}" / "manifest.json").exists)


def check_result(tmp_path, ranks):
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(2)
    assert (result["ranks"], result["rate"]) == (ranks, [pytest.approx(rate)])
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("lost", "fewest"), [(0, 1), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(1, 2, marks=pytest.mark.slow)]
)
def test_a_machine_that_is_lost_is_gone_on_without(machines, tmp_path, lost, fewest):
    """Its launcher is killed, and its ranks with it; machine 0 led the run."""
    both = [machines(node, fewest=fewest) for node in (0, 1)]
    wait_for_checkpoint(tmp_path, 2)
    both[lost].signal(signal.SIGKILL)
    code, _, err = both[1 - lost].finish(timeout=100)
    assert f"machine {lost} ended without closing its connection" in err
    assert ("machine 1 leads the run instead of machine 0" in err) == (lost == 0)
    if fewest == 2:
        assert code == 2, err
        assert "machine 1 is lost, and 1 of 2 machines are left, fewer than --min-nnodes 2" in err
        return
    assert code == 0, err
    assert f"machine {lost} is lost; 1 of 2 continue, with 1 rank; mesh: one rank" in err
    assert "data-parallel size 1 instead of 2: each rank accumulates 2 micro-batches instead of 1" in err
    check_result(tmp_path, ranks=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_machines_0_and_1_are_lost_at_once(machines, tmp_path):
    """Of four machines two are left."""
    four = [machines(node, nnodes=4, fewest=2) for node in range(4)]
    wait_for_checkpoint(tmp_path, 1)
    for node in (0, 1):
        four[node].signal(signal.SIGKILL)
    for node in (2, 3):
        code, _, err = four[node].finish(timeout=150)
        assert code == 0, err
        assert "machines 0, 1 are lost; 2 of 4 continue, with 2 ranks" in err
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(4)
    assert (result["ranks"], result["rate"]) == (2, [pytest.approx(rate)])
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_comes_back_takes_part_after_the_next_restart(machines, tmp_path, lost):
    """A rank fails once the machine waits."""
    kills = {"1": (0, 8)}  # of the second start, on one rank
    both = [machines(node, kills=kills) for node in (0, 1)]
    wait_for_checkpoint(tmp_path, 2)
    both[lost].signal(signal.SIGKILL)
    wait_for(lambda: "1 of 2 continue" in both[1 - lost].stderr.read_text())
    back = machines(lost, kills=kills)
    code, _, err = both[1 - lost].finish(timeout=120)
    assert code == 0, err
    code, _, said = back.finish(timeout=60)
    assert code == 0, said
    assert "it waits for the next restart" in said
    assert "all 2 machines continue" in err
    check_result(tmp_path, ranks=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_machine_0_that_was_only_slow_does_not_go_on_beside_the_others(machines, tmp_path):
    """Its launcher is stopped, and continued once the others train without it; the mesh needs one of them."""
    three = [machines(node, nnodes=3, options=["--heartbeat", "4"]) for node in range(3)]
    wait_for_checkpoint(tmp_path, 1)
    three[0].signal(signal.SIGSTOP)
    wait_for(lambda: "1 of 3 continue" in three[1].stderr.read_text())
    three[0].signal(signal.SIGCONT)
    ends = [machine.finish(timeout=120) for machine in three]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    assert "machine 0 sent no heartbeat for 4 s and is considered lost" in ends[1][2]
    for node in (0, 2):
        assert "it waits for the next restart" in ends[node][2]
        assert "the run has ended well without this machine" in ends[node][2]
    result = json.loads((tmp_path / "result.json").read_text())
    weights, rate = uninterrupted(3)
    assert (result["ranks"], result["rate"]) == (1, [pytest.approx(rate)])
    torch.testing.assert_close(torch.tensor(result["weights"]), weights, rtol=1e-4, atol=1e-5)
