"""The recompile and the desync guard on real XLA ranks: they fire on a planted fault and are silent otherwise."""

from __future__ import annotations

from importlib.util import find_spec

import guards_corruption as corruption
import pytest
from guards_support import train, train_with_nan

from neuron_accel.errors import CorruptionError, DesyncError, NonFiniteError, PlanError, RecompileError
from neuron_accel.testing import RanksError, run_ranks

pytestmark = pytest.mark.skipif(find_spec("torch_xla") is None, reason="torch_xla is not installed")
GUARDS = ["recompile_guard", {"desync_guard": {"timeout_s": 60}}]


def test_guards_are_silent_on_a_clean_training():
    found = run_ranks(
        train_on_xla, 2, ["zero1"], [*GUARDS, "replica_check", "finite_guard"], backend="xla", timeout=110
    )
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
        assert "Rank 1 of 2 issued other collectives in step 4" in text
        assert "all_reduce over 'dp' (12 bytes) as collective" in text
        assert "Rank 0: all_gather" in text or "Rank 0: nothing more" in text or "Rank 0: all_reduce" in text


def train_with_nan_on_xla(*args, **kwargs):
    import torch_xla.debug.metrics as met

    from neuron_accel.testing import one_at_a_time

    found = train_with_nan(*args, backend="xla", **kwargs)
    with one_at_a_time():
        return *found, met.metric_data("CompileTime")[0]


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["dp", "zero1"])
def test_gradients_that_are_not_finite_are_said_by_rank_step_and_parameter(plugins):
    with pytest.raises(RanksError) as caught:
        run_ranks(train_with_nan_on_xla, 2, plugins, "raise", at=4, accumulation=2, backend="xla", timeout=110)
    for rank in (0, 1):
        assert isinstance(caught.value.errors[rank], NonFiniteError), caught.value
        text = str(caught.value.errors[rank])
        assert "Gradients of step 4 are not finite on rank 1: first that of 'norm.weight'." in text
        assert "rank 1: first 'norm.weight', in all 1 of 5 parameters; its loss is finite" in text


def test_watching_gradients_makes_no_graph_after_the_first_steps():
    few = run_ranks(train_with_nan_on_xla, 2, ["zero1"], "raise", steps=3, accumulation=2, backend="xla", timeout=110)
    many = run_ranks(train_with_nan_on_xla, 2, ["zero1"], "raise", steps=8, accumulation=2, backend="xla", timeout=110)
    assert few[0][-1] == many[0][-1]


def test_steps_are_not_skipped_where_that_would_come_too_late():
    with pytest.raises(RanksError) as caught:
        run_ranks(train_with_nan_on_xla, 2, [], "skip", backend="xla", timeout=110)
    error = caught.value.__cause__  # its peer may have noticed only that it is gone
    assert isinstance(error, PlanError)
    assert "Steps cannot be skipped on this device" in str(error)
    assert error.fix


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["dp", "zero1"])
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sum", "rank 1: received a sum of gradients that is not the sum of what the ranks sent"),
        ("weight", "memory changed that nothing wrote: head.weight"),
        ("state", "memory changed that nothing wrote: exp_avg of "),
    ],
)
def test_a_value_that_changed_is_named_by_rank_and_step_when_it_is_read(plugins, what, words):
    options = {"steps": 6, "every": 4, "backend": "xla"}
    with pytest.raises(RanksError) as caught:
        run_ranks(corruption.train, 2, plugins, what, timeout=110, **options, step=3)
    for rank in (0, 1):
        error = caught.value.errors[rank]
        assert isinstance(error, CorruptionError), caught.value
        assert "were corrupted in step 3." in str(error)
        assert words in str(error)
        assert "rank 0: memory" not in str(error)
        assert "rank 0: received" not in str(error)


@pytest.mark.parametrize("plugins", [[], ["zero1"], [{"fully_sharded": {"modules": "head"}}]], ids=str)
def test_checking_sums_raises_nothing_and_makes_no_graph_after_the_first_steps(plugins):
    few = run_ranks(corruption.train, 2, plugins, steps=5, every=2, backend="xla", timeout=110)
    many = run_ranks(corruption.train, 2, plugins, steps=40, every=2, backend="xla", timeout=110)
    assert few[0][-1] == many[0][-1]
