"""Steps on flat tensors: the same to the bit as a step of each parameter, with the same state, in fewer calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from neuron_accel.contract import FlatStep
from neuron_accel.engine.optim import flat_step

SIZES = (513, 64, 7, 1, 1030, 5001, 33)
STEPS = 5
OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True, "maximize": True}),
    "AdamW, lr a tensor": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"foreach": True}),
    "Adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "Adam fused amsgrad": (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1}),
    "Adagrad fused": (torch.optim.Adagrad, {"fused": True}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "RMSprop foreach": (torch.optim.RMSprop, {"momentum": 0.9, "foreach": True}),
    "Rprop": (torch.optim.Rprop, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD foreach": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
}


class Flat:
    """Parameters that are views of one tensor, as are their gradients."""

    def __init__(self, cls, options, dtype=torch.float32, groups=1):
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(sum(SIZES), generator=generator).to(dtype)
        self.gradients = torch.zeros_like(self.weights)
        self.parameters = [nn.Parameter(part) for part in self.weights.split(SIZES)]
        self.generator = generator
        backwards = self.parameters[::-1]  # as under ZeRO-1, where buckets and groups have different orders
        parts = [backwards[i::groups] for i in range(groups)]
        self.optimizer = cls([{"params": part} for part in parts], **options)

    def backward(self, unused=()):
        self.gradients.copy_(torch.randn(len(self.gradients), generator=self.generator))
        for index, (parameter, part) in enumerate(zip(self.parameters, self.gradients.split(SIZES), strict=True)):
            parameter.grad = None if index in unused else part

    def values(self):
        state = self.optimizer.state_dict()["state"]
        return self.weights, {key: dict(entries) for key, entries in state.items()}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(flat_step, "_SLICE", 1024)
    monkeypatch.setattr(flat_step, "_LONG", 1)


@pytest.fixture
def stepped(monkeypatch):
    """The number of parameters in each step of any optimizer."""
    counts = []

    original = torch.optim.Adam._init_group

    def init_group(self, group, *args):
        counts.append(len(group["params"]))
        return original(self, group, *args)

    monkeypatch.setattr(torch.optim.Adam, "_init_group", init_group)
    return counts


def assert_equal(mine, theirs):
    torch.testing.assert_close(mine.values(), theirs.values(), rtol=0, atol=0)
    orders = [[(key, list(entries)) for key, entries in run.values()[1].items()] for run in (mine, theirs)]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_state_are_those_of_steps_by_parameter(name, dtype):
    cls, options = OPTIMIZERS[name]
    if dtype == torch.bfloat16 and name == "SGD fused":
        pytest.skip("torch's kernel reads a momentum that it has not written")
    flat, plain = Flat(cls, copy.deepcopy(options), dtype), Flat(cls, copy.deepcopy(options), dtype)
    step = FlatStep(flat.optimizer)
    for _ in range(STEPS):
        flat.backward(), plain.backward()
        step(), plain.optimizer.step()
        assert_equal(flat, plain)
    assert len(flat.optimizer.state) in (0, len(SIZES))


def test_a_step_has_fewer_and_smaller_tensors_and_leaves_none(stepped):
    flat = Flat(torch.optim.AdamW, {})
    step = FlatStep(flat.optimizer)
    for _ in range(2):
        flat.backward()
        step()
    total = sum(SIZES)
    assert stepped == [-(-total // (1024 * torch.get_num_threads()))] * 2
    assert [id(p) for p in flat.optimizer.param_groups[0]["params"]] == [id(p) for p in flat.parameters[::-1]]
    assert set(flat.optimizer.state) == set(flat.parameters)
    steps = [entries["step"] for entries in flat.optimizer.state.values()]
    assert all(value == 2 for value in steps)
    assert len({value.data_ptr() for value in steps}) == len(steps)


def _drop_a_gradient(run, step):
    run.backward(unused=(1, 4) if step == 2 else ())


def _reload(run, step):
    run.backward()
    if step == 2:
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def _write(run, step):
    run.backward()
    if step == 2:
        entries = run.optimizer.state[run.parameters[2]]
        entries["step"].fill_(40)
        entries["exp_avg"] = entries["exp_avg"] * 2


def _change_options(run, step):
    run.backward()
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5
        group["maximize"] = step == 2
        group["foreach"] = step == 3


def _add_a_group(run, step):
    if step == 2:
        more = nn.Parameter(torch.ones(3000))
        run.optimizer.add_param_group({"params": [more], "lr": 0.5})
    for group in run.optimizer.param_groups[1:]:
        group["params"][0].grad = torch.ones(3000) * step
    run.backward()


def _assign(run, step):
    run.backward()
    if step == 2:
        run.parameters[5].data = run.parameters[5].data * 2
        run.parameters[3].grad = run.parameters[3].grad.clone()


CHANGES = [_drop_a_gradient, _reload, _write, _change_options, _add_a_group, _assign]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_changes_between_steps_are_seen(change):
    runs = [Flat(torch.optim.AdamW, {"weight_decay": 0.1}) for _ in range(2)]
    steps = [FlatStep(runs[0].optimizer), runs[1].optimizer.step]
    for number in range(STEPS):
        for run, step in zip(runs, steps, strict=True):
            change(run, number)
            step()
        assert_equal(*runs)
        for mine, theirs in zip(runs[0].parameters, runs[1].parameters, strict=True):
            assert torch.equal(mine, theirs)


def test_groups_and_parameters_that_are_apart_are_stepped_as_they_are():
    runs = [Flat(torch.optim.AdamW, {}, groups=2) for _ in range(2)]
    step = FlatStep(runs[0].optimizer)
    for _ in range(STEPS):
        for run in runs:
            run.backward()
        step(), runs[1].optimizer.step()
    assert_equal(*runs)


@pytest.mark.parametrize(
    ("sizes", "tensors"),
    [
        ([100] * 5, 5),
        ([100] * 6, 1),
        ([70_000] * 6, 6),
        ([20_000_000], 153),
        ([2_000_000], 1),
        ([1_000_000, 1_200_000], 17),
        ([1_000_000, 1_000_000], 2),
    ],
)
def test_it_is_done_where_it_is_faster(monkeypatch, sizes, tensors):
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    weights, gradients = torch.zeros(sum(sizes)), torch.zeros(sum(sizes))
    parameters = [nn.Parameter(part) for part in weights.split(sizes)]
    for parameter, gradient in zip(parameters, gradients.split(sizes), strict=True):
        parameter.grad = gradient
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    counts = []
    monkeypatch.setattr(optimizer, "step", lambda: counts.append(len(optimizer.param_groups[0]["params"])))
    FlatStep(optimizer)()
    assert counts == [tensors]


def test_matrices_and_scalars_keep_their_shapes():
    def build():
        torch.manual_seed(0)
        return [nn.Parameter(torch.randn(60, 50)), nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.randn(8, 9).t())]

    mine, theirs = build(), build()
    optimizer, other = torch.optim.AdamW(mine), torch.optim.AdamW(theirs)
    step = FlatStep(optimizer)
    for _ in range(3):
        for parameter in (*mine, *theirs):
            parameter.grad = torch.ones_like(parameter)
        step(), other.step()
    torch.testing.assert_close(optimizer.state_dict(), other.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_autograd_sees_that_weights_have_changed():
    parameter = nn.Parameter(torch.ones(3000))
    loss = (parameter * parameter).sum()
    parameter.grad = torch.ones(3000)
    FlatStep(torch.optim.SGD([parameter], lr=0.1))()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_hook_sees_the_parameters(stepped):
    flat = Flat(torch.optim.AdamW, {})
    seen = []
    flat.optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"])))
    flat.backward()
    FlatStep(flat.optimizer)()
    assert seen == stepped == [len(SIZES)]


class Own(torch.optim.AdamW):
    pass


def test_other_classes_are_stepped_as_they_are(stepped):
    flat = Flat(Own, {})
    flat.backward()
    FlatStep(flat.optimizer)()
    assert stepped == [len(SIZES)]


def test_an_error_in_a_step_leaves_the_optimizer_whole(monkeypatch):
    flat = Flat(torch.optim.AdamW, {})
    step = FlatStep(flat.optimizer)
    flat.backward()
    step()
    flat.optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        step()
    assert [id(p) for p in flat.optimizer.param_groups[0]["params"]] == [id(p) for p in flat.parameters[::-1]]
    assert set(flat.optimizer.state) == set(flat.parameters)


def test_a_copy_steps_its_own_parameters():
    flat = Flat(torch.optim.AdamW, {})
    step = FlatStep(flat.optimizer)
    flat.backward()
    step()
    before = flat.weights.clone()
    other = copy.deepcopy(step)
    for parameter in other.optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    other()
    assert torch.equal(flat.weights, before)
    assert all(entries["step"] == 2 for entries in other.optimizer.state.values())
