"""A script with its own loop and its own process group connects its ranks, or raises an error with the reason."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.errors import UsageError
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import Trace, Training, compare, train_alone
from tests.distributed.models import MODELS, token_batches

STEPS, MAX_NORM = 3, 0.5


def train(way, asks=False):
    """Norms and weights of a script that knows nothing of this project but the optimizer.

    Args:
        way: how it makes its process group.
        asks: whether it asks torch_xla for the number of ranks before it makes the optimizer.
    """
    import torch.distributed as dist
    import torch_xla
    import torch_xla.distributed.xla_backend
    import torch_xla.runtime as xr

    from neuron_accel import ZeroRedundancyOptimizer

    dist.init_process_group(way.partition(":")[0], init_method=way if way == "xla://" else None)
    torch.manual_seed(0)
    model = MODELS["llama"]().to("xla").train()
    torch_xla.sync()  # the weights are there before anything says that there are other ranks
    if asks:
        xr.world_size()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.01, max_norm=MAX_NORM
    )
    norms = []
    for batch in token_batches(STEPS):
        mine = {name: value.chunk(dist.get_world_size())[dist.get_rank()].to("xla") for name, value in batch.items()}
        model(**mine).loss.backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
        torch_xla.sync()
    return [norm.item() for norm in norms], {name: value.cpu() for name, value in model.state_dict().items()}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", ["xla", "xla://", "gloo"])
def test_ranks_train_together_however_the_process_group_was_made(way):
    alone = run_ranks(train_alone, 1, MODELS["llama"], token_batches(STEPS), Training(max_norm=MAX_NORM))[0]
    for norms, weights in run_ranks(train, 2, way, backend="neuron", timeout=150):
        compare(Trace([], alone.norms, {}, alone.weights), Trace([], norms, {}, weights))


@pytest.mark.timeout(240)
def test_a_rank_that_torch_xla_keeps_apart_does_not_train_alone():
    """Without ``init_method="xla://"`` torch_xla answers that there is one rank, and keeps to it."""
    with pytest.raises(RanksError) as caught:
        run_ranks(train, 2, "xla", asks=True, backend="neuron", timeout=150)
    error = caught.value.__cause__
    assert isinstance(error, UsageError)
    assert "treats this process as the only rank, but 2 were launched" in error.what
    assert 'init_method="xla://"' in error.fix
