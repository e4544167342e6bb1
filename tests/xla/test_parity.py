"""Every composition of the built-in strategies trains on real XLA ranks like one process of plain PyTorch: five AdamW
steps in fp32, in two graphs."""

from __future__ import annotations

import dataclasses

import pytest

from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import Training, compare, train_alone
from tests.distributed.models import MODELS, token_batches
from tests.xla.parity import train_on_xla_rank

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}
TP4 = {"model_parallelism": {"tensor_parallel_size": 4}}
SP, ZERO = "sequence_parallel", "zero1"
COMPOSITIONS = {
    "dp2": (2, []),
    "dp4": (4, []),
    "zero1-dp2": (2, [ZERO]),
    "zero1-dp4": (4, [ZERO]),
    "tp2": (2, [TP2]),
    "tp4": (4, [TP4]),
    "tp2-sp": (2, [TP2, SP]),
    "tp2-sp-keep": (2, [TP2, {SP: {"regather": False}}]),
    "tp2-dp2-zero1-sp": (4, [TP2, SP, ZERO]),
}
EIGHT = {
    "dp8": (8, []),
    "tp2-dp4-zero1-sp": (8, [TP2, SP, ZERO]),
    "tp4-dp2-zero1": (8, [TP4, ZERO]),
}
STEPS = 5


def check(model, composition, training, *, size=4):
    ranks, plugins = {**COMPOSITIONS, **EIGHT}[composition]
    batches = token_batches(STEPS * training.accumulation, size=size)
    reference = run_ranks(train_alone, 1, MODELS[model], batches, training)[0]
    results = run_ranks(
        train_on_xla_rank, ranks, MODELS[model], batches, {"plugins": plugins}, training, backend="xla", timeout=110
    )
    compare(dataclasses.replace(reference, gradients={}), results[0][0])
    # the first step makes the optimizer's state; micro-batches but the last are graphs of their own
    kinds = 2 if training.accumulation == 1 else 3
    assert results[0][1][-1] == results[0][1][1] <= kinds


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("model", ["llama", "gpt2-tied"])
def test_trains_like_one_process(model, composition):
    check(model, composition, Training(max_norm=0.5))


@pytest.mark.parametrize("composition", ["dp2", "zero1-dp2", "tp2-dp2-zero1-sp"])
def test_accumulates_like_one_process(composition):
    check("llama", composition, Training(accumulation=2))


@pytest.mark.parametrize("composition", ["zero1-dp2", "tp2-sp", "tp2-sp-keep"])
@pytest.mark.parametrize("model", ["llama-tied", "gpt2"])
def test_tied_and_untied(model, composition):
    check(model, composition, Training())


@pytest.mark.parametrize("composition", EIGHT)
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2-tied", marks=pytest.mark.slow)])
def test_eight_ranks(model, composition):
    check(model, composition, Training(max_norm=0.5), size=8)


def prepare_overlapping():
    from neuron_accel import NeuronAccelerator

    plugins = [TP2, {SP: {"overlap_gather": True}}]
    NeuronAccelerator(config={"plugins": plugins, "backend": "xla"}).prepare(MODELS["llama"]())


def test_gathers_are_left_to_the_compiler():
    with pytest.raises(RanksError, match="cannot be gathered while the layer computes") as caught:
        run_ranks(prepare_overlapping, 2, backend="xla", timeout=110)
    assert type(caught.value.errors[0]).__name__ == "PlanError"
