"""The recompile and the desync guard on real XLA ranks: they fire on a planted fault and are silent otherwise."""

from __future__ import annotations

import pytest

from neuron_accel.errors import DesyncError, RecompileError
from neuron_accel.testing import run_ranks
from neuron_accel.testing.ranks import RanksError
from tests.distributed.strategies.guards.guards_support import train

GUARDS = ["recompile_guard", {"desync_guard": {"timeout_s": 60}}]


def test_guards_are_silent_on_a_clean_training():
    found = run_ranks(train_on_xla, 2, ["zero1"], [*GUARDS, "replica_check"], backend="xla", timeout=110)
    for said, graphs, losses in found:
        assert said == []
        assert graphs <= 8  # beside the step's those of evaluation and of metrics
        assert losses == found[0][2]


def train_on_xla(*args, **kwargs):
    return train(*args, backend="xla", **kwargs)


def failure(*args, **kwargs):
    with pytest.raises(RanksError) as caught:
        run_ranks(train_on_xla, 2, *args, backend="xla", timeout=110, **kwargs)
    return caught.value


def test_a_compilation_is_said_by_what_changed_and_where():
    found = run_ranks(
        train_on_xla, 2, [], ["recompile_guard"], fault="a shorter batch", every_rank=True, backend="xla", timeout=110
    )
    warned = [text for said, _, _ in found for text in said]  # warnings are the process's, ranks are its threads
    assert warned
    for text in warned:
        assert text.startswith("A new graph in step 4: model 1 training:")
        assert "input_ids: int64[4, 12] -> int64[4, 7]" in text
        assert "guards_support.py:" in text


def test_a_compilation_can_be_an_error():
    error = failure([], [{"recompile_guard": {"action": "raise"}}], fault="a shorter batch", every_rank=True)
    assert any(isinstance(e, RecompileError) for e in error.errors.values()), error


def test_different_collectives_are_found_before_anything_is_executed():
    error = failure([], GUARDS, fault="an extra all-reduce")
    for rank in (0, 1):
        text = str(error.errors[rank])
        assert isinstance(error.errors[rank], DesyncError), error
        assert "Rank 1 of 2 left the others in step 4" in text
        assert "all_reduce over 'dp' (12 bytes) as collective" in text
        assert "Rank 0: all_gather" in text or "Rank 0: nothing more" in text or "Rank 0: all_reduce" in text
