"""Column-wise layers that compute while the input of their region is being gathered along the sequence."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from neuron_accel.strategies.tensor_parallel.linear import ColumnParallelConv1D, ColumnParallelLinear
from neuron_accel.strategies.tensor_parallel.overlap import ColumnWise
from neuron_accel.strategies.tensor_parallel.regions import _Region
from neuron_accel.strategies.tensor_parallel.tp_region import SequenceFlow, TpRegion
from neuron_accel.testing import assert_parallel_equivalence, run_ranks
from neuron_accel.testing.parity import Training
from tests.distributed.models import MODELS, llama, token_batches
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import (
    FAMILIES,
    batch,
    compare_step,
    make_run,
    shard,
    step,
)
from tests.guests import guards
from tests.sweeps.tiny import tiny_model

if TYPE_CHECKING:
    from neuron_accel.contract import Run

FEATURES = 8


# ---- one region, against the same region that is gathered first ------------------------------------------------------
class Module(nn.Module):
    """A region: three layers read its input, one of them [in, out] and one perhaps frozen, and so does the sum."""

    def __init__(self, tp_region: TpRegion, case: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(tp_region.group.index)

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.q, self.k = ColumnParallelLinear(FEATURES, 6), ColumnParallelLinear(FEATURES, 4, bias=False)
        self.v = ColumnParallelConv1D()
        self.q.weight, self.q.bias, self.k.weight = random(6, FEATURES), random(6), random(4, FEATURES)
        self.v.weight, self.v.bias, self.v.nx, self.v.nf = random(FEATURES, 5), random(5), FEATURES, 5
        for layer in (self.q, self.k, self.v):
            layer.tp_region = tp_region
        self.k.requires_grad_(case != "frozen")
        self.v.requires_grad_(case != "frozen" and "one frozen" not in case)
        self.q.requires_grad_(case != "frozen")
        self.case = case
        self.differentiable: list[bool] = []

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k = self.q(hidden_states), self.k(hidden_states)
        v = self.v(hidden_states * 2 if self.case == "another input" else hidden_states)
        self.differentiable += [each.requires_grad for each in (hidden_states, q, k, v)]
        if self.case == "unused product":
            k = k.detach()
        if self.case == "changed in place":
            q.mul_(2)
        total = q.sin().sum(-1) * k.cos().sum(-1) + v.sin().sum(-1)
        return total + hidden_states.square().mean(-1) if self.case == "read directly" else total


CASES = (
    "plain", "one frozen", "frozen", "no gradient of the input", "one frozen, no gradient of the input",
    "read directly", "another input", "unused product", "changed in place", "autocast", "no grad", "flat",
    "gradient of the gradient", "float64",
)  # fmt: skip


def run_region(module: Module, tp_region: TpRegion, length: int, batches: int) -> dict[str, torch.Tensor | None]:
    """Output and gradients of two calls."""
    case, size = module.case, -(-length // tp_region.group.size)
    tp_region.flow._length = length
    generator = torch.Generator().manual_seed(10 + tp_region.group.index)
    x = torch.randn(batches, size, FEATURES, generator=generator)
    if case in ("float64", "gradient of the gradient"):
        x, module = x.double(), module.double()
    if case == "no grad":
        with torch.no_grad():
            return {"output": module(x)}
    x.requires_grad_("no gradient of the input" not in case)
    total: Any = 0
    for factor in (1.0, 0.5):
        given = (x * factor).flatten(0, 1) if case == "flat" else x * factor
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
            output = module(given)
        total = total + (output.float() if case == "autocast" else output).square().sum()
    inputs = [each for each in (x, *module.parameters()) if each.requires_grad]
    if case == "gradient of the gradient":
        gradients = torch.autograd.grad(total, inputs, create_graph=True)
        total = sum(gradient.square().sum() for gradient in gradients)
    total.backward()
    return {"output": output.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def compare_regions(degree: int) -> None:
    run = make_run(degree=degree)
    for case in CASES:
        for length, batches in ((8, 2), (8, 1), (7, 2), (5, 1), (1, 2)):
            compare(run, case, length, batches)


def compare(run: Run, case: str, length: int, batches: int) -> None:
    found, differentiable = [], []
    for options in ({}, {"overlap_gather": True}, {"regather": True}):
        tp_region = TpRegion(run.backend, run.group("tp"))
        tp_region.flow = SequenceFlow(tp_region.backend, tp_region.group, **options)
        module = Module(tp_region, case)
        region = _Region(module, tp_region)
        module.register_forward_pre_hook(region.enter, with_kwargs=True)
        module.register_forward_hook(region.leave, always_call=True)
        found.append(run_region(module, tp_region, length, batches))
        differentiable.append(module.differentiable)
        assert module.q._ahead is module.v._ahead is None, "products outlive the region"
        assert module.v.reads_gathered is not (bool(options) and case == "another input")
    expected, *others = found
    assert differentiable[0] == differentiable[1] == differentiable[2], case
    bounds = {"rtol": 3e-2, "atol": 3e-2} if case == "autocast" else {"rtol": 1e-4, "atol": 1e-4}
    for actual in others:
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, **bounds, msg=lambda text, n=name: f"{case}, {n}: {text}")


@pytest.mark.parametrize("degree", [2, 4])
def test_a_region_computes_the_same(degree):
    run_ranks(compare_regions, degree, degree)


class Interrupted(RuntimeError):
    pass


def interrupt() -> None:
    run = make_run(degree=2, sequence_parallel=True, overlap_gather=True)
    model = FAMILIES["llama"]()
    shard(model, run)
    attention = model.model.layers[0].self_attn
    layers = attention.q_proj, attention.k_proj, attention.v_proj

    def fail(*_: Any) -> None:
        raise Interrupted

    handle = attention.v_proj.register_forward_pre_hook(fail)
    with pytest.raises(Interrupted):
        model(**batch())
    handle.remove()
    assert all(layer._ahead is None and layer.reads_gathered for layer in layers)
    copied = copy.deepcopy(model)
    step(copied, batch())
    assert all(layer._ahead is None and layer.reads_gathered for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copied.parameters(), strict=True))


def test_an_error_in_a_region_leaves_no_products():
    run_ranks(interrupt, 2)


# ---- on a clock ------------------------------------------------------------------------------------------------------
class Network:
    """Delays the all-gathers and reduce-scatters of a backend on a clock, one after another. Only they and products of
    matrices, a unit for each operation, move it."""

    def __init__(self, backend: Any, delay: int) -> None:
        self.now, self.free, self.delay = 0, 0, delay
        for name in ("start_all_gather", "start_reduce_scatter"):
            setattr(backend, name, self.delayed(getattr(backend, name)))

    def delayed(self, start: Any) -> Any:
        network = self

        class Delayed:
            def __init__(self, pending: Any, ready: int) -> None:
                self.pending, self.ready = pending, ready

            def wait(self) -> torch.Tensor:
                network.now = max(network.now, self.ready)
                return self.pending.wait()

        def begin(*arguments: Any) -> Delayed:
            self.free = max(self.now, self.free) + self.delay
            return Delayed(start(*arguments), self.free)

        return begin


class Clock(TorchDispatchMode):
    """Moves the clock of a network by what is computed."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        self.network.now += 0 if count is None else count(*args, **(kwargs or {}), out_val=result)
        return result


def time_step(family: str, delay: int, overlap_gather: bool, regather: bool) -> tuple[int, list[int]]:
    """How long a step takes, and for each region how many operations the products of its layers are: as many in the
    forward pass as for the gradient of the input, and for those of the weights."""
    run = make_run(degree=2, sequence_parallel=True, overlap_gather=overlap_gather, regather=regather)
    model = FAMILIES[family]()
    shard(model, run)
    network = Network(run.backend, delay)
    with Clock(network):
        step(model, batch(8))
    found = []
    for name, module in model.named_modules():
        layers = [each for each in module.children() if isinstance(each, ColumnWise)]
        if layers:
            operations = 2 * 2 * 8 * sum(layer.weight.numel() for layer in layers)
            assert 100 < operations // 2 < 10**9, name
            found.append(operations)
    return network.now, found


DELAYS = pytest.mark.parametrize("delay", [100, 10**9], ids=["fast network", "slow network"])


@DELAYS
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_computed_meanwhile(family, delay):
    at_once, overlapping = (run_ranks(time_step, 2, family, delay, overlap, False) for overlap in (False, True))
    for (time, regions), (shorter, _) in zip(at_once, overlapping, strict=True):
        # Forward: this rank's half of the products of q, k and v, or of the first layers of the MLP, while the other
        # half of their input travels. Backward: the gradients of their weights, while that of their input is reduced.
        hidden = sum(min(delay, operations // 2) + min(delay, operations) for operations in regions)
        assert time - shorter == hidden > 0


@DELAYS
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_computed_while_the_input_is_gathered_again(family, delay):
    kept, again = (run_ranks(time_step, 2, family, delay, True, regather) for regather in (False, True))
    for (time, regions), (longer, _) in zip(kept, again, strict=True):
        # The gather starts before the products for the gradient of the input, and is waited for after them, before the
        # gradients of the weights: a step is longer by as much of the gather as these products do not hide.
        assert longer - time == sum(max(0, delay - operations) for operations in regions)


# ---- beside other strategies, against one process --------------------------------------------------------------------
TP2, TP4 = ({"tensor_parallel": {"tensor_parallel_size": size}} for size in (2, 4))
OVERLAPPING = {"sequence_parallel": {"overlap_gather": True}}
RECOMPUTE = "activation_checkpointing"


def pipeline(**options: Any) -> dict[str, Any]:
    return {"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2, **options}}


COMPOSITIONS = {
    "tp2": (2, [TP2, OVERLAPPING], 1),
    "tp4": (4, [TP4, OVERLAPPING], 2),
    "recomputes": (2, [TP2, OVERLAPPING, RECOMPUTE], 2),
    "recomputes-attention": (2, [TP2, OVERLAPPING, {RECOMPUTE: {"modules": "attention"}}], 1),
    "recomputes-scores": (2, [TP2, OVERLAPPING, {RECOMPUTE: {"modules": "core_attention"}}], 1),
    "dp2-zero1-recomputes": (4, [TP2, OVERLAPPING, RECOMPUTE, "zero1"], 2),
    "dp2-fully-sharded": (4, [TP2, OVERLAPPING, "fully_sharded"], 1),
    "pp2-recomputes": (4, [TP2, OVERLAPPING, RECOMPUTE, pipeline()], 1),
    "pp2-zero-bubble": (4, [TP2, OVERLAPPING, RECOMPUTE, pipeline(schedule="zero-bubble")], 1),
    "guards": (2, [TP2, OVERLAPPING, *guards("finite_guard", "replica_check", "sum_check")], 1),
}


def freeze_some(model: nn.Module) -> None:
    """Freezes the projections of queries and the first layers of MLPs, wholly or but for their bias."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("q_proj", "up_proj", "c_attn.bias", "c_fc.weight")):
            parameter.requires_grad_(False)


@pytest.mark.parametrize("family", ["llama", "gpt2-tied"])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_trains_like_one_process(composition, family):
    ranks, plugins, accumulation = COMPOSITIONS[composition]
    training = Training(max_norm=0.5, accumulation=accumulation)
    batches = token_batches(3 * accumulation, size=8, length=11)
    assert_parallel_equivalence(MODELS[family], batches, plugins, ranks=ranks, training=training)


@pytest.mark.parametrize("plugins", [[], [RECOMPUTE]], ids=["", "recomputes"])
@pytest.mark.parametrize("family", ["llama", "gpt2-tied"])
def test_frozen_weights(family, plugins):
    training = Training(prepare_model=freeze_some)
    batches = token_batches(3)
    assert_parallel_equivalence(MODELS[family], batches, [TP2, OVERLAPPING, *plugins], ranks=2, training=training)


def test_key_value_heads_on_several_ranks():
    model = functools.partial(llama, kv_heads=1)
    assert_parallel_equivalence(model, token_batches(3), [TP4, OVERLAPPING, RECOMPUTE], ranks=4)


def step_of(overlap_gather, regather):
    found = {}
    for name in (*FAMILIES, "opt", "qwen2_moe"):
        model = FAMILIES[name]() if name in FAMILIES else tiny_model(name)
        options = {"sequence_parallel": True, "overlap_gather": overlap_gather, "regather": regather}
        found[name] = compare_step(model, batch(7), degree=2, **options)
    return found


@pytest.mark.parametrize("regather", [False, True])
@pytest.mark.parametrize("overlap_gather", [False, True])
def test_gathering_again_in_backward_changes_no_gradient(overlap_gather, regather):
    for found in run_ranks(step_of, 2, overlap_gather, regather):
        for name, compared in found.items():
            assert compared["loss"] == pytest.approx(compared["expected"], rel=1e-5), name
            assert compared["error"] < 1e-4, (name, compared["where"])


@pytest.mark.parametrize("others", [["zero1"], [RECOMPUTE]])
def test_keeping_gathered_inputs_beside_other_strategies(others):
    model = functools.partial(llama, kv_heads=2)
    plugins = [TP2, {"sequence_parallel": {"regather": False}}, *others]
    assert_parallel_equivalence(model, token_batches(3), plugins, ranks=2)


OTHER_FAMILIES = {
    "bert": {"query", "key", "value", "dense"},  # attention is a module in the region
    "opt": {"q_proj", "k_proj", "v_proj", "fc1"},  # [batch x sequence, hidden]; fc1 is a region itself
    "qwen2_moe": {"q_proj", "k_proj", "v_proj"},  # the shared expert is called with a view of the input
    "phi3": {"qkv_proj", "gate_up_proj"},
}


def overlapping(names: list[str]) -> dict[str, tuple[dict[str, Any], set[str]]]:
    found = {}
    for name in names:
        model = tiny_model(name)
        compared = compare_step(model, batch(7), degree=2, sequence_parallel=True, overlap_gather=True)
        layers = [(fqn, module) for fqn, module in model.named_modules() if isinstance(module, ColumnWise)]
        found[name] = compared, {fqn.rpartition(".")[2] for fqn, layer in layers if layer.reads_gathered}
    return found


def test_other_families():
    for found in run_ranks(overlapping, 2, list(OTHER_FAMILIES)):
        for name, (compared, layers) in found.items():
            assert compared["loss"] == pytest.approx(compared["expected"], rel=1e-5), name
            assert compared["error"] < 1e-4, (name, compared["where"])
            assert layers == OTHER_FAMILIES[name], name


# ---- where nothing overlaps ------------------------------------------------------------------------------------------
def explain(plugins: list[Any]) -> list[str]:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [TP2, OVERLAPPING, *plugins]})
    torch.manual_seed(0)
    model = llama()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(**token_batches(1)[0]).loss)
    lines = accelerator.explain(model).splitlines()
    return [line for line in lines if "all-gather and reduce-scatter in" in line]


def test_explain_names_the_layers():
    for plugins, in_attention in (
        ([], "the first two during q_proj, k_proj, v_proj"),
        ([{RECOMPUTE: {"modules": "attention"}}], "no overlap"),
    ):
        lines = run_ranks(explain, 2, plugins)[0]
        assert len(lines) == 4
        for line in lines:
            expected = in_attention if ".self_attn " in line else "the first two during gate_proj, up_proj"
            assert expected in line


def test_weight_gradients_that_a_pipeline_defers_stay_deferred():
    lines = run_ranks(explain, 4, [pipeline(schedule="zero-bubble")])[0]
    assert lines
    assert all("no overlap" in line for line in lines)
