"""Column-wise layers that compute while the input of their region is being gathered along the sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from neuron_accel.strategies.tensor_parallel.linear import ColumnParallelConv1D, ColumnParallelLinear
from neuron_accel.strategies.tensor_parallel.regions import _Region
from neuron_accel.strategies.tensor_parallel.tp_region import SequenceFlow, TpRegion
from neuron_accel.testing import assert_parallel_equivalence, run_ranks
from neuron_accel.testing.parity import Training
from tests.distributed.models import MODELS, llama, token_batches
from tests.distributed.strategies.tensor_parallel.tensor_parallel_support import FAMILIES, batch, make_run, shard, step

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
        self.v.requires_grad_(case not in ("frozen", "one frozen"))
        self.q.requires_grad_(case != "frozen")
        self.case = case

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k = self.q(hidden_states), self.k(hidden_states)
        v = self.v(hidden_states * 2 if self.case == "another input" else hidden_states)
        if self.case == "unused product":
            k = k.detach()
        if self.case == "changed in place":
            q.mul_(2)
        total = q.sin().sum(-1) * k.cos().sum(-1) + v.sin().sum(-1)
        return total + hidden_states.square().mean(-1) if self.case == "read directly" else total


CASES = (
    "plain", "one frozen", "frozen", "no gradient of the input", "read directly", "another input", "unused product",
    "changed in place", "autocast", "no grad", "flat", "gradient of the gradient", "float64",
)  # fmt: skip


def run_region(module: Module, tp_region: TpRegion, length: int, batches: int) -> dict[str, torch.Tensor | None]:
    """Output and gradients of two calls."""
    case, size = module.case, -(-length // tp_region.group.size)
    tp_region.flow._length = length
    generator = torch.Generator().manual_seed(10 + tp_region.group.index)
    x = torch.randn(batches, size, FEATURES, generator=generator)
    if case == "float64":
        x, module = x.double(), module.double()
    if case == "no grad":
        with torch.no_grad():
            return {"output": module(x)}
    x.requires_grad_(case != "no gradient of the input")
    total: Any = 0
    for factor in (1.0, 0.5):
        given = (x * factor).flatten(0, 1) if case == "flat" else x * factor
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case == "autocast"):
            output = module(given)
        total = total + output.float().square().sum()
    inputs = [each for each in (x, *module.parameters()) if each.requires_grad]
    if case == "gradient of the gradient":
        gradients = torch.autograd.grad(total, inputs, create_graph=True)
        total = sum(gradient.square().sum() for gradient in gradients)
    total.backward()
    return {"output": output.detach(), "x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def compare_regions(case: str) -> None:
    run = make_run(degree=torch.distributed.get_world_size()) if torch.distributed.is_initialized() else None
    run = run or make_run(degree=int(__import__("os").environ["WORLD_SIZE"]))
    for length, batches in ((8, 2), (8, 1), (7, 2), (5, 1), (1, 2)):
        found = []
        for overlap_gather in (False, True):
            tp_region = TpRegion(run.backend, run.group("tp"))
            tp_region.flow = SequenceFlow(tp_region.backend, tp_region.group, overlap_gather=overlap_gather)
            module = Module(tp_region, case)
            region = _Region(module, tp_region)
            module.register_forward_pre_hook(region.enter, with_kwargs=True)
            module.register_forward_hook(region.leave, always_call=True)
            found.append(run_region(module, tp_region, length, batches))
            assert module.q._ahead is module.v._ahead is None
            assert module.v.reads_gathered is not (overlap_gather and case == "another input")
        expected, actual = found
        assert {name for name, value in actual.items() if value is None} == {
            name for name, value in expected.items() if value is None
        }
        exact = {"rtol": 1e-4, "atol": 1e-4} if case != "autocast" else {"rtol": 3e-2, "atol": 3e-2}
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, **exact, msg=lambda text, n=name: f"{case} {n}: {text}")


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_region_computes_the_same(case, degree):
    run_ranks(compare_regions, degree, case)
