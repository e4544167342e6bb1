"""bf16 on XLA ranks, by autocast and throughout, stays as close to one process as bf16 allows."""

from __future__ import annotations

import re

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.loop.loops_support import adamw, assert_close, forward, model
from tests.distributed.loop.test_bf16 import STEPS, train_alone
from tests.distributed.models import token_batches
from tests.xla.watching import StepWatcher, compiled

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}


def train_on_rank(plugins, autocast):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"backend": "xla", "plugins": plugins},
        plugins=[StepWatcher()],
        mixed_precision="bf16" if autocast else "no",
    )
    with one_at_a_time():
        net = model() if autocast else model().to(torch.bfloat16)
        optimizer = adamw(net.parameters())
    net, optimizer = accelerator.prepare(net, optimizer)
    losses = []
    size, rank = accelerator.data_parallel_size, accelerator.data_parallel_rank
    for batch in token_batches(STEPS, size=4):
        mine = {k: v.chunk(size)[rank].to(accelerator.device) for k, v in batch.items()}
        loss = forward(net, mine).loss
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach().float(), "mean"))
        optimizer.step()
        optimizer.zero_grad()
    graphs, losses = compiled(), [float(loss) for loss in losses]
    hlo = accelerator.run.state(accelerator.plan.plugin("step_watcher"))["hlo"][-1]
    moments = {v.dtype for entries in optimizer.state.values() for v in entries.values() if v.dim()}
    weights = {n: v.float() for n, v in accelerator.get_state_dict(net).items()}
    return losses, weights, moments, {p.dtype for p in net.parameters()}, hlo, graphs


@pytest.mark.parametrize(
    ("ranks", "plugins", "autocast"),
    [(2, ["zero1"], True), (2, ["zero1"], False), (2, [TP2, "sequence_parallel"], True)],
    ids=["autocast-zero1", "bf16-zero1", "autocast-tp2-sp"],
)
def test_bf16(ranks, plugins, autocast):
    losses, weights, moments, parameters, hlo, graphs = run_ranks(
        train_on_rank, ranks, plugins, autocast, backend="xla", timeout=110
    )[0]
    expected_losses, expected = run_ranks(train_alone, 1, autocast, backend=None)[0]
    assert parameters == {torch.float32 if autocast else torch.bfloat16}
    assert moments == {torch.float32}
    assert graphs == 2
    dots = re.findall(r"= (\w+)\[[\d,]*\]\S* dot\(", hlo)
    assert dots.count("bf16") >= 21, "the matrix products of two layers, forward and backward"
    assert losses == pytest.approx(expected_losses, rel=5e-3)
    assert_close(weights, expected, tolerance=2e-2)
