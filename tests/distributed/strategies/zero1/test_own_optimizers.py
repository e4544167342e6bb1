"""ZeRO-1 beside optimizers and parameters that are not the usual ones: schedules in state dicts, wide and complex
parameters, optimizers that know something of each parameter, the wrapper as torch_xla's scripts use it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from neuron_accel.testing import run_ranks

STEPS = 4


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) for _ in range(STEPS)]


# ---- models ----------------------------------------------------------------------------------------------------------
class Mixed(nn.Module):
    """Complex, float64 and float32 parameters."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(6, 5, dtype=torch.complex64))
        self.exact = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.usual = nn.Linear(5, 3)

    def forward(self, x):
        y = (x.to(torch.complex64) @ self.phase).abs()
        return self.usual((y.double() * self.exact).float()).square().mean()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).square().mean()


def build(model_class):
    torch.manual_seed(0)
    return model_class()


# ---- optimizers ------------------------------------------------------------------------------------------------------
class Decaying(torch.optim.Optimizer):
    """Signed updates with decay: for each parameter as ``decay_of`` says."""

    def __init__(self, params, lr=0.02, **more):
        super().__init__(params, {"lr": lr})
        vars(self).update(more)

    def decay_of(self, p, name):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None, *, scale=1.0):
        for group in self.param_groups:
            names = group.get("param_names", [None] * len(group["params"]))
            for p, name in zip(group["params"], names, strict=True):
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * self.decay_of(p, name))
                    p.sub_(p.grad, alpha=group["lr"] * scale)


class ByAttribute(Decaying):
    def decay_of(self, p, name):
        return 1.0 if getattr(p, "decays", True) else 0.0


class ByMask(Decaying):
    def decay_of(self, p, name):
        return p.mask


class ByParameter(Decaying):
    def decay_of(self, p, name):
        return self.decays[p]


class ByIdentity(Decaying):
    def decay_of(self, p, name):
        return 1.0 if id(p) in self.decayed else 0.0


class ByGroupEntry(Decaying):
    def decay_of(self, p, name):
        return next(g["decays"].get(p, 5.0) for g in self.param_groups if any(p is q for q in g["params"]))


class ByName(Decaying):
    def decay_of(self, p, name):
        return 0.0 if name.endswith("bias") else 1.0


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def by_attribute(model):
    for p in (model.first.bias, model.second.weight):
        p.decays = False
    return ByAttribute(model.parameters())


def by_mask(model):
    for p in model.parameters():
        p.mask = (torch.arange(p.numel()) % 3).view(p.shape).float()
    return ByMask(model.parameters())


def by_parameter(model):
    return ByParameter(model.parameters(), decays={p: 0.5 * i for i, p in enumerate(model.parameters())})


def by_identity(model):
    return ByIdentity(model.parameters(), decayed={id(model.first.weight), id(model.second.bias)})


def by_group_entry(model):
    decays = {p: 0.5 * i for i, p in enumerate(model.parameters())}
    return ByGroupEntry([{"params": list(model.parameters()), "decays": decays}])


def by_name(model):
    return ByName(list(model.named_parameters()))


CASES = {
    "complex and float64": (Mixed, adamw, {}),
    "complex, accumulated by hook": (Mixed, adamw, {"use_grad_acc_hook": True}),
    "complex, whole parameters": (Mixed, adamw, {"partition": "parameters"}),
    "complex, clipped": (Mixed, adamw, {"max_norm": 0.05}),
    "attribute": (Plain, by_attribute, {}),
    "attribute, whole parameters": (Plain, by_attribute, {"partition": "parameters"}),
    "attribute of the parameter's shape": (Plain, by_mask, {}),
    "dict by parameter": (Plain, by_parameter, {}),
    "set of ids": (Plain, by_identity, {}),
    "dict in a group": (Plain, by_group_entry, {}),
    "names": (Plain, by_name, {}),
}


def alone(model_class, make, options):
    model = build(model_class)
    optimizer = make(model)
    for index, x in enumerate(data()):
        model(x).backward()
        if "max_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        if index == 1 and make is by_attribute:
            model.first.weight.decays = False
    return {name: value.clone() for name, value in model.state_dict().items()}


def sharded():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    results = {}
    for name, (model_class, make, options) in CASES.items():
        accelerator = NeuronAccelerator(plugins=[Zero1Plugin(bucket_cap_mb=0.0002, **options)])
        model = build(model_class)
        model, optimizer = accelerator.prepare(model, make(model))
        for index, x in enumerate(data()):
            accelerator.backward(model(x.chunk(accelerator.num_processes)[accelerator.process_index]))
            optimizer.step()
            optimizer.zero_grad()
            if index == 1 and make is by_attribute:
                model.first.weight.decays = False
        results[name] = {key: value.clone() for key, value in model.state_dict().items()}
        accelerator.free_memory()
    return results


@pytest.fixture(scope="module")
def found():
    return run_ranks(sharded, 2)


@pytest.mark.parametrize("name", CASES)
def test_trains_like_one_process(name, found):
    expected = alone(*CASES[name])
    for weights in (results[name] for results in found):
        for key, value in expected.items():
            tolerance = 1e-12 if value.dtype == torch.float64 and "max_norm" not in CASES[name][2] else 2e-6
            assert weights[key].dtype == value.dtype
            if value.dtype == torch.float64:
                tolerance = 1e-6  # what it is multiplied with is float32
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=tolerance)


class Exact(nn.Module):
    def __init__(self):
        super().__init__()
        self.exact = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x):
        return self.exact(x.double()).square().mean()


def exactly(sharded):
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    model = build(Exact)
    optimizer = adamw(model)
    if sharded:
        accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
        model, optimizer = accelerator.prepare(model, optimizer)
    for x in data():
        if sharded:
            accelerator.backward(model(x.chunk(accelerator.num_processes)[accelerator.process_index]))
        else:
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {k: v for entries in optimizer.state.values() for k, v in entries.items()}
    return model.exact.weight.detach().clone(), state["exp_avg"].dtype


def test_master_weights_are_at_least_as_wide_as_the_parameter():
    expected, _ = exactly(False)
    for weight, dtype in run_ranks(exactly, 2, True):
        assert dtype == torch.float64
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-13)


# ---- state dicts -----------------------------------------------------------------------------------------------------
def schedule(tmp_path):
    """The rates in a state dict and after it was loaded, and after a checkpoint was, under what divides or puts
    together."""
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = build(Plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(data()[0]))
    optimizer.step()
    scheduler.step()
    rates = [optimizer.param_groups[0]["lr"]]
    state = copy.deepcopy(optimizer.state_dict())
    rates.append(state["param_groups"][0]["lr"])
    optimizer.load_state_dict(state)
    rates.append(optimizer.param_groups[0]["lr"])
    accelerator.save_state(tmp_path)
    optimizer.param_groups[0]["lr"] = 7.0
    accelerator.load_state(tmp_path)
    rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_state_dicts_have_the_rates_of_now(tmp_path):
    for rates in run_ranks(schedule, 2, tmp_path):
        assert rates == pytest.approx([0.01] * 4)  # the scheduler has advanced once for each rank


def reload_after_unfreezing():
    from neuron_accel import NeuronAccelerator, NeuronAccelError, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = build(Plain)
    model.second.requires_grad_(False)
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step():
        accelerator.backward(model(data()[0].chunk(accelerator.num_processes)[accelerator.process_index]))
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    model.second.requires_grad_(True)
    step()
    after = copy.deepcopy(optimizer.state_dict())
    first = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(before[1])
    optimizer.load_state_dict(before[0])
    step()
    again = {k: v.clone() for k, v in model.state_dict().items()}
    # What had a state of its own before `second` trained cannot take one of both.
    accelerator.free_memory()
    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = build(Plain)
    model, optimizer = accelerator.prepare(model, adamw(model))
    try:
        optimizer.load_state_dict(after)
    except NeuronAccelError as error:
        return first, again, str(error)
    return first, again, "nothing"


def test_a_state_dict_from_before_a_parameter_trained():
    for first, again, message in run_ranks(reload_after_unfreezing, 2):
        for key, value in first.items():
            torch.testing.assert_close(again[key], value)
        assert "sharded in another way" in message
        assert "save_state" in message


# ---- what cannot be done ---------------------------------------------------------------------------------------------
class Raises(Decaying):
    def decay_of(self, p, name):
        raise LookupError(f"no rule for a parameter of shape {tuple(p.shape)}")


def refuse():
    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = build(Plain)
    try:
        accelerator.prepare(model, Raises(model.parameters()))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_an_optimizer_that_fails_the_trial_is_refused_with_its_error():
    kind, message = run_ranks(refuse, 1)[0]
    assert kind == "PlanError"
    assert "LookupError" in message
    assert "no rule for" in message
    assert "partition='parameters'" in message


# ---- the wrapper -----------------------------------------------------------------------------------------------------
def use_wrapper():
    from neuron_accel import ZeroRedundancyOptimizer

    results = {}
    model = build(Plain)
    for name, bad in {
        "[]": list,
        "a bare tensor": lambda: torch.ones(2),
        "42": lambda: [model.first.weight, 42],
        "non-leaf": lambda: [model.first.weight * 2],
        "sparse": lambda: [nn.Parameter(torch.eye(3).to_sparse())],
        "not optional": lambda: 42,
    }.items():
        try:
            ZeroRedundancyOptimizer(bad(), torch.optim.SGD, lr=0.1)
        except Exception as error:
            results[name] = type(error).__name__, str(error)
    # By position, as torch_xla's: dtype, clipping, its norm, layouts, two kinds of groups, laziness, two sizes, hook,
    # masters, precision.
    optimizer = ZeroRedundancyOptimizer(
        list(model.first.parameters()), ByAttribute, torch.float32, True, None, True, None, None, True, 1, 2, False,
        True, False, lr=0.5,
    )  # fmt: skip
    optimizer.init_zero()
    optimizer.add_param_group({"params": model.second.parameters(), "lr": 0.25})
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for x in data():
        (3 * model(x.chunk(size)[rank])).backward()
        optimizer.step(scale=0.5)
        optimizer.zero_grad()
    try:
        optimizer.step(sharding_scheme=[])
    except Exception as error:
        results["scheme"] = type(error).__name__, str(error)
    return results, {key: value.clone() for key, value in model.state_dict().items()}


def test_the_wrapper_takes_what_torch_xlas_takes():
    model = build(Plain)
    groups = [
        {"params": list(model.first.parameters()), "lr": 0.5},
        {"params": list(model.second.parameters()), "lr": 0.25},
    ]
    optimizer = ByAttribute(groups)
    for x in data():
        (3 * model(x)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(scale=0.5)
        optimizer.zero_grad()
    for errors, weights in run_ranks(use_wrapper, 2):
        for key, value in model.state_dict().items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)
        assert {name: kind for name, (kind, _) in errors.items()} == {
            "[]": "ValueError",
            "a bare tensor": "TypeError",
            "42": "TypeError",
            "non-leaf": "ValueError",
            "sparse": "ValueError",
            "not optional": "TypeError",
            "scheme": "UsageError",
        }
        assert "empty parameter list" in errors["[]"][1]
        assert "dense" in errors["sparse"][1]
