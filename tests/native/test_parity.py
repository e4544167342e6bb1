"""Training on the stand-in for the native device gives what one process of plain PyTorch does.

Compositions that the conformance kit (test_conformance.py) does not have."""

from __future__ import annotations

import pytest

from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from tests.distributed.models import MODELS, token_batches

FLASH = {"flash_attention": {"block_size": 5}}
TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
COMPOSITIONS = {
    "zero1-flash": ("gpt2-tied", ["zero1", FLASH]),
    "tp2-sp-overlapping": ("llama", [TP2, {"sequence_parallel": {"overlap_gather": True}}]),
    "tp2-sp-flash-chunked": ("llama", [TP2, "sequence_parallel", FLASH, {"chunked_loss": {"chunks": 3}}]),
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition):
    model, plugins = COMPOSITIONS[composition]
    training = Training(max_norm=0.5)
    assert_parallel_equivalence(MODELS[model], token_batches(2), plugins, ranks=2, training=training, backend="native")
