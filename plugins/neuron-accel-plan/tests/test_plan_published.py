"""Published runs: chosen and ordered by the stated rule, and what follows from three of them."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest
from neuron_accel_plan.published import (
    CALIBRATING,
    PREDICTIONS,
    RUNS,
    compared,
    factors_of,
    interval_of,
    predict_run,
    runs,
)

from neuron_accel import find_instance
from neuron_accel.commands import main


def release(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text.partition(",")[0]))


@pytest.mark.parametrize("instance", runs())
def test_runs_are_in_the_order_of_the_rule(instance):
    """The newest release first, then by name: which three calibrate does not depend on what is predicted."""
    found = runs()[instance]
    assert len(found) > CALIBRATING
    assert found == sorted(found, key=lambda run: ([-number for number in release(run.release)], run.name))
    for run in found:
        assert all(release(earlier) <= release(run.release) for earlier in run.earlier), run.name


@pytest.mark.parametrize("run", [run for of in runs().values() for run in of], ids=lambda run: run.name)
def test_degrees_of_a_run_make_up_its_cores(run):
    degrees = [int(number) for number in re.findall(r"(?:TP|DP|PP) (\d+)", run.name)]
    assert math.prod(degrees) == run.instances * find_instance(run.instance).hardware().full
    parallel = run.plugins[0]["model_parallelism"]
    assert degrees == [
        parallel["tensor_parallel_size"],
        run.global_batch // parallel.get("num_microbatches", run.accumulation),  # micro-batches of one sample
        *([parallel["pipeline_parallel_size"]] if "pipeline_parallel_size" in parallel else []),
    ]
    for address in (run.source, run.layout):
        assert re.fullmatch(r"https://github.com/aws-neuron/\S+/blob/[0-9a-f]{40}/\S+", address)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", json.loads(RUNS.read_text())["read"])


def test_the_interval_is_that_of_a_new_run():
    """Student's quantile for two degrees of freedom is 1.886 for 80%."""
    low, high = factors_of([math.exp(-0.1), 1.0, math.exp(0.1)])
    assert (math.log(low), math.log(high)) == pytest.approx((-0.2177, 0.2177), abs=1e-4)
    assert factors_of([1.2] * 3) == pytest.approx((1.2, 1.2))


def test_runs_that_test_are_not_in_the_interval():
    """Their own ratios change nothing but how many of them are inside."""
    found = compared()["trn1.32xlarge"]
    first = list(found.ratios.values())[:CALIBRATING]
    assert (found.low, found.high) == pytest.approx(factors_of(first))
    assert len(found.tested) == len(runs()["trn1.32xlarge"]) - CALIBRATING
    assert found.inside == sum(found.low <= ratio <= found.high for ratio in found.tested)


@pytest.mark.parametrize("run", [run for of in runs().values() for run in of], ids=lambda run: run.name)
def test_predictions_are_those_of_today(run):
    """``python -m benchmarks.published --write`` counts them again, and rewrites the table of the guide."""
    predicted = json.loads(PREDICTIONS.read_text())[run.name]
    time = predict_run(run)
    assert [time.seconds, time.low, time.high] == pytest.approx(list(predicted.values()), rel=0.005)


@pytest.mark.parametrize(
    ("instance", "said"), [("trn1.32xlarge", "other published runs are inside"), ("trn2.48xlarge", "unknown, no")]
)
def test_plan_says_which_interval_is_which(instance, said, capsys):
    model = ["plan", "--model", "llama-3.2-1b", "--world-size", "8", "--global-batch", "8", "--sequence", "512"]
    options = [*model, "--instance", instance, "--tensor-parallel-size", "8", "--flash-attention"]
    assert main([*options, "--accumulation", "8"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "by its assumptions between" in text
    assert "by published runs" in text
    assert said in text
    assert main([*options, "--accumulation", "8", "--json"]) == 0
    time = json.loads(capsys.readouterr().out)["time"]
    found = time["published_runs"]
    if instance not in compared():
        assert found is None
        return
    assert (found["low"] / time["seconds"], found["high"] / time["seconds"]) == pytest.approx(
        (compared()[instance].low, compared()[instance].high)
    )
    assert found["calibrated_on"] == list(compared()[instance].ratios)[:CALIBRATING]


def test_a_mixture_has_no_interval_by_dense_runs():
    counted = SimpleNamespace(instance="trn1.32xlarge", findings=["sort"])
    found = interval_of(counted, SimpleNamespace(seconds=1.0))
    assert (found.to_dict(), found.why) == (None, "all that are published are of dense models")
