"""Optimizers that hold another one: their copies, their state, and what the trial of an optimizer finds out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from neuron_accel.engine.optim.elementwise import is_elementwise, is_separable, needs_closure
from neuron_accel.engine.optim.state import StatePiece, held_optimizers, share_options, state_of
from neuron_accel.engine.optim.twin import twin
from neuron_accel.errors import UsageError
from tests.distributed.optimizers import Lookahead


def parameters():
    return [nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(6))]


def adam(params):
    return torch.optim.Adam(params, lr=1e-2)


def of_a_library(name, *args, **options):
    library = pytest.importorskip("pytorch_optimizer")
    return getattr(library, name)(*args, **options)


# What each is: element-wise, in need of a closure.
KINDS = {
    "Lookahead": (lambda: of_a_library("Lookahead", adam(parameters())), True, False),
    "Lookahead of Adafactor": (lambda: of_a_library("Lookahead", torch.optim.Adafactor(parameters())), False, False),
    "ScheduleFreeWrapper": (lambda: of_a_library("ScheduleFreeWrapper", adam(parameters())), True, False),
    "ScheduleFreeAdamW": (lambda: of_a_library("ScheduleFreeAdamW", parameters()), True, False),
    "SAM": (lambda: of_a_library("SAM", parameters(), torch.optim.SGD, lr=0.1), False, True),
    "LBFGS": (lambda: torch.optim.LBFGS(parameters()), False, True),
    "Adagrad": (lambda: torch.optim.Adagrad(parameters()), True, False),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_trial_sees_the_step_of_the_optimizer_inside(name):
    make, elementwise, closure = KINDS[name]
    optimizer = make()
    assert is_elementwise(optimizer) is elementwise
    assert needs_closure(optimizer) is closure
    assert is_separable(optimizer)


class Holder(torch.optim.Optimizer):
    """Holds an optimizer in a dict, refers to its state, and has a method bound to itself."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.bases = {"only": base}
        self.param_groups, self.seen = base.param_groups, base.state
        self.update = self._update
        for p in base.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()

    def _update(self):
        return self

    def step(self, closure=None):
        self.bases["only"].step()


def test_a_twin_has_a_copy_of_the_optimizer_inside():
    optimizer = Holder(torch.optim.Adagrad(parameters()))
    mine = nn.Parameter(torch.zeros(3))
    mine.grad = torch.ones(3)
    state = {mine: {"slow": torch.ones(3), "bases.only.sum": torch.zeros(3), "bases.only.step": torch.tensor(0.0)}}
    copied = twin(optimizer, [{**optimizer.param_groups[0], "params": [mine]}], state)
    base = copied.bases["only"]
    assert base is not optimizer.bases["only"]
    assert base.param_groups is copied.param_groups
    assert copied.seen is base.state
    assert copied.update() is copied
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    copied.step()
    assert (mine < 0).all()
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))
    assert list(copied.state[mine]) == ["slow"]
    assert base.state[mine]["sum"].tolist() == [1.0] * 3


def test_the_state_of_both_is_one():
    optimizer = Holder(torch.optim.Adagrad(parameters()))
    base, first = optimizer.bases["only"], optimizer.param_groups[0]["params"][0]
    assert held_optimizers(optimizer) == {"bases.only": base}
    state = state_of(optimizer)
    assert sorted(state[first]) == ["bases.only.step", "bases.only.sum", "slow"]
    state[first]["bases.only.sum"] = torch.full((4, 6), 2.0)
    assert base.state[first]["sum"][0, 0] == 2
    removed = state.pop(first)
    assert first not in base.state
    assert first not in optimizer.state
    state[first] = dict(removed)
    assert base.state[first]["sum"][0, 0] == 2
    assert list(optimizer.state[first]) == ["slow"]
    del state[first]["bases.only.step"]
    assert "step" not in base.state[first]
    assert len(state) == 2
    alone = adam(parameters())
    assert state_of(alone) is alone.state


class Counting(torch.optim.SGD):
    """Counts in attributes of its own, in place."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.seen, self.kept, self.counts = torch.zeros(()), [], {"steps": 0}

    def step(self, closure=None):
        self.seen += 1
        self.kept.append(torch.ones(2))
        self.counts["steps"] += 1
        return super().step()


@pytest.mark.parametrize("wraps", [False, True])
def test_trials_leave_attributes_as_they_were(wraps):
    inner = Counting([nn.Parameter(torch.ones(3, 3))])
    optimizer = Lookahead(inner) if wraps else inner
    assert is_elementwise(optimizer)
    assert is_separable(optimizer)
    assert not needs_closure(optimizer)
    assert (float(inner.seen), inner.kept, inner.counts) == (0.0, [], {"steps": 0})


@pytest.mark.parametrize("hold", [lambda params: adam(params), lambda params: Lookahead(adam(params))])
def test_the_groups_of_a_twin_share_options_and_keep_parameters_of_their_own(hold):
    optimizer = hold(parameters())
    mine = [nn.Parameter(torch.zeros(3))]
    copied = twin(optimizer, [{**optimizer.param_groups[0], "params": mine}])
    share_options(optimizer, copied)
    (group,), (shared,) = optimizer.param_groups, copied.param_groups
    group["lr"] = 0.5
    shared["new"] = 7
    assert (shared["lr"], group["new"]) == (0.5, 7)
    assert {**shared} == dict(shared) == shared.copy() == (shared | {}) == {**group, "params": mine}
    assert isinstance(shared, dict)
    shared |= {"new": 8}
    assert (shared["new"], group["new"], ({"own": 1} | shared)["new"]) == (8, 8, 8)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(state)  # its groups are other dicts now
    assert shared["lr"] == 0.25
    mine[0].grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = 0.0
    copied.step()
    assert not mine[0].any()
    assert group["params"][0].shape == (4, 6)


def piece(local, parameter, **options):
    layout = SimpleNamespace(shape=(8, 4), local_shape=local, axes=("tp",) if local != (8, 4) else ())
    record = SimpleNamespace(fqn="w", layout=layout)
    return StatePiece(
        record=record, parameter=nn.Parameter(parameter), start=0, stop=parameter.numel(), group=0, **options
    )


def test_factors_of_full_parameters_and_single_elements_fit():
    full = piece((4, 4), torch.zeros(4, 4), whole=True)
    flat = piece((8, 4), torch.zeros(16), axes=("dp",))
    for each, value in ((full, torch.ones(8, 1)), (full, torch.ones(8, 4)), (flat, torch.ones(1)), (flat, 3)):
        assert each.fit(value) is value
    assert flat.fit(torch.ones(8, 4)).shape == (16,)
    for each, shape, kept in (
        (full, (4, 4), r"keeps all of it, of shape \(8, 4\)"),
        (flat, (3,), "keeps a shard of it"),
    ):
        with pytest.raises(UsageError, match=kept):
            each.fit(torch.ones(shape))
