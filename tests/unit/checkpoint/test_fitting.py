"""State can be restored into an object of the same kind and structure."""

from __future__ import annotations

import pytest
import torch
from torch.optim import lr_scheduler

from neuron_accel.checkpoint.state.fitting import check_scheduler, fits

SCHEDULERS = {
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 2), lr_scheduler.ConstantLR(o)], o),
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


def test_numbers_fit_numbers():
    assert fits(float("inf"), 1.0)
    assert fits(torch.tensor(3.0), 1)
    assert not fits(2**63, 1)
    assert not fits(True, 1)
    assert not fits("1", 1)
