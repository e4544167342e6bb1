"""Training in bfloat16, by autocast and with parameters in bf16, stays as close to one process as bf16 allows."""

from __future__ import annotations

import warnings

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.loop.loops_support import COMPOSITIONS, adamw, assert_close, forward, model
from tests.distributed.models import token_batches

STEPS = 4


def train_alone(autocast):
    net = model() if autocast else model().to(torch.bfloat16)
    # What a rank with fp32 master weights does: update in fp32, train with what that rounds to.
    masters = [p.detach().clone().float().requires_grad_() for p in net.parameters()]
    optimizer = adamw(masters)
    losses = []
    for batch in token_batches(STEPS, size=4):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = forward(net, batch).loss
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, net.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, net.parameters(), strict=True):
                parameter.copy_(master)
    return losses, {name: value.float() for name, value in net.state_dict().items()}


def train_on_rank(plugins, autocast):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, mixed_precision="bf16" if autocast else "no")
    net = model() if autocast else model().to(torch.bfloat16)
    net, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    losses, dtypes = [], set()
    for batch in token_batches(STEPS, size=4):
        mine = {k: v.chunk(accelerator.data_parallel_size)[accelerator.data_parallel_rank] for k, v in batch.items()}
        loss = forward(net, mine).loss
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        optimizer.step()
        dtypes |= {v.dtype for state in optimizer.state.values() for v in state.values() if v.dim()}
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(net)
    return losses, {n: v.float() for n, v in weights.items()}, dtypes, {p.dtype for p in net.parameters()}


@pytest.mark.parametrize(
    ("composition", "autocast"),
    [(name, True) for name in COMPOSITIONS] + [("zero1", False), ("tp2-dp2-zero1-sp", False)],
)
def test_bf16(composition, autocast):
    ranks, plugins = COMPOSITIONS[composition]
    losses, weights, moments, parameters = run_ranks(train_on_rank, ranks, plugins, autocast)[0]
    expected_losses, expected = run_ranks(train_alone, 1, autocast, backend=None)[0]
    assert parameters == {torch.float32 if autocast else torch.bfloat16}
    assert moments == {torch.float32}
    # An entry of bf16 has eight bits. Losses are means over many of them.
    assert losses == pytest.approx(expected_losses, rel=5e-3)
    assert_close(weights, expected, tolerance=2e-2)


def test_a_plain_optimizer_keeps_bf16_parameters_equal_on_all_ranks():
    results = run_ranks(train_on_rank, 2, [], False)
    assert results[0][2] == {torch.bfloat16}
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name])


def warned(precision):
    from neuron_accel import NeuronAccelerator

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator = NeuronAccelerator(mixed_precision=precision)
    net = accelerator.prepare(torch.nn.Linear(4, 4))
    said = [str(w.message) for w in caught if "mixed_precision" in str(w.message)]
    return said, accelerator.scaler, net(torch.full((1, 4), 1 / 3)).dtype


def test_fp16_which_accelerate_leaves_out_on_the_cpu_is_warned_of():
    said, scaler, dtype = run_ranks(warned, 1, "fp16")[0]
    assert (len(said), scaler, dtype) == (1, None, torch.float32)
    assert "has no effect on the CPU" in said[0]
    assert run_ranks(warned, 1, "bf16")[0][0] == []
