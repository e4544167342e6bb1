"""Ray Train on a cluster of nodes on this machine: a node is lost, and training goes on without it, with the losses of
one process; metrics and checkpoints are in Ray's result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray.train", reason="Ray is not installed: nox -s ray")
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.timeout(900)

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray" / "train.py"
SAMPLES, MICRO_BATCH, NODES, STEPS = 96, 4, 2, 12
PATIENCE = {  # on a machine that others use, too
    # Ray notices late that a node is gone: it first tries to start as many workers again, for this time.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
    "RAY_gcs_server_request_timeout_seconds": "600",
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_worker_niceness": "0",  # else 15: on a busy machine workers hardly run
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture
def nodes(monkeypatch):
    """A cluster with a head for the driver, and two nodes with room for a worker each."""
    for name, value in PATIENCE.items():
        monkeypatch.setenv(name, value)
    node = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "num_cpus": 0})
    try:
        yield cluster, [cluster.add_node(**node, num_cpus=1) for _ in range(NODES)]
    finally:
        cluster.shutdown()


def losses_of_one_process():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in torch.randint(256, (SAMPLES, 32), generator=torch.Generator().manual_seed(0)).split(SAMPLES // STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_goes_on_without_a_node_that_is_lost(nodes, tmp_path):
    cluster, workers = nodes
    options = ["--storage", tmp_path, "--name", "run", "--workers", NODES, "--min_workers", 1, "--keep", STEPS]
    options += ["--samples", SAMPLES, "--micro_batch_size", MICRO_BATCH, "--save_every", 1]
    with (tmp_path / "output").open("w") as output:
        driver = subprocess.Popen(
            [sys.executable, EXAMPLE, *map(str, options)],
            env={**os.environ, "RAY_ADDRESS": cluster.address},
            stdout=output,
            stderr=output,
        )
    try:
        checkpoints = tmp_path / "run" / "checkpoints"
        deadline = time.monotonic() + 240 * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])
        while not (checkpoints / "checkpoint_3" / "manifest.json").exists():
            assert driver.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            time.sleep(0.05)
        cluster.remove_node(workers[1], allow_graceful=False)
        assert driver.wait(240 * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"])) == 0, (
            tmp_path / "output"
        ).read_text()
    finally:
        driver.kill()
        driver.wait()

    lines = [line for line in (tmp_path / "output").read_text().splitlines() if line.startswith('{"step"')]
    found = [json.loads(line) for line in lines]
    assert found[0]["workers"] == NODES
    assert found[-1]["workers"] == 1
    steps = [line["step"] for line in found]
    assert (steps[0], steps[-1]) == (1, STEPS)
    assert steps == sorted(set(steps))
    assert len(steps) >= STEPS - 5  # what was reported just before the node was lost may not have arrived
    losses = losses_of_one_process()
    assert [line["loss"] for line in found] == pytest.approx([losses[step - 1] for step in steps], rel=1e-4)
    assert Path(found[-1]["checkpoint"]).samefile(checkpoints / f"checkpoint_{STEPS - 1}")


FAILS_ONCE = """
import os, runpy, sys
from pathlib import Path

script, marker = Path({script!r}), Path({marker!r})
is_first = not marker.exists()
sys.path.insert(0, str(script.parent))
sys.argv = [str(script), *sys.argv[1:], *(["--steps=3"] if is_first else [])]
try:
    runpy.run_path(str(script), run_name="__main__")
finally:
    if is_first and os.environ["RANK"] == "1":
        marker.touch()
        os._exit(3)
"""


def test_a_recipe_continues_on_nodes_of_a_cluster(nodes, tmp_path):
    """With a launcher on each node; the first start fails after a checkpoint."""
    cluster, _ = nodes
    recipes = EXAMPLE.parents[1] / "recipes"
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE.format(script=str(recipes / "train.py"), marker=str(tmp_path / "failed")))
    command = ["launch_on_ray.py", f"--nnodes={NODES}", "--max-failures=1", "--", "--cpu", "--nproc-per-node=1"]
    command += [script, "qwen3-8b/pretrain-trn1.32xlarge.yaml", "--tiny", f"--output={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=recipes,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=400 * float(os.environ["NEURON_ACCEL_TIMEOUT_FACTOR"]),
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "start 1 of 2 failed: 3" in said
    assert "continues after step 3" in said
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert (result["steps"], len(result["losses"])) == (6, 3)
