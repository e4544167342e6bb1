"""Optimizers of models that were not prepared, models that were prepared by another accelerator, and copies."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from neuron_accel.errors import UsageError
from neuron_accel.testing import RanksError, run_ranks

TP2 = {"model_parallelism": {"tensor_parallel_size": 2}}


def make():
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def step(accelerator, net, optimizer, rank=0):
    accelerator.backward(net(torch.full((1, 3), 1.0 + rank)).square().sum())
    accelerator.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


# ---- an optimizer of a model that was not prepared -------------------------------------------------------------------
def train_unprepared(plugins, folder):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net, optimizer = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = accelerator.prepare(optimizer)
    said = [str(w.message) for w in caught if "belong to no prepared model" in str(w.message)]
    step(accelerator, net, optimizer)
    accelerator.save_state(folder)
    kept = copy.deepcopy(net.state_dict())
    step(accelerator, net, optimizer)
    after = copy.deepcopy(net.state_dict())
    net.load_state_dict(kept)
    accelerator.load_state(folder)
    step(accelerator, net, optimizer)
    return said, after, net.state_dict()


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["none", "zero1"])
def test_one_process_trains_it_and_says_so_once(plugins, tmp_path):
    ((said, after, again),) = run_ranks(train_unprepared, 1, plugins, str(tmp_path))
    net, optimizer = make()
    for _ in range(2):
        net(torch.ones(1, 3)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert len(said) == 1
    assert "AdamW holds 2 parameters" in said[0]
    for name, value in net.state_dict().items():
        torch.testing.assert_close(after[name], value)
        torch.testing.assert_close(again[name], value)


def prepare_unprepared():
    from neuron_accel import NeuronAccelerator

    NeuronAccelerator().prepare(make()[1])


def test_several_ranks_refuse_it():
    with pytest.raises(RanksError, match="that no prepared model has"):
        run_ranks(prepare_unprepared, 2)


# ---- an optimizer that was not prepared ------------------------------------------------------------------------------
def step_unprepared(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net, prepared = make()
    net, prepared = accelerator.prepare(net, prepared)
    temperature = nn.Parameter(torch.ones(()))
    optimizers = [prepared, torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD([temperature], lr=0.1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            accelerator.backward(net(torch.ones(1, 3)).square().sum() * temperature)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_an_unprepared_optimizer_is_named_once():
    for said in run_ranks(step_unprepared, 2, []):
        of_model, of_none = said
        assert "This SGD steps '" in of_model
        assert "was not prepared" in of_model
        assert "parameters of no prepared model" in of_none
    assert run_ranks(step_unprepared, 1, []) == [[]]
    assert run_ranks(prepared_alone, 2, ["zero1"]) == [[], []]


def prepared_alone(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net, optimizer = accelerator.prepare(*make())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(accelerator, net, optimizer)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


class Wrapped(torch.optim.SGD):
    """Steps an optimizer of its own, as SAM and Lookahead do."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.AdamW(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure=None):
        self.base.step()


def wrapped():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    net, _ = make()
    net, optimizer = accelerator.prepare(net, Wrapped(net.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(accelerator, net, optimizer)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_what_a_prepared_optimizer_steps_is_not_named():
    assert run_ranks(wrapped, 2) == [[], []]


def step_without_prepared(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net, optimizer = make()
    accelerator.backward(accelerator.prepare(Wrapper(net))(torch.ones(1, 3)).square().sum())
    optimizer.step()


@pytest.mark.parametrize(
    "plugins", [["zero1"], [{"fully_sharded": {"modules": "inner"}}]], ids=["zero1", "fully_sharded"]
)
def test_an_optimizer_whose_state_is_to_be_sharded_has_to_be_prepared(plugins):
    with pytest.raises(RanksError, match="and no optimizer is prepared"):
        run_ranks(step_without_prepared, 2, plugins)


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def train_wrapped():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    net, optimizer = make()
    wrapped, optimizer = accelerator.prepare(Wrapper(net), optimizer)
    step(accelerator, wrapped, optimizer, accelerator.process_index)
    return {name: value.clone() for name, value in net.state_dict().items()}


def test_a_prepared_model_may_hold_the_parameters_under_another_wrapper():
    first, second = run_ranks(train_wrapped, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["weight"], make()[0].weight)


# ---- a model that another accelerator prepared -----------------------------------------------------------------------
def train_with_two(plugins):
    from neuron_accel import NeuronAccelerator

    net, first_optimizer = make()
    first = NeuronAccelerator(config={"plugins": plugins})
    prepared, first_optimizer = first.prepare(net, first_optimizer)
    step(first, prepared, first_optimizer, first.process_index)
    copied = copy.deepcopy(prepared)
    second = NeuronAccelerator(config={"plugins": plugins})
    again, optimizer = second.prepare(prepared, torch.optim.AdamW(net.parameters(), lr=0.1))
    step(second, again, optimizer, second.process_index)
    with pytest.raises(UsageError, match="Another accelerator has since prepared"):
        first_optimizer.step()
    assert second.get_state_dict(again).keys() == {"weight", "bias"}
    assert not hasattr(copied, "_neuron_accel_owner") or copied._neuron_accel_owner.accelerator is None
    second.free_memory()
    assert not hasattr(net, "_neuron_accel_owner")
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["none", "zero1"])
def test_the_second_accelerator_takes_over(plugins):
    first, second = run_ranks(train_with_two, 2, plugins)
    net, _ = make()
    for _ in range(2):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for rank in range(2):
            (net(torch.full((1, 3), 1.0 + rank)).square().sum() / 2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(first[name], value)
        assert torch.equal(first[name], second[name])


def sharded_twice():
    from neuron_accel import NeuronAccelerator
    from tests.distributed.loop.loops_support import model

    prepared = NeuronAccelerator(config={"plugins": [TP2]}).prepare(model())
    NeuronAccelerator(config={"plugins": [TP2]}).prepare(prepared)


def test_what_the_first_sharded_stays_refused():
    with pytest.raises(RanksError, match="was prepared before"):
        run_ranks(sharded_twice, 2)


def prepared_again(plugins):
    from neuron_accel import NeuronAccelerator
    from tests.distributed.loop.loops_support import adamw, model

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net = model()
    first = accelerator.prepare(net, adamw(net.parameters()))
    second = accelerator.prepare(*first)
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert accelerator.prepare(net) is first[0]
    assert (len(accelerator._models), len(accelerator._optimizers)) == (1, 1)


@pytest.mark.parametrize("plugins", [[], [TP2, "zero1"]], ids=["none", "tp2-zero1"])
def test_preparing_again_with_the_same_accelerator_changes_nothing(plugins):
    run_ranks(prepared_again, 2, plugins)


# ---- copies ----------------------------------------------------------------------------------------------------------
def pickled(plugins):
    from accelerate.data_loader import DataLoaderShard

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
    net, optimizer = make()
    if plugins:
        from tests.distributed.loop.loops_support import adamw, model

        net = model()
        optimizer = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    found = pickle.loads(pickle.dumps(accelerator))
    (copied,) = found._dataloaders
    assert type(copied) is type(loader)
    assert isinstance(copied, DataLoaderShard)
    expected = [batch[0].tolist() for batch in loader]
    if not plugins:
        assert [batch[0].tolist() for batch in copied] == expected
        other = pickle.loads(pickle.dumps(optimizer))
        assert other.state_dict() == optimizer.state_dict()
        other.step()
        assert pickle.loads(pickle.dumps(scheduler)).get_last_lr() == [0.1]
    return expected


@pytest.mark.parametrize(("ranks", "plugins"), [(1, []), (2, [TP2])], ids=["alone", "tp2"])
def test_a_pickled_accelerator_keeps_its_loaders(ranks, plugins):
    found = run_ranks(pickled, ranks, plugins)
    assert found == [[[i, i + 1] for i in range(0, 12, 2)]] * ranks


def after_reset():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    accelerator.state._reset_state()
    with pytest.raises(AttributeError, match="This happens if"):
        _ = accelerator.num_processes
    with pytest.raises(AttributeError, match="This happens if"):
        _ = accelerator.device


def test_attributes_after_a_reset_raise_as_accelerates_do():
    run_ranks(after_reset, 1)


def two_trainers(folder):
    from neuron_accel import NeuronTrainer, NeuronTrainingArguments
    from tests.distributed.loop.loops_support import Tokens, model

    shared, said = model(), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("neuron_accel").addHandler(handler)

    def trainer():
        arguments = NeuronTrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=2, report_to="none", disable_tqdm=True
        )
        data = [{"input_ids": one["input_ids"], "labels": one["labels"]} for one in Tokens(8)]
        return NeuronTrainer(model=shared, args=arguments, train_dataset=data)

    first = trainer()
    losses = [first.train().training_loss]
    second = trainer()
    losses.append(second.train().training_loss)
    assert second.accelerator.get_state_dict(second.model).keys() == shared.state_dict().keys()
    losses.append(first.train().training_loss)
    return losses, [text for text in said if "creating a new optimizer" in text]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_trainer_trains_the_model_of_a_first_one(ranks, tmp_path):
    for losses, said in run_ranks(two_trainers, ranks, str(tmp_path)):
        assert losses[0] > losses[1] > losses[2]
        assert len(said) == 1
