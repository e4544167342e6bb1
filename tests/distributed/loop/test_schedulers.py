"""Every learning rate scheduler of torch sets the same rates on several ranks as in one process."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from neuron_accel.testing import run_ranks

STEPS, ACCUMULATION = 7, 2
MAKERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: schedulers.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=3 * 2 * STEPS),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=3), schedulers.ExponentialLR(o, 0.7)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 4), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1, threshold=0.0),
}


def training(name):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return net, optimizer, MAKERS[name](optimizer)


def rates_of(optimizer):
    group = optimizer.param_groups[0]
    return group["lr"], group["momentum"]


def losses(rank):
    """The metrics of each rank; only their mean increases, so that a rank that used its own would not reduce the
    rate."""
    return [3.0, 2.0, 2.5, 2.6, 2.4, 2.7, 2.8] if rank else [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4]


def in_one_process(name, ranks):
    _, optimizer, scheduler = training(name)
    found = []
    for step in range(STEPS):
        optimizer.step()
        if name == "ReduceLROnPlateau":
            scheduler.step(sum(losses(rank)[step] for rank in range(ranks)) / ranks)
        else:
            for _ in range(ranks):
                scheduler.step()
        found.append(rates_of(optimizer))
    return found


def on_rank(plugins, folder):
    from neuron_accel import NeuronAccelerator

    found = {}
    for name in MAKERS:
        accelerator = NeuronAccelerator(config={"plugins": plugins}, gradient_accumulation_steps=ACCUMULATION)
        net, optimizer, scheduler = accelerator.prepare(*training(name))

        def rates(steps, accelerator=accelerator, net=net, optimizer=optimizer, scheduler=scheduler, name=name):
            for step in steps:
                for _ in range(ACCUMULATION):
                    with accelerator.accumulate(net):
                        accelerator.backward(net(torch.ones(1, 3)).sum())
                        optimizer.step()
                        metric = [losses(accelerator.data_parallel_rank)[step]]
                        scheduler.step(*(metric if name == "ReduceLROnPlateau" else []))
                        optimizer.zero_grad()
                yield rates_of(optimizer)

        found[name] = list(rates(range(4)))
        accelerator.save_state(f"{folder}/{name}")
        found[name] += rates(range(4, STEPS))
        accelerator.load_state(f"{folder}/{name}")
        assert [rates_of(optimizer), *rates(range(4, STEPS))] == found[name][3:], name
        accelerator.free_memory()
    return found


def test_the_list_is_complete():
    every = {
        name
        for name, kind in vars(schedulers).items()
        if inspect.isclass(kind) and issubclass(kind, schedulers.LRScheduler) and not name.startswith("_")
    }
    assert every - {"LRScheduler"} == set(MAKERS)


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["none", "zero1"])
def test_rates_are_those_of_one_process_and_resume(plugins, tmp_path):
    for found in run_ranks(on_rank, 2, plugins, str(tmp_path)):
        for name in MAKERS:
            for mine, expected in zip(found[name], in_one_process(name, 2), strict=True):
                assert mine == pytest.approx(expected), name


def metric_outside_of_accumulation():
    """Evaluated in the middle of an accumulation, once with and once without a rank that has run out of data."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(gradient_accumulation_steps=2)
    net, optimizer, scheduler = accelerator.prepare(*training("ReduceLROnPlateau"))
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(1, 3)).sum())
    for _ in range(3):
        scheduler.step(1.0)
    evaluated = rates_of(optimizer)[0]
    with accelerator.join_uneven_inputs([net], even_batches=False):
        for _ in range(2 + 2 * accelerator.process_index):
            scheduler.step(1.0)
    return evaluated, rates_of(optimizer)[0], scheduler.scheduler.last_epoch


def test_a_metric_counts_wherever_it_is_found():
    first, second = run_ranks(metric_outside_of_accumulation, 2)
    assert first == second == (pytest.approx(0.05), pytest.approx(0.0125), 7)
