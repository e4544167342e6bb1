"""``accelerator.profile``: torch's profiler, with the names of parts, collectives and plugins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.models import MODELS, token_batches


def profiled(plugins, folder):
    from accelerate.utils import ProfileKwargs

    from neuron_accel import NeuronAccelerator

    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=folder)
    accelerator = NeuronAccelerator(config={"plugins": plugins}, kwargs_handlers=[handler])
    torch.manual_seed(0)
    model = MODELS["llama"]()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step():
        accelerator.backward(model(**token_batches(1, size=2)[0]).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    with accelerator.profile() as profiler:
        step()
    assert isinstance(profiler, torch.profiler.profile)
    assert not accelerator.run.events.of["part"]  # nothing is left
    names = {event.key for event in profiler.key_averages()}
    step()
    accelerator.end_training()
    return names


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        (["zero1"], {"zero1.backward_pass", "zero1.gradients", "reduce_scatter over dp", "all_gather over dp"}),
        (
            [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}],
            {"pipeline_parallel.step", "send over pp", "receive over pp"},
        ),
    ],
    ids=["zero1", "pp2"],
)
def test_a_profile_has_parts_collectives_and_hooks_by_plugin(plugins, expected, tmp_path):
    first, second = run_ranks(profiled, 2, plugins, str(tmp_path))
    for names in (first, second):
        assert {"forward", "backward", "optimizer step", "zero_grad"} <= names
        assert expected <= names
    if len(plugins) == 1 and isinstance(plugins[0], dict):
        assert "forward, stage 0, micro-batch 1" in first
        assert "backward, stage 1, micro-batch 0" in second
    traces = sorted(Path(tmp_path).glob("profile_*.json"))
    assert len(traces) == 2
    events = json.loads(traces[0].read_text())["traceEvents"]
    assert "optimizer step" in {event.get("name") for event in events}
