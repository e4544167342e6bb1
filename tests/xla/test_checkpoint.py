"""What XLA ranks saved, ranks of torch.distributed load, and the other way round: weights and optimizer bit for bit.
Training and loaders go on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from neuron_accel.checkpoint.tools.report import verify
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import (
    BATCHES,
    TP2,
    TP4,
    Trained,
    assert_equal,
    load_each_and_step,
    train_and_save,
)
from tests.distributed.checkpoint.test_resume import SAMPLES, _samples

TOPOLOGIES = {
    "dp3-zero1": (3, ["zero1"]),  # 3 divides nothing: pieces are padded
    "tp2-dp2-zero1": (4, [TP2, "zero1"]),
    "tp4": (4, [TP4]),
    "tp2-sp": (2, [TP2, "sequence_parallel"]),
}


@pytest.mark.parametrize(
    ("model", "one", "other"),
    [
        ("gpt2-tied", "dp3-zero1", "tp2-dp2-zero1"),
        pytest.param("llama-padded", "tp2-dp2-zero1", "dp3-zero1", marks=pytest.mark.slow),
        ("llama-padded", "tp4", "tp2-sp"),
    ],
)
def test_checkpoints_cross_between_backends(tmp_path, model, one, other):
    """Saved by XLA ranks of one mesh and by gloo ranks of another; each loads both."""
    (n, plugins), (m, others) = TOPOLOGIES[one], TOPOLOGIES[other]
    folders = [str(tmp_path / "xla"), str(tmp_path / "gloo")]
    expected = [
        run_ranks(train_and_save, n, folders[0], model, plugins, on="xla", backend="xla", timeout=100)[0],
        run_ranks(train_and_save, m, folders[1], model, others)[0],
    ]
    assert verify(tmp_path / "xla") == []
    found = {
        "gloo": run_ranks(load_each_and_step, m, folders, model, others)[0],
        "xla": run_ranks(load_each_and_step, n, folders, model, plugins, on="xla", backend="xla", timeout=100)[0],
    }
    for loader, results in found.items():
        for saver, (contents, loss), (weights, next_loss) in zip(("xla", "gloo"), expected, results, strict=True):
            assert_equal(contents, weights, f"{saver} to {loader}")
            assert next_loss == pytest.approx(loss, rel=1e-5), f"{saver} to {loader}"


def _goes_on(folder: str, plugins: list[Any], load: bool) -> tuple[list[float], list[int]]:
    """Losses of three steps after a checkpoint, and how many graphs there have been after each."""
    import torch_xla.debug.metrics as metrics

    trained = Trained("gpt2-noisy", plugins, on="xla", seed=int(load))
    if load:
        trained.accelerator.load_state(folder)
    else:
        for batch in BATCHES[:2]:
            trained.step(batch)
        trained.accelerator.save_state(folder)
    losses, graphs = [], []
    for batch in BATCHES[2:5]:
        losses.append(trained.step(batch))
        graphs.append(metrics.counter_value("UncachedCompile"))
    return losses, graphs


@pytest.mark.parametrize("topology", [pytest.param("dp3-zero1", marks=pytest.mark.slow), "tp2-dp2-zero1"])
def test_the_same_mesh_goes_on_bit_for_bit(tmp_path, topology):
    """With dropout, whose random numbers are the device's."""
    ranks, plugins = TOPOLOGIES[topology]
    losses, _ = run_ranks(_goes_on, ranks, str(tmp_path / "c"), plugins, False, backend="xla", timeout=100)[0]
    found, graphs = run_ranks(_goes_on, ranks, str(tmp_path / "c"), plugins, True, backend="xla", timeout=100)[0]
    assert found == losses
    assert graphs[1] == graphs[2]  # the first step of any training is of a kind of its own


@pytest.mark.parametrize(("before", "after", "into"), [(1, 2, "xla"), (3, 2, "xla"), (2, 1, "gloo")])
def test_each_sample_is_seen_once(tmp_path, before, after, into):
    """An epoch that is interrupted after three batches, on XLA ranks, goes on."""
    folder = str(tmp_path / "c")
    options = {"on": "xla"} if into == "xla" else {}
    first = run_ranks(_samples, before, folder, 2, "first", on="xla", backend="xla")
    second = run_ranks(_samples, after, folder, 2, "second", backend=into, **options)
    assert sorted(sample for seen, _ in (*first, *second) for sample in seen) == list(range(SAMPLES))
    following = [sample for _, following in second for sample in following]
    assert sorted(set(following)) == list(range(SAMPLES))


def _skips(folder: str) -> list[int]:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(backend="xla")
    loader = accelerator.prepare(DataLoader(range(16), batch_size=1))
    for index, _ in enumerate(loader):
        if index == 2:
            accelerator.save_state(folder)
            break
    accelerator.load_state(folder)
    rest = accelerator.skip_first_batches(loader, 3)  # by hand, as Accelerate's example does it
    return [int(x) for x in rest] + [int(x) for x in loader]


def test_skipping_by_hand_is_not_done_twice(tmp_path):
    seen = run_ranks(_skips, 2, str(tmp_path / "c"), backend="xla")
    assert seen[0] == [6, 8, 10, 12, 14, *range(0, 16, 2)]
    assert seen[1] == [7, 9, 11, 13, 15, *range(1, 16, 2)]
