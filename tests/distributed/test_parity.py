"""Every composition of the built-in strategies trains like one process: five AdamW steps in fp32."""

from __future__ import annotations

import pytest

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, compare, train_alone, train_on_rank
from tests.distributed.models import MODELS, token_batches

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
TP4 = {"model_parallelism": {"tensor_parallel_size": 4}}
SP = "sequence_parallel"
ZERO = "zero1"

COMPOSITIONS = {
    "dp2": (2, []),
    "dp4": (4, []),
    "zero1-dp2": (2, [ZERO]),
    "tp2": (2, [TP2]),
    "tp4": (4, [TP4]),
    "tp2-sp": (2, [TP2, SP]),
    "tp2-dp2-zero1-sp": (4, [TP2, SP, ZERO]),
}
STEPS = 5


@pytest.fixture(scope="module")
def references():
    """References by model and training, made once."""
    made: dict = {}

    def get(model, training):
        key = (model, training.accumulation, training.max_norm)
        if key not in made:
            batches = token_batches(STEPS * training.accumulation)
            made[key] = run_ranks(train_alone, 1, MODELS[model], batches, training)[0]
        return made[key]

    return get


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("model", MODELS)
def test_trains_like_one_process(references, model, composition, max_norm, accumulation):
    ranks, plugins = COMPOSITIONS[composition]
    training = Training(accumulation=accumulation, max_norm=max_norm)
    batches = token_batches(STEPS * accumulation)
    trace = run_ranks(train_on_rank, ranks, MODELS[model], batches, {"plugins": plugins}, training)[0]
    compare(references(model, training), trace)
