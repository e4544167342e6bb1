"""Running statistics on XLA ranks are those of the first rank."""

from __future__ import annotations

import pytest

from neuron_accel.testing import run_ranks
from tests.distributed.strategies.test_buffers import assert_those_of_the_first_rank, train


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["data-parallel", "zero1"])
def test_a_rank_evaluates_with_the_statistics_of_the_first(plugins):
    # torch_xla's batch normalisation keeps the biased variance
    assert_those_of_the_first_rank(run_ranks(train, 2, plugins, "xla", backend="xla", timeout=110), biased=True)
