"""The examples of classification, summarization and translation, on emulated Neuron cores."""

from __future__ import annotations

import json
import math

import pytest
from neuron_accel_emulation import emulated_instance

from tests.distributed.examples import test_tasks as tasks
from tests.neuron.test_launch import run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", tasks.SCRIPTS)
def test_a_task_runs_in_few_graphs(script, tmp_path):
    arguments, out = [a for a in vars(tasks)[script](tmp_path) if a != "--predict_with_generate"], tmp_path / "out"
    arguments += [
        *tasks.COMMON,
        "--max_steps=6",
        "--zero_1",
        f"--model_name_or_path={tmp_path / 'model'}",
        f"--output_dir={out}",
    ]
    with emulated_instance("trn1.2xlarge") as machine:
        launch = ["launch", "--nproc-per-node", "2", tasks.FOLDER / f"{script}.py", *arguments]
        run(machine, *launch, HF_DATASETS_CACHE=str(tmp_path / "cache"))
        assert [path.read_bytes() for path in machine.graphs(0)] == [path.read_bytes() for path in machine.graphs(1)]
        assert len(machine.graphs(0)) <= 8, "one for each kind of step, not one for each step"
    results = json.loads((out / "all_results.json").read_text())
    assert math.isfinite(results["train_loss"])
    assert math.isfinite(results["eval_loss"])  # of pairs of texts, one of the ranks has none to evaluate
