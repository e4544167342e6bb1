"""Parameters that are frozen and unfrozen while a model trains, on ranks of torch_xla."""

from __future__ import annotations

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.models import token_batches
from tests.distributed.strategies.test_freezing import assert_llamas, llamas_on_ranks

COMPOSITIONS = {
    "data-parallel": [],
    "zero1": ["zero1"],
    "tp2-sp-zero1": [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel", "zero1"],
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_trains_like_one_process(name):
    data, composition = token_batches(6), {name: COMPOSITIONS[name]}
    results = run_ranks(llamas_on_ranks, 2, composition, data, "xla", backend="xla", timeout=110)
    assert_llamas(composition, results[0], data)
