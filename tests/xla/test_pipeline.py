"""Pipelines on real XLA ranks train like one process of plain PyTorch, in a few graphs for each stage."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, compare, train_alone
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import token_batches
from tests.distributed.strategies.pipeline.pipeline_support import FAMILIES, TRAINING, pipeline
from tests.distributed.strategies.pipeline.test_use import faulty
from tests.xla.parity import train_on_xla_rank

SIZE = 8
STEPS = 3
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
TP = {"tensor_parallel_size": 2}
CASES = {
    "1f1b": (2, [pipeline(2, 4)]),
    "gpipe": (2, [pipeline(2, 4, schedule="gpipe")]),
    "zero-bubble": (2, [pipeline(2, 4, schedule="zero-bubble")]),
    "interleaved": (2, [pipeline(2, 4, **INTERLEAVED)]),
    "one-micro-batch": (2, [pipeline(2, 1)]),
    "dp2": (4, [pipeline(2, 2)]),
    "dp2-zero1": (4, [pipeline(2, 2), "zero1"]),
    "dp2-fully-sharded": (4, [pipeline(2, 2), "fully_sharded"]),
    "dp2-resharded": (4, [pipeline(2, 2), {"fully_sharded": {"reshard_after_forward": True}}]),
    "tp2": (4, [pipeline(2, 2, **TP)]),
    "tp2-sp": (4, [pipeline(2, 2, **TP), "sequence_parallel"]),
    "pp4": (4, [pipeline(4, 4)]),
}
OFTEN = {("llama", "1f1b"), ("gpt2-tied", "gpipe"), ("llama", "dp2-zero1"), ("gpt2-tied", "tp2-sp")} | {
    ("gpt2-tied", "dp2-fully-sharded")
}
# compiling takes most of the time, and more of it the more blocks there are
BLOCKS = {"interleaved": 4, "pp4": 4}


def check(family, case, training=TRAINING):
    """Trains and compares with one process; returns how many graphs all ranks had compiled after each step."""
    ranks, plugins = CASES[case]
    made = token_batches(STEPS * training.accumulation, size=SIZE)
    model_fn = functools.partial(FAMILIES[family], blocks=BLOCKS.get(case, 2))
    reference = run_ranks(train_alone, 1, model_fn, made, training, timeout=110)[0]
    config = {"plugins": plugins}
    results = run_ranks(train_on_xla_rank, ranks, model_fn, made, config, training, backend="xla", timeout=280)
    compare(dataclasses.replace(reference, gradients={}), results[0][0])
    return results[0][1]


def cases():
    for family in ("llama", "gpt2-tied"):
        for case in CASES:
            yield pytest.param(family, case, marks=() if (family, case) in OFTEN else (pytest.mark.slow,))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("family", "case"), list(cases()))
def test_trains_like_one_process_and_compiles_once(family, case):
    graphs = check(family, case)
    assert graphs[-1] == graphs[1], "compiled again after the second step"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_accumulates_like_one_process():
    graphs = check("gpt2-tied", "1f1b", Training(max_norm=0.5, accumulation=2))
    assert graphs[-1] == graphs[1]


def fails_and_goes_on():
    """What a stage's error becomes on this rank; then, with a model that is well, logits in evaluation."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": [pipeline(2, 2)]})
    with one_at_a_time():
        torch.manual_seed(0)
        sick = faulty(3, 2, False).train()
        torch.manual_seed(0)
        well = FAMILIES["llama"](blocks=2).eval()
    batch = {name: value.to(accelerator.device) for name, value in token_batches(1, size=4)[0].items()}
    with pytest.raises(ArithmeticError, match="this stage is at fault"):
        accelerator.prepare(sick)(**batch)
    output = accelerator.prepare(well)(**batch)
    accelerator.run.backend.step_boundary()
    return output.loss.cpu(), output.logits.cpu()


def replica_raises():
    """Where the error of a replica's first stage comes from, before anybody in that replica knows what it hands on."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"backend": "xla", "plugins": [pipeline(2, 2)]})
    with one_at_a_time():
        torch.manual_seed(0)
        model = faulty(0, accelerator.data_parallel_rank or None, False).train()
    batch = {name: value.to(accelerator.device) for name, value in token_batches(1, size=4)[0].items()}
    with pytest.raises(ArithmeticError, match="this stage is at fault") as caught:
        accelerator.prepare(model)(**batch)
    return str(caught.value.__cause__)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_replicas_end_with_the_error_of_a_stage_of_another():
    found = run_ranks(replica_raises, 4, backend="xla", timeout=280)
    place = "Rank 1 (stage 0, forward pass of micro-batch 0) raised this; all ranks raise it."
    assert found == [place] * 4


@pytest.mark.timeout(300)
def test_a_stage_that_raises_and_an_evaluation():
    found = run_ranks(fails_and_goes_on, 2, backend="xla", timeout=280)
    torch.manual_seed(0)
    model = FAMILIES["llama"](blocks=2).eval()
    with torch.no_grad():
        expected = model(**token_batches(1, size=4)[0])
    for loss, logits in found:
        torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
