"""Training on emulated cores, a process for each, gives what one process of plain PyTorch does.

Compositions at large are compared on ranks that are threads (tests/xla); here each strategy is, once."""

from __future__ import annotations

import dataclasses

import pytest

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, compare, train_alone
from tests.distributed.models import MODELS, token_batches
from tests.xla.parity import train_on_xla_rank

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
PP2 = {"model_parallelism": {"pipeline_parallel_size": 2}}
SP, ZERO = "sequence_parallel", "zero1"
COMPOSITIONS = {
    "dp2": ("llama", 2, []),
    "zero1": ("gpt2-tied", 2, [ZERO]),
    "tp2-sp": ("llama", 2, [TP2, SP]),
    "tp2-dp2-zero1": ("llama-tied", 4, [TP2, ZERO]),
    "fully-sharded-recompute": ("llama", 2, ["fully_sharded", "activation_checkpointing"]),
    "pp2": ("llama", 2, [PP2]),
    "pp2-dp2": ("llama", 4, [PP2]),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_trains_like_one_process(name):
    model, ranks, plugins = COMPOSITIONS[name]
    training = Training(max_norm=0.5)
    batches = token_batches(3)
    reference = run_ranks(train_alone, 1, MODELS[model], batches, training)[0]
    results = run_ranks(
        train_on_xla_rank, ranks, MODELS[model], batches, {"plugins": plugins}, training, backend="neuron", timeout=180
    )
    compare(dataclasses.replace(reference, gradients={}), results[0][0])
    assert all(trace is None for trace, _ in results[1:])
