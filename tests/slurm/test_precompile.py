"""The two batch files of ``neuron-accel launch --slurm``, on an emulated Trainium instance: one compiles ahead of time,
and training, which waits for it, compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt2_xl_zero1" / "train.py"


@pytest.fixture
def machine(cluster):
    neuron_ranks = pytest.importorskip("neuron_accel_emulation.neuron_ranks")
    if reason := neuron_ranks.missing():
        pytest.skip(reason)
    with neuron_ranks.emulated_instance("trn1.2xlarge") as machine:
        yield machine


@pytest.fixture
def submit(cluster, machine, tmp_path):
    """Writes the batch files, submits compilation, then training that waits for it, and returns the jobs' numbers."""

    def run(*words):
        environ = dict(machine.environ)
        del environ["NEURON_COMPILE_CACHE_URL"]  # a folder is given instead
        environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
        options = ["--nproc-per-node", "2", "--cache-dir", str(machine.cache), "--slurm", str(tmp_path)]
        launch = [sys.executable, "-m", "neuron_accel.cli.main", "launch", *options, *map(str, words)]
        done = subprocess.run(launch, capture_output=True, text=True, env=environ)
        assert done.returncode == 0, done.stderr
        compilation = cluster.submit("compile.slurm", cwd=tmp_path, environ=environ)
        training = cluster.submit(f"--dependency=afterok:{compilation}", "run.slurm", cwd=tmp_path, environ=environ)
        return compilation, training

    return run


def test_training_waits_for_its_graphs_and_compiles_nothing(cluster, machine, submit, tmp_path):
    folder = tmp_path / "out"
    words = [EXAMPLE, "--scale=tiny", "--batch_size=2", "--max_steps=3", f"--output_dir={folder}"]
    compilation, training = submit(*words)
    assert cluster.job(training)["JobState"] == "PENDING"
    job = cluster.end(compilation, 300.0)
    output = Path(job["StdOut"]).read_text()
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert "Compilation summary" in output
    job = cluster.end(training, 300.0)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), Path(job["StdOut"]).read_text()

    collected = {c.module for c in machine.compilations if c.outcome == "collected"}
    found = {c.module for c in machine.compilations if c.outcome == "found"}
    assert found
    assert found <= collected
    assert {c.outcome for c in machine.compilations} == {"collected", "found"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(5 < line["loss"] < 9 for line in lines), "the logarithm of the vocabulary's size is 6.9"


def test_training_does_not_begin_if_its_graphs_cannot_be_compiled(cluster, submit, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    compilation, training = submit(script)
    job = cluster.end(compilation)
    assert job["JobState"] == "FAILED", Path(job["StdOut"]).read_text()
    cluster.wait(lambda: cluster.job(training)["Reason"] == "DependencyNeverSatisfied", "job that cannot begin")
    cluster.run("scancel", training)
