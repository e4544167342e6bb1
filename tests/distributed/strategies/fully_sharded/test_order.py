"""Fully sharded ranks that call different modules get an error, and never each other's weights."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

from neuron_accel import FullyShardedPlugin
from neuron_accel.loop.watchdog import VARIABLE
from neuron_accel.testing import RanksError, run_ranks

STAGE_3, STAGE_2, ALONE = {}, {"reshard_after_forward": False}, {"prefetch": 0}


class Branches(nn.Module):
    """Blocks, of which a batch uses those with the given numbers, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.first = nn.Linear(4, 4)

    def forward(self, x, path):
        x = self.first(x)
        for index in path:
            x = x + torch.tanh(self.layers[index](x))
        return x.square().mean()


def trained(options, steps):
    """Each step is, for each rank, the numbers of the blocks that it calls; the weights stay those of one process."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[FullyShardedPlugin(modules="layers.*", **options)])
    torch.manual_seed(0)
    model = Branches()
    plain = Branches()
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for paths in steps:
        path, trains = paths[accelerator.process_index], paths[-1] == "train"
        x = torch.ones(2, 4)
        with torch.set_grad_enabled(trains):
            loss = model(x, path)
        if trains:
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.gather(loss.detach())
        expected = plain(x, path)
        assert torch.allclose(loss, expected, atol=1e-6)
        if trains:
            expected.backward()
            plain_optimizer.step()
            plain_optimizer.zero_grad()


ONE, OTHER = (0, 1), (0, 2)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (STAGE_3, [(ONE, OTHER, "train")]),
        (STAGE_2, [(ONE, ONE, "train"), (ONE, ONE, "train"), (ONE, OTHER, "train")]),
        (ALONE, [(ONE, ONE, "train"), (ONE, OTHER)]),
    ],
    ids=["at first", "after two steps, stage 2", "in an evaluation, no prefetch"],
)
def test_ranks_that_call_different_modules_are_told_which(options, steps):
    with pytest.raises(RanksError) as raised:
        run_ranks(trained, 2, options, steps)
    text = str(raised.value)
    assert "DesyncError: Data-parallel ranks do not make the same calls" in text
    assert "rank 0 calls the forward pass of 'Branches.layers.1'" in text
    assert "rank 1 calls the forward pass of 'Branches.layers.2'" in text
    assert "Zero1Plugin" in text


@pytest.mark.parametrize("fewer", [(0,), (0, 1, 1), (0, 1, 2)], ids=["fewer", "the same again", "more"])
def test_ranks_that_call_another_number_of_modules(fewer):
    with pytest.raises(RanksError, match="DesyncError: Data-parallel ranks do not make the same calls"):
        run_ranks(trained, 2, STAGE_3, [(ONE, ONE, "train"), (fewer, ONE, "train")])


def test_one_of_three_ranks():
    with pytest.raises(RanksError, match="DesyncError: Data-parallel ranks do not make the same calls"):
        run_ranks(trained, 3, STAGE_3, [(ONE, ONE, ONE, "train"), (ONE, OTHER, ONE, "train")])


def two_models(orders):
    """Trains a model beside one of the same class that is evaluated, called in the order of this rank; how often the
    ranks had compared what they call, after each step."""
    from neuron_accel import NeuronAccelerator

    plugin = FullyShardedPlugin(modules="layers.*")
    accelerator = NeuronAccelerator(plugins=[plugin])
    models = [Branches(), Branches()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    models = accelerator.prepare(*models, *optimizers)[:2]
    compared = []
    for order in orders[accelerator.process_index]:
        losses = {}
        for index in order:
            with torch.set_grad_enabled(index == 0):
                losses[index] = models[index](torch.ones(2, 4), (0, 1))
        accelerator.backward((losses[0] - losses[1]).square())
        compared.append(accelerator.run.state(plugin)["order"]._asked)
    return compared


def test_ranks_that_call_different_models_of_one_class():
    with pytest.raises(RanksError) as raised:
        run_ranks(two_models, 2, [[(0, 1)], [(1, 0)]])
    text = str(raised.value)
    assert "rank 0 calls the forward pass of 'Branches'" in text
    assert "rank 1 calls the forward pass of 'Branches' (model 2)" in text


def test_ranks_that_call_two_models_in_turn_compare_once():
    for compared in run_ranks(two_models, 2, [[(0, 1)] * 4] * 2):
        assert compared[1:] == [compared[1]] * 3


@pytest.mark.parametrize("options", [STAGE_3, STAGE_2], ids=["stage 3", "stage 2"])
def test_all_ranks_may_change_the_order(options):
    steps = [
        (path, path, *how) for path in (ONE, OTHER, ONE, (3,), (2, 1, 0, 1)) for how in (("train",), (), ("train",))
    ]
    assert run_ranks(trained, 2, options, steps) == [None] * 2


def evaluated(passes, how):
    """Makes as many forward passes as are given for this rank, twice, and each time ends with a call that every rank
    makes."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[FullyShardedPlugin(modules="layers.*")])
    model = Branches()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for each in passes:
        for _ in range(each[accelerator.process_index]):
            loss = model(torch.ones(2, 4), ONE)
            if how == "clip":
                accelerator.backward(loss)
        if how == "gather":
            accelerator.gather(loss.detach())
        elif how == "clip":
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        else:
            accelerator.save_model(model, how)


@pytest.mark.parametrize("how", ["gather", "clip", "save"])
@pytest.mark.parametrize("passes", [[(2, 1)], [(2, 2), (2, 3)]], ids=["at first", "the second time"])
def test_a_forward_pass_while_another_rank_waits_for_all(passes, how, tmp_path):
    call = {"gather": "gather", "clip": "clip_grad_norm_", "save": "save_model"}[how]
    with pytest.raises(RanksError) as raised:
        run_ranks(evaluated, 2, passes, str(tmp_path) if how == "save" else how)
    text = str(raised.value)
    assert "DesyncError: Data-parallel ranks do not make the same calls" in text
    assert f"calls `{call}`" in text
    assert "calls the forward pass of 'Branches'" in text
    assert f"fix: call `{call}` on every rank" in text


def called_later_on_one_rank():
    """What comes after it is the same call of all ranks, and not reported."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[FullyShardedPlugin(modules="layers.*")])
    model = accelerator.prepare(Branches())
    if not accelerator.is_main_process:
        time.sleep(1.0)
    with torch.no_grad():
        model(torch.ones(2, 4), ONE)
    with accelerator.run.events.open("save_state", "call"):
        time.sleep(1.0)
    accelerator.end_training()


def test_a_rank_that_calls_a_model_alone_is_reported(capfd):
    run_ranks(called_later_on_one_rank, 2, env={VARIABLE: "0.3"})
    said = "".join(capfd.readouterr())
    assert re.search(r"rank 0 of 2 has waited for other ranks for \d+ s, in `the forward pass of 'Branches'` at", said)
    assert re.search(r"Rank 1 is at .*test_order.py:\d+\.", said)
    assert "save_state" not in said


def trained_on_uneven_inputs(paths):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[FullyShardedPlugin(modules="layers.*")])
    model = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for path in paths[accelerator.process_index]:
            accelerator.backward(model(torch.ones(2, 4), path))
            optimizer.step()
            optimizer.zero_grad()


def test_uneven_inputs():
    run_ranks(trained_on_uneven_inputs, 2, [(ONE, OTHER), (ONE,)])
    with pytest.raises(RanksError, match=r"a gather of parameters 'layers.0'"):
        run_ranks(trained_on_uneven_inputs, 2, [(ONE, (0, 3), ONE), (ONE, (1, 3))])
