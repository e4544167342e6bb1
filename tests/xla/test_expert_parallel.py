"""Parameters sharded along an axis of samples, on XLA ranks: the graph that divides them is the same on every rank."""

from __future__ import annotations

import pytest

from neuron_accel.testing import Training, assert_parallel_equivalence
from tests.distributed.strategies.expert_parallel.mixture import ExpertParallelPlugin, Mixture, batches


@pytest.mark.parametrize(("ranks", "others"), [(2, []), (4, ["zero1"])], ids=["ep2", "ep2-dp2-zero1"])
def test_trains_like_one_process(ranks, others):
    assert_parallel_equivalence(
        Mixture,
        batches(3),
        [ExpertParallelPlugin(size=2), *others],
        ranks=ranks,
        training=Training(max_norm=0.05),
        backend="xla",
        timeout=110,
    )
