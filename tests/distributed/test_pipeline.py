"""Models in pipelines train like one process: families, depths, numbers of micro-batches, schedules."""

from __future__ import annotations

import functools

import pytest

from neuron_accel.testing import run_ranks
from neuron_accel.testing.parity import Training, compare, train_alone, train_on_rank
from tests.distributed.models import token_batches
from tests.distributed.pipeline_support import FAMILIES, STEPS, pipeline

SCHEDULES = ("gpipe", "1f1b", "zero-bubble")
TRAINING = Training(max_norm=0.5)
SIZE = 16


@functools.cache
def reference(family, training, size):
    return run_ranks(
        train_alone, 1, FAMILIES[family], token_batches(STEPS * training.accumulation, size=size), training
    )[0]


def check(family, ranks, plugins, training=TRAINING, size=SIZE):
    batches = token_batches(STEPS * training.accumulation, size=size)
    trace = run_ranks(train_on_rank, ranks, FAMILIES[family], batches, {"plugins": plugins}, training)[0]
    compare(reference(family, training, size), trace)


@pytest.mark.parametrize("microbatches", [1, 2, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages(family, schedule, microbatches):
    check(family, 2, [pipeline(2, microbatches, schedule=schedule)])
