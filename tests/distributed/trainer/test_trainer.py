"""transformers' Trainer by strategies does what it does in one process."""

from __future__ import annotations

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.trainer.trainer_support import assert_same, squared_logits, train_on_rank, train_with_stock

COMPOSITIONS = {
    "dp2+zero1": (2, 2, {"zero_1": True}),
    "tp2+sp": (2, 1, {"tensor_parallel_size": 2}),
    "pp2": (2, 1, {"pipeline_parallel_size": 2, "pipeline_parallel_num_microbatches": 2}),
    "tp2xdp2+zero1": (4, 2, {"tensor_parallel_size": 2, "zero_1": True}),
}


MIDDLE = {"save_strategy": "steps", "save_steps": 2}  # an epoch has three steps


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """What transformers' Trainer does, by the number of ranks that see different data."""
    folder = tmp_path_factory.mktemp("stock")
    two = run_ranks(train_with_stock, 2, str(folder / "two"), 2)
    return {1: train_with_stock(folder / "one"), 2: two[0]}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_the_same_training(name, stock, tmp_path, capfd):
    """Accumulation, a short last window and batch, clipping, a schedule, evaluation with metrics, checkpoints."""
    ranks, with_data, more = COMPOSITIONS[name]
    results = run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more)
    for result in results:
        assert_same(result, stock[with_data])
    said = [line for line in capfd.readouterr().out.splitlines() if "'loss'" in line or "train_loss" in line]
    assert len(said) == stock[with_data]["steps"] + 1
    assert all(line.startswith("[rank 0]") for line in said)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("pp2", "label_smoothing"),
        ("tp2+sp", "label_smoothing"),
        ("pp2", "compute_loss_func"),
        ("tp2xdp2+zero1", "compute_loss_func"),
    ],
)
def test_another_loss(name, option, tmp_path):
    """Computed by the Trainer from logits; in a pipeline by the last stage."""
    ranks, with_data, more = COMPOSITIONS[name]
    arguments = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no"}
    extra = {}
    if option == "label_smoothing":
        arguments["label_smoothing_factor"] = 0.2
    else:
        extra["compute_loss_func"] = squared_logits
    alone = train_with_stock(tmp_path / "stock", **arguments, **extra)
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | arguments, extra):
        assert_same(result, alone)


@pytest.mark.parametrize(
    ("before", "after", "at"),
    [
        ("dp2+zero1", "dp2+zero1", 2),
        ("dp2+zero1", "dp2+zero1", 4),
        ("pp2", "pp2", 2),
        ("tp2xdp2+zero1", "tp2xdp2+zero1", 2),
        ("dp2+zero1", "tp2xdp2+zero1", 2),
        ("pp2", "tp2+sp", 2),
    ],
)
def test_resume(before, after, at, stock, tmp_path):
    """From the checkpoint in the middle of an epoch, on the same mesh or on another that sees as much data at once."""
    ranks, with_data, more = COMPOSITIONS[before]
    first = run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | MIDDLE | {"stop_after": at})
    assert first[0]["steps"] == at
    ranks, with_data, more = COMPOSITIONS[after]
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | MIDDLE, None, True):
        result["train_loss"] = None  # of the steps of this call
        assert_same(result, stock[with_data])


@pytest.mark.parametrize("name", ["dp2+zero1", "tp2+sp", "pp2"])
def test_packed_documents(name, tmp_path):
    """Positions that begin anew within a row: what belongs to different documents does not attend to each other."""
    ranks, with_data, more = COMPOSITIONS[name]
    arguments = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "packed": True}
    packed = train_with_stock(tmp_path / "stock", **arguments)
    apart = train_with_stock(tmp_path / "apart", **arguments | {"packed": False})
    assert abs(packed["losses"][0] - apart["losses"][0]) > 1e-3
    for result in run_ranks(train_on_rank, ranks, str(tmp_path), with_data, more | arguments):
        assert_same(result, packed)
