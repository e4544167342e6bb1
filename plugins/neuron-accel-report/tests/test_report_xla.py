"""A report of a run on a lazy device: a step stays one graph and one execution."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from neuron_accel_report.records import read_run
from report_support import llama, token_batches

from neuron_accel.testing import one_at_a_time, run_ranks

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")


def compiled():
    """Graphs compiled so far by all ranks of the process."""
    import torch_xla.debug.metrics as metrics

    return metrics.counter_value("UncachedCompile") or 0


def executed():
    """Graphs executed so far by all ranks of the process."""
    import torch_xla.debug.metrics as metrics

    return compiled() + (metrics.counter_value("CachedCompile") or 0)


def train(folder, accumulation):
    """Counts graphs and executions of steps of one rank, with a report or without."""
    from neuron_accel import NeuronAccelerator

    report = [] if folder is None else [{"run_report": {"folder": folder, "show": "nothing", "trace_steps": [3]}}]
    accelerator = NeuronAccelerator(
        config={"backend": "xla", "plugins": ["zero1", *report], "gradient_accumulation_steps": accumulation}
    )
    with one_at_a_time():
        torch.manual_seed(0)
        model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    model, optimizer = accelerator.prepare(model, optimizer)
    backend, graphs, runs, losses = accelerator.run.backend, [], [], []
    for batch in token_batches(6 * accumulation, size=2):
        batch = {name: value.to(accelerator.device) for name, value in batch.items()}
        backend.barrier()  # ranks count into the same counters
        before = executed()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        backend.barrier()
        graphs.append(compiled())
        runs.append((executed() - before) / accelerator.world_size)
        losses.append(loss.detach())
    losses = [float(loss.cpu()) for loss in losses]
    accelerator.end_training()
    return {"graphs": graphs, "runs": runs, "losses": losses}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_stays_one_graph_and_one_execution(accumulation, tmp_path):
    plain = run_ranks(train, 2, None, accumulation, backend="xla")
    reported = run_ranks(train, 2, str(tmp_path), accumulation, backend="xla")
    for each, other in zip(reported, plain, strict=True):
        assert each["losses"] == other["losses"]
        assert each["runs"] == other["runs"]
        assert each["runs"][-1] == 1
        assert len(set(each["graphs"][3 * accumulation :])) == 1  # nothing is compiled later
    for each, result in zip(read_run(tmp_path).ranks, reported, strict=True):
        losses = result["losses"]
        means = [sum(losses[i : i + accumulation]) / accumulation for i in range(0, len(losses), accumulation)]
        assert [step.loss for step in each.steps] == pytest.approx(means)
        assert all(step.grad_norm > 0 for step in each.steps)
        for step in each.steps:
            assert sum(step.parts.values()) == pytest.approx(step.seconds, abs=1e-9)
            assert step.parts["device"] > 0
            assert step.compilations is not None
            assert step.waiting is None
            assert step.collectives
            assert all(row.seconds is None and row.bytes > 0 for row in step.collectives)
        assert not each.steps[-1].compilations
        assert "execute the graph" in {r.name for r in each.ranges}
