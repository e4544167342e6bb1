"""Published runs: chosen and ordered by the stated rule, and what follows from three of them."""

from __future__ import annotations

import json
import math
import re

import pytest
from neuron_accel_plan.published import CALIBRATING, RUNS, factors_of, runs

from neuron_accel import find_instance


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
