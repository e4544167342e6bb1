"""Parameters that are frozen and unfrozen while a model trains, on ranks of torch_xla."""

from __future__ import annotations

import copy

import pytest
import torch

from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.models import token_batches
from tests.distributed.strategies.test_freezing import (
    adamw,
    assert_llamas,
    assert_same,
    batches,
    in_turns,
    llamas_on_ranks,
    net,
    train_only,
)

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


# ---- what is frozen for some steps and trains again ------------------------------------------------------------------
def nadam(parameters):
    return torch.optim.NAdam(parameters, lr=1e-2, eps=1e-6)


def again(step):
    """Two of the layers do not train at steps 1 and 2."""
    return {1, 3} if step in (1, 2) else {0, 1, 2, 3}


STEPS = 4
WAYS = {
    "as they come": {},
    "kept by hand before": {"keep_at": 0},
    "kept by hand after": {"keep_at": 2},
    "saved": {"save_at": 2},
    "in turns": {"schedule": in_turns},
}


def net_alone(make, *, schedule=again, keep_at=None, save_at=None):
    """The weights at the end. The state of model and optimizer after a step may be kept, and loaded after the next."""
    model, kept = net(), None
    train_only(model, schedule(0))
    optimizer = make(model.parameters())
    for step, x in enumerate(batches(STEPS)):
        train_only(model, schedule(step))
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        if kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
        kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()]) if step == keep_at else None
    return model.state_dict()


def net_on_rank(make, folder, *, schedule=again, keep_at=None, save_at=None):
    """The same under ZeRO-1; a run of its own may go on from what was saved after a step."""
    from neuron_accel import NeuronAccelerator

    for begin in (0,) if save_at is None else (0, save_at + 1):
        accelerator = NeuronAccelerator(config={"plugins": ["zero1"], "backend": "xla"})
        with one_at_a_time():
            model = net()
            train_only(model, schedule(0))
            optimizer = make(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        if begin:
            accelerator.load_state(folder)
        rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
        kept = None
        for step, x in list(enumerate(batches(STEPS)))[begin:]:
            train_only(model, schedule(step))
            accelerator.backward(model(x.chunk(size)[rank].to(accelerator.device)))
            optimizer.step()
            optimizer.zero_grad()
            if step == save_at and not begin:
                accelerator.save_state(folder)
                break
            if kept is not None:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            kept = copy.deepcopy([model.state_dict(), optimizer.state_dict()]) if step == keep_at else None
        weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
        accelerator.free_memory()
    return weights


def net_on_rank_in_all_ways(folder):
    ways = {way: net_on_rank(adamw, folder, **options) for way, options in WAYS.items()}
    return {**ways, "NAdam": net_on_rank(nadam, folder)}


def test_every_parameter_counts_the_steps_in_which_it_trains(tmp_path):
    found = run_ranks(net_on_rank_in_all_ways, 2, tmp_path, backend="xla", timeout=110)
    for way, options in WAYS.items():
        assert_same(net_alone(adamw, **options), [results[way] for results in found], rtol=1e-4, atol=1e-5)
    assert_same(net_alone(nadam), [results["NAdam"] for results in found], rtol=1e-4, atol=1e-5)
