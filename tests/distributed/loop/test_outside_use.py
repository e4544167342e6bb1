"""Weights and gradients that a loop uses outside of their module, where a rank has a shard of them."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from neuron_accel.errors import UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.models import llama

COMPOSITIONS = {
    "tp2": [{"model_parallelism": {"tensor_parallel_size": 2}}],
    "tp2+sp": [{"model_parallelism": {"tensor_parallel_size": 2}}, "sequence_parallel"],
}


def squared(model):
    return 0.05 * sum(p.pow(2).sum() for p in model.parameters())


def norms(model):
    return 0.05 * sum(p.norm() for p in model.parameters()) + model.lm_head.weight.mean()


def distance(model, before):
    return sum((p - w).square().sum() for p, w in zip(model.parameters(), before, strict=True))


def trained(accelerator, penalty):
    torch.manual_seed(0)
    model = llama(kv_heads=1, vocabulary=63)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.3))
    before = [p.detach().clone() for p in model.parameters()]
    losses = []
    for seed in range(3):
        ids = torch.randint(0, 63, (4, 12), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=ids, labels=ids).loss
        loss = loss + (distance(model, before) if penalty is distance else penalty(model))
        losses.append(loss.item())
        accelerator.backward(loss)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.clamp_(-0.1, 0.1)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
                parameter.data.clamp_(-0.3, 1.1)
    return losses, accelerator.get_state_dict(model)


def penalties(plugins):
    from neuron_accel import NeuronAccelerator

    return [trained(NeuronAccelerator(config={"plugins": plugins}), penalty) for penalty in (squared, norms, distance)]


@functools.cache
def alone():
    return run_ranks(penalties, 1, [])[0]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_losses_of_weights_are_those_of_one_process(composition):
    ranks = run_ranks(penalties, 2, COMPOSITIONS[composition])
    for found, other, expected in zip(*ranks, alone(), strict=True):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        assert found[0] == other[0]
        for key, value in expected[1].items():
            torch.testing.assert_close(found[1][key], value, rtol=1e-3, atol=1e-5)


def uses(model, full):
    head, hidden = model.lm_head.weight, torch.randn(3, full.shape[1])
    return {
        "norm": lambda: head.detach().norm(),
        "largest": lambda: head.abs().max(),
        "product": lambda: hidden @ head.T,
        "linear": lambda: torch.nn.functional.linear(hidden, head),
        "row": lambda: head[3],
        "number": lambda: head.sum().item() and (head.sum() * 0).add(float(head.detach().sum())),
        "flattened": lambda: torch.nn.utils.parameters_to_vector(model.parameters()),
        "average": lambda: full.mul(0.5).add(head.detach(), alpha=0.5),
        "file": lambda: torch.save(model.state_dict(), "/dev/null"),
        "pickled": lambda: torch.save(model, "/dev/null"),
        "norm of a gradient": lambda: head.grad.norm(),
        "clipped by torch": lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "normalised gradient": lambda: head.grad / head.grad.pow(2).sum().sqrt(),
    }


def refused(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = llama()
    full = model.lm_head.weight.detach().clone()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(24).reshape(2, 12)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    said = {}
    for name, use in uses(model, full).items():
        try:
            use()
        except UsageError as error:
            said[name] = str(error)
    hidden = model.model(input_ids=ids).last_hidden_state  # modules inside may be called
    logits = model.lm_head(hidden)
    copied = copy.deepcopy(model)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    types = {type(p) for p in copied.parameters()}
    return said, torch.equal(model(input_ids=ids).logits, copied(input_ids=ids).logits), types, logits.shape


def test_other_uses_are_refused_by_name():
    said, equal, types, shape = run_ranks(refused, 2, COMPOSITIONS["tp2"])[0]
    assert set(said) == set(uses(torch.nn.ModuleDict({"lm_head": torch.nn.Linear(1, 1)}), torch.zeros(1, 1)))
    for text in said.values():
        assert "of which this rank has a shard" in text
        assert "fix:" in text
    assert "cannot be pickled" in said["pickled"]
    assert "lm_head.weight" in said["norm"]
    assert "accelerator.clip_grad_norm_" in said["norm of a gradient"]
    assert equal
    assert types == {torch.nn.Parameter}
    assert shape[-1] == 96
