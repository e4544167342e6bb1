"""State can be restored into an object of the same kind and structure."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from neuron_accel.checkpoint.state.fitting import check_scheduler, fits
from neuron_accel.errors import CheckpointError


class Falling:
    """A function of the number of a cycle, with a state."""

    def __init__(self, by):
        self.by = by

    def __call__(self, cycle):
        return self.by**cycle


SCHEDULERS = {
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), lr_scheduler.ConstantLR(o)], o),
    "functions": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step]),
    "cycles": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, scale_fn=Falling(0.5)),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.1),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_takes_its_own_state(kind):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer)
    for steps in range(3):
        check_scheduler(scheduler, scheduler.state_dict(), f"after {steps} steps")
        optimizer.step()
        scheduler.step(*([1.0] if kind == "plateau" else []))


@pytest.mark.parametrize(
    ("kind", "entries"),
    [
        ("functions", {"lr_lambdas": [3]}),
        ("functions", {"lr_lambdas": [None, {}]}),
        ("functions", {"lr_lambdas": None}),
        ("cycles", {"_scale_fn_custom": 3}),
        ("sequence", {"_schedulers": [{}, {}, {}]}),
        ("sequence", {"_schedulers": [3, 3]}),
    ],
)
def test_a_state_that_torch_cannot_load_is_refused_before_anything_changes(kind, entries):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[kind](optimizer)
    before = repr(scheduler.state_dict())
    with pytest.raises(CheckpointError, match="scheduler 0"):
        check_scheduler(scheduler, {**scheduler.state_dict(), **entries}, "scheduler 0")
    assert repr(scheduler.state_dict()) == before


def test_functions_of_a_scheduler_keep_their_state_until_it_is_loaded():
    scheduler = SCHEDULERS["cycles"](torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))
    saved = scheduler.state_dict()
    scheduler._scale_fn_custom.by = 0.25
    check_scheduler(scheduler, saved, "scheduler 0")
    assert scheduler._scale_fn_custom.by == 0.25
    scheduler.load_state_dict(saved)
    assert scheduler._scale_fn_custom.by == 0.5


def test_numbers_fit_numbers():
    assert fits(float("inf"), 1.0)
    assert fits(torch.tensor(3.0), 1)
    assert not fits(2**63, 1)
    assert not fits(True, 1)
    assert not fits("1", 1)
