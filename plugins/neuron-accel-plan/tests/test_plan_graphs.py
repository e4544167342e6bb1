"""What cannot compile is not recommended: operations that are refused, and experts as a device has to run them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from neuron_accel_plan.graphs import findings
from neuron_accel_plan.memory import StepCounter

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def mixture():
    from transformers import MixtralConfig

    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    return MixtralConfig(num_hidden_layers=4, vocab_size=256, max_position_embeddings=128, **experts, **SIZE)


def planned(model, **options):
    from neuron_accel_plan import plan

    return plan(model, **{"world_size": 8, "global_batch": 16, "sequence": 64, **options})


def test_operations_that_a_compiler_refuses_are_noted():
    with StepCounter(torch.device("cpu")) as counter:
        torch.ones(4, 4).topk(2)
        assert [str(each) for each in findings(counter.noted)] == [
            "NCC_EVRF001: sort is not among the operators that are documented as supported (topk)"
        ]
        assert not any(each.certain for each in findings(counter.noted))
        torch.ones(4, 4).to(torch.complex64) * 2
        torch.ones(4).histc(2)
        codes = {each.code: each.certain for each in findings(counter.noted)}
        assert codes == {"NCC_EVRF004": True, "": True, "NCC_EVRF001": False}
        counter.forget_peaks()
        torch.ones(4, 4) @ torch.ones(4, 4)
        assert findings(counter.noted) == []


def test_a_mixture_is_counted_as_a_device_has_to_run_it(mixture):
    plain, on_device = planned(mixture), planned(mixture, instance="trn1.32xlarge")
    assert plain.findings == []  # of a CPU
    assert [each.code for each in on_device.findings] == ["NCC_EVRF001"]
    assert on_device.compiles
    assert on_device.step.peak.total > 1.5 * plain.step.peak.total  # the weights of each token's experts are gathered
    assert on_device.step.operations == pytest.approx(plain.step.operations, rel=0.01)
    assert on_device.work == pytest.approx(1.0, rel=0.01)


def test_padding_of_experts_is_a_factor_of_work(mixture):
    pytest.importorskip("neuron_accel_expert_parallel")
    from neuron_accel_plan.plan_text import describe

    counted = planned(
        mixture, instance="trn1.32xlarge", config={"plugins": [{"expert_parallel": {"expert_parallel_size": 2}}]}
    )
    assert 2 < counted.work < 4  # 8 experts for each token instead of 2, beside attention and the head
    assert f"{counted.work:.2g} times those of the model" in describe(counted, 80)


def test_a_search_rules_out_what_cannot_compile(mixture):
    from neuron_accel_plan import dry_runs, search
    from neuron_accel_plan.layout import Planner

    planner = Planner(mixture, world_size=8, global_batch=16, sequence=64, instance="trn1.32xlarge")
    count = planner.count([])
    layout = search.Layout(plugins=(), accumulation=1)

    class Counts:
        def count(self, plugins, accumulation, **options):
            return replace(count, step=replace(count.step, noted=("complex numbers", "topk")))

    assert isinstance(dry_runs.answer(planner, None, layout), search.Ranked)
    failed = dry_runs.answer(Counts(), None, layout)
    assert failed == dry_runs.Failed("NCC_EVRF004: complex numbers are not supported")
