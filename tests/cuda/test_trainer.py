"""transformers' Trainer on CUDA ranks has the results of the stock Trainer on the CPU."""

from __future__ import annotations

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.trainer.trainer_support import assert_same, train_on_rank, train_with_stock

COMPOSITIONS = {
    "dp2-zero1": (2, {"zero_1": True}),
    "dp2-fully-sharded": (2, {"fully_sharded": True}),
    "tp2-sp": (1, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_same_training(name, tmp_path):
    with_data, more = COMPOSITIONS[name]
    stock = run_ranks(train_with_stock, with_data, str(tmp_path / "stock"), with_data, timeout=100)[0]
    options = {**more, "use_cpu": False}
    for result in run_ranks(train_on_rank, 2, str(tmp_path), with_data, options, backend="cuda", timeout=100):
        assert_same(result, stock)
