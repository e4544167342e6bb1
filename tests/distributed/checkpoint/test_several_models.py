"""Checkpoints with several models: which of them is which, in another run and for `consolidate`."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from neuron_accel.checkpoint.tools.consolidate import consolidate
from neuron_accel.cli.main import main
from neuron_accel.errors import CheckpointError
from neuron_accel.testing import run_ranks


class Student(nn.Linear):
    def __init__(self, value, bias=False):
        super().__init__(4, 4, bias=bias)
        nn.init.constant_(self.weight, value)


class Other(Student):
    pass


class Normed(nn.BatchNorm1d):
    """Has buffers that differ between ranks."""

    def __init__(self, value):
        super().__init__(4)
        nn.init.constant_(self.weight, value)


def accelerator_of(*models, evaluated=()):
    """Prepares models in this order, and those at positions ``evaluated`` for evaluation only."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(cpu=True)
    prepared = [accelerator.prepare_model(m, evaluation_mode=i in evaluated) for i, m in enumerate(models)]
    return accelerator, prepared


def values(prepared):
    return [float(module.weight.detach().flatten()[0]) for module in prepared]


def save(folder, *models, evaluated=()):
    accelerator, prepared = accelerator_of(*models, evaluated=evaluated)
    for module in prepared:
        if isinstance(module, nn.BatchNorm1d):
            module(torch.randn(8, 4) + accelerator.process_index)
    accelerator.save_state(folder)
    return [module.running_mean.clone() for module in prepared if isinstance(module, nn.BatchNorm1d)]


def load(folder, *models, evaluated=()):
    accelerator, prepared = accelerator_of(*models, evaluated=evaluated)
    accelerator.load_state(folder)
    return values(prepared)


def test_models_are_matched_by_class_parameters_and_training(tmp_path):
    by_class, by_shape, by_use = (str(tmp_path / name) for name in ("class", "shape", "use"))
    save(by_class, Student(1.0), Other(2.0))
    assert load(by_class, Other(0.0), Student(0.0)) == [2.0, 1.0]
    save(by_shape, Student(1.0), Student(2.0, bias=True))
    assert load(by_shape, Student(0.0, bias=True), Student(0.0)) == [2.0, 1.0]
    assert load(by_shape, Student(0.0, bias=True)) == [2.0]
    save(by_use, Student(1.0), Student(2.0), evaluated=[0])
    assert load(by_use, Student(0.0), Student(0.0), evaluated=[1]) == [2.0, 1.0]
    assert load(by_use, Student(0.0)) == [2.0]


def test_equal_models_keep_their_order_and_another_number_is_named(tmp_path):
    folder = str(tmp_path / "state")
    save(folder, Student(1.0), Student(2.0))
    assert load(folder, Student(0.0), Student(0.0)) == [1.0, 2.0]
    with pytest.raises(CheckpointError, match=r"has 2 models, this training 1[\s\S]*0 \(Student\), 1 \(Student\)"):
        load(folder, Student(0.0))
    with pytest.raises(CheckpointError, match="has 2 models, this training 3"):
        load(folder, Student(0.0), Student(0.0), Student(0.0))
    # Which weight does not fit is said where the number does.
    with pytest.raises(CheckpointError, match="has no 'bias'"):
        load(folder, Student(0.0), Student(0.0, bias=True))


def swapped_with_buffers(folder):
    (mean,) = save(folder, Student(1.0), Normed(2.0))
    accelerator, (normed, student) = accelerator_of(Normed(0.0), Student(0.0))
    accelerator.load_state(folder)
    return values([normed, student]) == [2.0, 1.0] and torch.equal(normed.running_mean, mean)


def test_buffers_of_each_rank_follow_their_model(tmp_path):
    assert run_ranks(swapped_with_buffers, 2, str(tmp_path / "state")) == [True, True]


def test_consolidate_chooses_among_models(tmp_path, capsys):
    def weight(folder):
        return float(load_file(folder / "model.safetensors")["weight"][0, 0])

    state = tmp_path / "teacher"
    save(str(state), Student(1.0), Student(2.0), evaluated=[0])
    assert main(["consolidate", "-q", str(state), str(tmp_path / "only")]) == 0
    assert "1 (Student) is written; left out: 0 (Student, only evaluated)" in capsys.readouterr().out
    assert weight(tmp_path / "only") == 2.0
    assert main(["consolidate", "-q", "--model", "0", str(state), str(tmp_path / "teachers")]) == 0
    assert weight(tmp_path / "teachers") == 1.0

    state = tmp_path / "two"
    save(str(state), Student(1.0), Other(2.0))
    for number in (None, 2):
        with pytest.raises(CheckpointError, match=r"0 \(Student\), 1 \(Other\)"):
            consolidate(state, tmp_path / "out", model=number)
    consolidate(state, tmp_path / "out", model=1)
    assert weight(tmp_path / "out") == 2.0
