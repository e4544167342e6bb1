"""``optimizer.state`` by the model's parameters, and its full state, where optimizers are sharded."""

from __future__ import annotations

import copy
import io
from collections import defaultdict

import pytest
import torch
from torch import nn

from neuron_accel.testing import one_at_a_time, run_ranks

STRATEGIES = {"zero1": [{"zero1": {}}], "fully sharded": [{"fully_sharded": {"modules": ("a", "b")}}]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def damp(optimizer, parameters):
    for p in parameters:
        if "exp_avg" in optimizer.state[p]:
            optimizer.state[p]["exp_avg"].mul_(0.1)


def pop(optimizer, parameters):
    for p in parameters[:3]:
        assert "exp_avg" in optimizer.state.pop(p)
    assert optimizer.state.pop(parameters[0], None) is None
    del optimizer.state[parameters[4]]
    assert [p in optimizer.state for p in parameters] == [False, False, False, True, False, True]


def clear(optimizer, parameters):
    assert len(optimizer.state) == len(parameters)
    optimizer.state[parameters[1]].clear()
    optimizer.state.clear()
    assert not optimizer.state


def assign(optimizer, parameters):
    for p in parameters:
        optimizer.state[p]["exp_avg"] = torch.full(p.shape, 1e-3)
    optimizer.state[parameters[2]] = {**optimizer.state[parameters[2]], "exp_avg_sq": torch.ones(parameters[2].shape)}


def replace(optimizer, parameters):
    kept = defaultdict(dict, {p: dict(optimizer.state[p]) for p in parameters[1:]})
    kept[parameters[1]]["step"] = torch.tensor(9.0)
    optimizer.state = kept
    assert parameters[0] not in optimizer.state
    assert len(optimizer.state) == len(kept)


EDITS = {edit.__name__: edit for edit in (damp, pop, clear, assign, replace)}


def make(plugins, backend=None):
    from neuron_accel import NeuronAccelerator

    with one_at_a_time():
        model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    if plugins is None:
        return None, model, optimizer
    accelerator = NeuronAccelerator(config={"plugins": plugins, **({} if backend is None else {"backend": backend})})
    return accelerator, *accelerator.prepare(model, optimizer)


def loss_of(accelerator, model, seed):
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed))
    if accelerator is not None:
        x = x.chunk(accelerator.data_parallel_size)[accelerator.data_parallel_rank].to(accelerator.device)
    return model(x).square().mean()


def steps(accelerator, model, optimizer, seeds):
    for seed in seeds:
        loss = loss_of(accelerator, model, seed)
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def weights(accelerator, model):
    found = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in found.items()}


def edited(plugins, backend=None):
    """The weights after each kind of edit in the middle of a training."""
    results = {}
    for name, edit in EDITS.items():
        accelerator, model, optimizer = make(plugins, backend)
        steps(accelerator, model, optimizer, range(2))
        edit(optimizer, list(model.parameters()))
        steps(accelerator, model, optimizer, range(2, 4))
        results[name] = weights(accelerator, model)
    return results


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_edits_have_the_effect_of_one_process(strategy):
    expected = edited(None)
    found = run_ranks(edited, 2, STRATEGIES[strategy])[0]
    for edit, of_edit in expected.items():
        for name, value in of_edit.items():
            torch.testing.assert_close(found[edit][name], value, msg=lambda m, at=(edit, name): f"{at}: {m}")


def refused(plugins):
    from neuron_accel.errors import ParameterError, UsageError

    accelerator, model, optimizer = make(plugins)
    steps(accelerator, model, optimizer, range(1))
    (p, *_), empty = model.parameters(), sum(v["exp_avg"].numel() for v in optimizer.state.values())
    assert 0 < empty < sum(p.numel() for p in model.parameters())
    with pytest.raises(ParameterError, match="none of its parameters"):
        optimizer.state[torch.zeros(3)]
    with pytest.raises(UsageError, match="does not belong to"):
        optimizer.state[p]["exp_avg"] = torch.zeros(3)
    if accelerator.is_main_process:  # as published trainers do
        with pytest.raises(UsageError, match="get_optimizer_state_dict"):
            torch.save({"opt": optimizer.state_dict()}, io.BytesIO())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_one_process_would_do_otherwise_is_refused(strategy):
    run_ranks(refused, 2, STRATEGIES[strategy])


def in_full(plugins, given):
    """The full state after steps; or the weights after more of them from ``given``."""
    accelerator, model, optimizer = make(plugins)
    if given is None:
        steps(accelerator, model, optimizer, range(2))
        return accelerator.get_optimizer_state_dict(optimizer) if accelerator else optimizer.state_dict()
    optimizer.load_state_dict(torch.load(io.BytesIO(given), weights_only=True))
    steps(accelerator, model, optimizer, range(2, 4))
    return weights(accelerator, model)


def as_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_full_state_is_that_of_one_process_and_loads_on_any_number_of_ranks(strategy):
    plugins, plain = STRATEGIES[strategy], in_full(None, None)
    every = run_ranks(in_full, 2, plugins, None)
    for state in every:
        assert list(state["state"]) == [name for name, _ in Net().named_parameters()]
        assert state["param_groups"][0]["lr"] == 0.05
        for mine, other in zip(state["state"].values(), plain["state"].values(), strict=True):
            torch.testing.assert_close(mine, other)
    expected = in_full(None, as_file(plain))
    of_two = in_full(None, as_file(every[1]))  # torch's own
    of_one = run_ranks(in_full, 2, plugins, as_file(plain))[0]
    of_three = run_ranks(in_full, 3, plugins, as_file(every[0]))[0]
    alone = run_ranks(in_full, 1, plugins, as_file(plain))[0]
    for found in (of_two, of_one, of_three, alone):
        torch.testing.assert_close(found, expected)


class Counting(torch.optim.AdamW):
    """Has an entry of its own in its state dict."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "count"})


def back(plugins):
    """What is left of steps after which the state and the weights before them are loaded."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    with one_at_a_time():
        model = Net()
    model, optimizer = accelerator.prepare(model, Counting(model.parameters(), lr=0.05))
    steps(accelerator, model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    steps(accelerator, model, optimizer, range(2, 5))
    optimizer.load_state_dict(state)
    found = optimizer.state_dict()
    assert (found["count"], found.keys()) == (2, state.keys())
    torch.testing.assert_close(dict(found["state"]), dict(state["state"]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_state_loads_beside_entries_of_a_class(strategy):
    run_ranks(back, 2, STRATEGIES[strategy])


# ---- one owner -------------------------------------------------------------------------------------------------------
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def stages(accelerator, model):
    """The last layer first; then everything, with a new optimizer."""
    for p in (*model.a.parameters(), *model.b.parameters()):
        p.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, sgd(p for p in model.parameters() if p.requires_grad))
    steps(accelerator, model, optimizer, range(2))
    for p in model.parameters():
        p.requires_grad_(True)
    optimizer = accelerator.prepare(sgd(model.parameters()))
    steps(accelerator, model, optimizer, range(2, 5))
    return model


def restart(accelerator, model):
    """A new optimizer of another class, which gets the gradients that are there."""
    model, first = accelerator.prepare(model, sgd(model.parameters()))
    steps(accelerator, model, first, range(2))
    accelerator.backward(loss_of(accelerator, model, 7))
    second = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=0.05))
    second.step()
    second.zero_grad()
    steps(accelerator, model, second, range(2, 4))
    return model


def twice(accelerator, model):
    """Parameters of an earlier optimizer and others, after which the earlier one may not step."""
    from neuron_accel.errors import UsageError

    model, first = accelerator.prepare(model, sgd(model.parameters()))
    steps(accelerator, model, first, range(1))
    with pytest.raises(UsageError, match="holds 2 of the 6 parameters of a SGD that was prepared before"):
        accelerator.prepare(sgd(model.a.parameters()))
    steps(accelerator, model, first, range(1, 2))
    second = accelerator.prepare(sgd(model.parameters()))
    steps(accelerator, model, second, range(2, 3))
    with pytest.raises(UsageError, match="This SGD cannot step"):
        steps(accelerator, model, first, range(3, 4))
    return model


def freed(plugins):
    import gc
    import weakref

    accelerator, model, first = make(plugins)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(first.optimizer.optimizer))
    assert scheduler.optimizers == [first]
    steps(accelerator, model, first, range(2))
    scheduler.step()
    second, reference = accelerator.prepare(sgd(model.parameters())), weakref.ref(first.optimizer)
    assert (accelerator._optimizers, accelerator._schedulers) == ([second], [])
    del first, scheduler
    steps(accelerator, model, second, range(2, 3))
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replaced_optimizer_is_freed_with_its_state(strategy):
    run_ranks(freed, 2, STRATEGIES[strategy])


class Plain:
    """One process, without this library."""

    data_parallel_size, data_parallel_rank, device = 1, 0, torch.device("cpu")

    def prepare(self, *objects):
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss):
        loss.backward()


def of_several_optimizers(loop, plugins, backend=None):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins, **({} if backend is None else {"backend": backend})})
    with one_at_a_time():
        model = Net()
    return weights(accelerator, loop(accelerator, model))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", [stages, restart])
def test_an_optimizer_takes_over_the_parameters_of_an_earlier_one(strategy, loop):
    expected = loop(Plain(), Net()).state_dict()
    found = run_ranks(of_several_optimizers, 2, loop, STRATEGIES[strategy])[0]
    torch.testing.assert_close(found, dict(expected))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_optimizers_of_one_parameter_are_refused(strategy):
    run_ranks(of_several_optimizers, 2, twice, STRATEGIES[strategy])
