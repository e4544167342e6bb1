"""Gradient norms and clipping count every element once, also where ranks hold the same key/value heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from neuron_accel import NeuronAccelerator
from neuron_accel.errors import DesyncError
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import loader_of
from tests.distributed.models import llama, token_batches
from tests.distributed.optimizers import SAM

P_NORMS = (1.0, 2.0, 3.0, math.inf)
SP, PP = "sequence_parallel", {"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}
CASES = {
    # key/value heads, degree of tensor parallelism, further plugins, ranks
    "kv1-tp2": (1, 2, [], 2),
    "kv1-tp4-sp": (1, 4, [SP], 4),
    "kv2-tp4": (2, 4, [], 4),
    "kv1-tp2-sp-dp2-zero1": (1, 2, [SP, "zero1"], 4),
    "kv2-tp4-zero1": (2, 4, ["zero1"], 4),
    "kv1-tp2-dp2-fully-sharded": (1, 2, ["fully_sharded"], 4),
    "kv2-tp4-sp-fully-sharded": (2, 4, [SP, "fully_sharded"], 4),
    "kv1-tp2-pp2-sp": (1, 2, [PP, SP], 4),
}


def _model(kv_heads: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return llama(kv_heads=kv_heads).train()


def _expected(kv_heads: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, (batch,) = _model(kv_heads), token_batches(1)
    model(**batch).loss.backward()
    norms = [float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, p)) for p in P_NORMS]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return norms, dict(model.state_dict())


def _on_ranks(kv_heads: int, degree: int, plugins: list[Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    tensor = {"model_parallelism": {"tensor_parallel_size": degree}}
    accelerator = NeuronAccelerator(config={"plugins": [tensor, *plugins]})
    model = _model(kv_heads)
    loader = loader_of(token_batches(1), accelerator.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
    norms = [float(accelerator.clip_grad_norm_(model.parameters(), math.inf, p)) for p in P_NORMS]
    accelerator.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return norms, accelerator.get_state_dict(model) or {}


@pytest.mark.parametrize("case", CASES)
def test_norms_and_clipping_like_one_process(case: str) -> None:
    kv_heads, degree, plugins, ranks = CASES[case]
    norms, weights = _expected(kv_heads)
    results = run_ranks(_on_ranks, ranks, kv_heads, degree, plugins)
    for found, _ in results:
        assert found == pytest.approx(norms, rel=1e-5)
    for name, weight in results[0][1].items():
        torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def _of_float64(plugins: list[Any]) -> list[torch.Tensor]:
    accelerator = NeuronAccelerator(config={"plugins": plugins})
    model = _model(kv_heads=4).double()
    loader = loader_of(token_batches(1), accelerator.data_parallel_size)
    model, _, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
    return [accelerator.clip_grad_norm_(model.parameters(), math.inf, p) for p in P_NORMS]


@pytest.mark.parametrize("plugins", [[], ["zero1"], ["fully_sharded"]], ids=["dp2", "zero1", "fully-sharded"])
def test_norms_of_float64_are_not_rounded_to_float32(plugins: list[Any]) -> None:
    model, (batch,) = _model(kv_heads=4).double(), token_batches(1)
    model(**batch).loss.backward()
    norms = [float(torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, p)) for p in P_NORMS]
    for found in run_ranks(_of_float64, 2, plugins):
        assert [float(norm) for norm in found] == pytest.approx(norms, rel=1e-11)
        assert {norm.dtype for norm in found} == {torch.float64}


def _clipped_by(way: str, plugins: list[Any], optimizer: Any) -> None:
    """Two steps, with a norm of what each rank holds."""
    accelerator = NeuronAccelerator(config={"plugins": [{"model_parallelism": {"tensor_parallel_size": 2}}, *plugins]})
    model = _model(kv_heads=2)
    model, optimizer = accelerator.prepare(model, optimizer(model.parameters()))
    for batch in token_batches(2):
        accelerator.backward(model(**batch).loss)
        if way == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        elif way == "by hand":
            norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
            for parameter in model.parameters():
                parameter.grad.mul_(0.5 / norm)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.get_state_dict(model)


COMBINED = [([], 2), ([SP, "zero1"], 4), (["fully_sharded"], 4)]


@pytest.mark.parametrize(("plugins", "ranks"), COMBINED)
@pytest.mark.parametrize("way", ["torch", "by hand"])
def test_clipping_by_the_norm_of_shards_is_an_error(way, plugins, ranks):
    with pytest.raises(RanksError) as raised:
        run_ranks(_clipped_by, ranks, way, plugins, torch.optim.AdamW)
    found = raised.value.errors[0]
    assert isinstance(found, DesyncError)
    assert "accelerator.clip_grad_norm_" in found.fix


@pytest.mark.parametrize(("plugins", "ranks"), COMBINED)
def test_changing_each_element_is_not(plugins, ranks):
    run_ranks(_clipped_by, ranks, "values", plugins, torch.optim.AdamW)


def _one_batch() -> None:
    """An epoch of one batch, of which the first stage trains nothing that all of its ranks hold in full."""
    accelerator = NeuronAccelerator(config={"plugins": [{"model_parallelism": {"tensor_parallel_size": 2}}, PP]})
    model = _model(kv_heads=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name or "norm" not in name)
    loader = loader_of(token_batches(1), accelerator.data_parallel_size)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()


def test_a_stage_without_gradients_to_compare_ends_its_epoch_with_the_others():
    run_ranks(_one_batch, 4, timeout=30)


def _clipped_before_own_methods() -> None:
    """SAM by its methods, which the loop calls in place of a step."""
    accelerator = NeuronAccelerator(config={"plugins": [{"model_parallelism": {"tensor_parallel_size": 2}}]})
    model = _model(kv_heads=2)
    model, optimizer = accelerator.prepare(model, SAM(model.parameters(), torch.optim.SGD, lr=0.1))
    for batch in token_batches(2):
        accelerator.backward(model(**batch).loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.optimizer.first_step(zero_grad=True)
        accelerator.backward(model(**batch).loss)
        optimizer.optimizer.second_step(zero_grad=True)
    accelerator.get_state_dict(model)


def test_clipping_before_a_method_of_the_optimizer_is_an_error_too():
    with pytest.raises(RanksError) as raised:
        run_ranks(_clipped_before_own_methods, 2)
    assert {type(error) for error in raised.value.errors.values()} == {DesyncError}
