"""A checkpoint saved on any mesh loads on any other: weights and optimizer state bit for bit, and the next loss up to
rounding."""

from __future__ import annotations

import pytest
import torch

from neuron_accel import NeuronAccelerator
from neuron_accel.testing import run_ranks
from tests.distributed.checkpoint.checkpoint_support import (
    TOPOLOGIES,
    assert_equal,
    load_and_step,
    load_each_and_step,
    train_and_save,
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Returns checkpoints by model and mesh, each created once."""
    made: dict = {}

    def get(model, topology):
        if (model, topology) not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / "state"
            ranks, plugins = TOPOLOGIES[topology]
            contents, loss = run_ranks(train_and_save, ranks, str(folder), model, plugins)[0]
            made[model, topology] = folder, contents, loss
        return made[model, topology]

    return get


@pytest.mark.parametrize("into", TOPOLOGIES)
def test_any_mesh_loads_what_any_other_saved(saved, into):
    """Checkpoints are loaded one after another into the same objects, so that each replaces the state of the previous
    one."""
    ranks, plugins = TOPOLOGIES[into]
    expected = {out_of: saved("gpt2-tied", out_of) for out_of in TOPOLOGIES}
    folders = [str(folder) for folder, _, _ in expected.values()]
    found = run_ranks(load_each_and_step, ranks, folders, "gpt2-tied", plugins)[0]
    for (out_of, (_, contents, loss)), (weights, next_loss) in zip(expected.items(), found, strict=True):
        assert_equal(contents, weights, f"saved by {out_of}")
        assert next_loss == pytest.approx(loss, rel=1e-5), out_of


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_same_mesh_goes_on_bit_for_bit(saved, topology):
    folder, _, loss = saved("llama", topology)
    ranks, plugins = TOPOLOGIES[topology]
    _, next_loss = run_ranks(load_and_step, ranks, str(folder), "llama", plugins)[0]
    assert next_loss == loss


def two_models_with_the_same_names(folder):
    accelerator = NeuronAccelerator()
    torch.manual_seed(0)
    models = accelerator.prepare(torch.nn.Linear(3, 2), torch.nn.Linear(3, 2))
    before = [{k: v.clone() for k, v in accelerator.get_state_dict(model).items()} for model in models]
    accelerator.save_state(folder)
    with torch.no_grad():
        for model in models:
            accelerator.unwrap_model(model).weight.zero_()
    accelerator.load_state(folder)
    after = [accelerator.get_state_dict(model) for model in models]
    return [all(torch.equal(old[name], new[name]) for name in old) for old, new in zip(before, after, strict=True)]


def test_two_models_may_have_parameters_of_the_same_name(tmp_path):
    assert run_ranks(two_models_with_the_same_names, 2, str(tmp_path)) == [[True, True]] * 2


def state_in_place(folder):
    accelerator = NeuronAccelerator()
    model = torch.nn.Linear(8, 4)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def step():
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def moments():
        return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]

    step()
    accelerator.save_state(folder)
    saved, held = [moment.clone() for moment in moments()], moments()
    step()
    assert not any(map(torch.equal, moments(), saved))
    accelerator.load_state(folder)
    assert all(map(torch.equal, moments(), saved))
    assert [moment.data_ptr() for moment in moments()] == [moment.data_ptr() for moment in held]


def test_state_of_an_optimizer_is_read_into_the_tensors_that_hold_it(tmp_path):
    run_ranks(state_in_place, 1, str(tmp_path / "state"))
