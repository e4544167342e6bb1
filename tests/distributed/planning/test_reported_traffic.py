"""The traffic that a dry run predicts is what a run report has seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.as_predicted import as_predicted

reports = pytest.importorskip("neuron_accel_report")
pytest.importorskip("neuron_accel_plan")

COMPOSITIONS = {
    "dp2": ([], 2),
    "zero1": (["zero1"], 2),
    "tp2-dp2": ([{"model_parallelism": {"tensor_parallel_size": 2}}], 4),
    "pp2": ([{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}], 2),
}

SCRIPT = """
import torch
from neuron_accel import NeuronAccelerator
from tests.distributed.models import MODELS, token_batches

def main(plugins, report):
    accelerator = NeuronAccelerator(config={"plugins": [*plugins, {"run_report": report}]})
    torch.manual_seed(0)
    model = MODELS["llama"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in token_batches(3, size=2):
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
"""


def in_script(plugins, report):
    scope: dict = {}
    exec(SCRIPT, scope)
    scope["main"](plugins, report)


def run_as_predicted(plugins, report):
    with as_predicted():
        in_script(plugins, report)


def predict(plugins, ranks, path, folder):
    import json

    from neuron_accel_plan import count_training

    report = {"folder": folder, "predicted": path, "show": "nothing"}
    count = count_training(lambda: in_script(plugins, report), world_size=ranks, step=2)
    Path(path).write_text(json.dumps(count.to_dict()))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_predicted_and_seen_traffic_are_equal(name, tmp_path):
    plugins, ranks = COMPOSITIONS[name]
    path, folder = str(tmp_path / "plan.json"), str(tmp_path / "report")
    run_ranks(predict, 1, plugins, ranks, path, folder)
    assert not (tmp_path / "report").exists()  # a dry run writes none
    run_ranks(run_as_predicted, ranks, plugins, {"folder": folder, "predicted": path, "show": "nothing"})
    report = reports.read_run(folder)
    rows = reports.traffic_table(report.ranks[0], step=1)
    assert rows
    assert all(row.is_equal for row in rows), rows
    assert sum(row.bytes for row in rows) > 0
    assert report.ranks[1].header.predicted is None  # rank 0 was planned
    assert report.ranks[0].steps[1].flops > 0
    assert [step.loss is not None for step in report.ranks[0].steps] == [True] * 3  # read a step later
