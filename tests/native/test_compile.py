"""torch.compile on the stand-in for the native device: right numbers, and no compilation for each step."""

from __future__ import annotations

import os

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.loop.test_compile import COMPOSITIONS, check, check_communication

SLOW = ("zero1-recompute", "pp2")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "composition", ["dp2-flash", "tp2-sp", *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]
)
def test_a_compiled_model_trains_like_one_process(composition):
    sends = composition.startswith("pp")
    graphs = check(COMPOSITIONS[composition], "after", "native-p2p" if sends else "native")
    if composition == "dp2-flash":
        assert graphs == [2, 2], (
            "the model's hook before buffers are sent, and the model, in which ranks do not communicate"
        )


def test_a_graph_ends_at_a_collective():
    check_communication("native")


def with_odd_batches(compiled):
    """Losses of three steps, of which the last batch is smaller, and of an evaluation with yet another size."""
    from torch._dynamo import config

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    used = torch.compile(model, backend="neuron") if compiled else model
    losses = []
    for rows in (4, 4, 3):
        loss = used(torch.randn(rows, 8, device=accelerator.device)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(used.eval()(torch.randn(2, 8, device=accelerator.device)).mean().item())
    assert not config.automatic_dynamic_shapes
    accelerator.end_training()
    assert config.automatic_dynamic_shapes, "restored"
    return losses


def test_the_last_odd_batch_and_an_evaluation_are_compiled_for_their_own_shapes():
    plain, compiled = (run_ranks(with_odd_batches, 2, compiled, backend="native") for compiled in (False, True))
    assert compiled == plain


def loading():
    from neuron_accel import NeuronAccelerator

    before = os.environ.pop("HF_DEACTIVATE_ASYNC_LOAD", None)
    NeuronAccelerator()
    return before, os.environ["HF_DEACTIVATE_ASYNC_LOAD"]


def test_transformers_loads_in_one_thread():
    assert run_ranks(loading, 1, backend="native") == [(None, "1")]
