"""Each guard fires on a planted fault, and stays silent on a clean training; on gloo."""

from __future__ import annotations

import pytest

from neuron_accel.errors import ConfigurationError, DesyncError, RecompileError
from neuron_accel.strategies.guards import DesyncGuard, RecompileGuard, ReplicaCheck
from neuron_accel.testing import run_ranks
from neuron_accel.testing.ranks import RanksError
from tests.distributed.strategies.guards.guards_support import TP2, train

ALL = ["recompile_guard", {"desync_guard": {"timeout_s": 20}}, {"replica_check": {"every": 2}}]


def failure(*args, ranks=2, **kwargs):
    with pytest.raises(RanksError) as caught:
        run_ranks(train, ranks, *args, timeout=50, **kwargs)
    return caught.value


@pytest.mark.parametrize(
    ("plugins", "ranks", "accumulation"),
    [([], 2, 1), (["zero1"], 2, 2), ([TP2, "sequence_parallel", "zero1"], 4, 1)],
    ids=["dp2", "zero1-accumulating", "tp2-sp-zero1-dp2"],
)
def test_guards_are_silent_and_change_nothing_on_a_clean_training(plugins, ranks, accumulation):
    guarded = run_ranks(train, ranks, plugins, ALL, accumulation=accumulation, timeout=50)
    plain = run_ranks(train, ranks, plugins, [], accumulation=accumulation, timeout=50)
    for (said, graphs, losses), (_, _, expected) in zip(guarded, plain, strict=True):
        assert said == []
        assert graphs == 3  # training, evaluating, and the number of micro-batches
        assert losses == expected


def test_a_pipeline_is_left_alone_by_its_guards():
    guards = [{"desync_guard": {"timeout_s": 20}}, {"replica_check": {"every": 1}}]
    plugins = [{"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}]
    run_ranks(train_pipeline, 2, plugins + guards, timeout=50)


def train_pipeline(plugins):
    import torch

    from neuron_accel import NeuronAccelerator
    from tests.distributed.models import MODELS, token_batches

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    model = MODELS["gpt2-tied"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in token_batches(2):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("a shorter batch", ["input_ids: int64[4, 12] -> int64[4, 7]", "labels: int64[4, 12] -> int64[4, 7]"]),
        ("another dtype", ["attention_mask: (not given) -> bool[4, 12]"]),
        ("another value", ["logits_to_keep: (not given) -> 3"]),
    ],
)
def test_a_new_graph_is_said_by_what_changed_and_where(fault, words):
    found = run_ranks(train, 2, [], ["recompile_guard"], fault=fault, every_rank=True, timeout=50)
    for (message,), graphs, _ in found:
        assert message.startswith("A new graph in step 4: model 1 training:")
        for word in words:
            assert word in message
        assert "guards_support.py:" in message
        assert graphs == 4


def test_a_new_graph_can_be_an_error():
    error = failure([], [{"recompile_guard": {"action": "raise"}}], fault="a shorter batch", every_rank=True)
    assert all(isinstance(e, RecompileError) for e in error.errors.values())
    assert "input_ids: int64[4, 12] -> int64[4, 7]" in str(error.errors[0])


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("an extra all-reduce", ["Rank 1", "in step 4", "all_reduce over 'dp' (12 bytes) in step 4", "Rank 0: "]),
        ("gathering alone", ["Rank 1", "in step 4", "gather over 'dp' in step 4"]),
    ],
)
def test_different_collectives_are_said_by_rank_step_and_operation(fault, words):
    error = failure([], [{"desync_guard": {"timeout_s": 20}}], fault=fault, ranks=3 if "alone" in fault else 2)
    for rank in error.errors:
        assert isinstance(error.errors[rank], DesyncError), error
        for word in words:
            assert word in str(error.errors[rank])
    assert len(error.errors) == error.size


def test_a_rank_that_does_not_come_is_named_with_what_it_did_last():
    error = failure([], [{"desync_guard": {"timeout_s": 2}}], fault="a shorter epoch")
    late = error.errors[0]
    assert isinstance(late, DesyncError)
    assert "all_reduce over 'dp'" in str(late)
    assert "step 5" in str(late)


def test_a_rank_that_has_ended_is_not_waited_for():
    error = failure([], [{"desync_guard": {"timeout_s": 45}}], fault="ending")
    assert isinstance(error.errors[0], DesyncError), error
    assert "Rank 1 of 2 did not come to" in str(error.errors[0])
    assert "and has ended" in str(error.errors[0])


def test_tensor_parallel_ranks_disagree_in_their_own_group():
    """Rank 1 is alone in the group of all; the others wait for it in theirs until the time is over."""
    error = failure([TP2], [{"desync_guard": {"timeout_s": 2}}], fault="an extra all-reduce", ranks=4)
    assert all(isinstance(e, DesyncError) for e in error.errors.values()), error
    assert any("the last of rank 1 was all_reduce over 'dp x tp' (" in str(e) for e in error.errors.values())


@pytest.mark.parametrize(("plugins", "ranks"), [([], 2), (["zero1"], 2), ([TP2], 4), ([TP2, "zero1"], 4)])
def test_a_weight_that_differs_is_named(plugins, ranks):
    error = failure(plugins, ["replica_check"], fault="a weight that differs", ranks=ranks)
    for rank in range(ranks):
        assert isinstance(error.errors[rank], DesyncError)
        text = str(error.errors[rank])
        others = ", ".join(str(r) for r in range(ranks) if r != 1)
        assert "different values of 1 parameter before the first step" in text
        assert f"norm.weight: rank {others} against rank 1" in text


def test_without_the_check_nobody_says_so():
    run_ranks(train, 2, [], [], fault="a weight that differs", timeout=50)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RecompileGuard(action="shout"),
        lambda: RecompileGuard(warmup_steps=0),
        lambda: DesyncGuard(timeout_s=0),
        lambda: ReplicaCheck(every=-1),
    ],
)
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        wrong()
