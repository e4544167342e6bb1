"""Each guard fires on a planted fault, and stays silent on a clean training; on gloo."""

from __future__ import annotations

import warnings

import pytest
import torch
from guards_support import TP2, Bigrams, llama, token_batches, train, train_with_nan
from neuron_accel_guards import DesyncGuard, FiniteGuard, RecompileGuard, ReplicaCheck

from neuron_accel.errors import CheckpointError, ConfigurationError, DesyncError, NonFiniteError, RecompileError
from neuron_accel.testing import RanksError, run_ranks

ALL = ["recompile_guard", {"desync_guard": {"timeout_s": 20}}, {"replica_check": {"every": 2}}, "finite_guard"]


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

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    torch.manual_seed(0)
    model = llama(tied=True)
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
    assert "Rank 1 of 2 did not arrive at" in str(error.errors[0])
    assert "and has ended" in str(error.errors[0])


def test_tensor_parallel_ranks_disagree_in_their_own_group():
    """Rank 1 is alone in the group of all; the others wait for it in theirs until the time is over."""
    error = failure([TP2], [{"desync_guard": {"timeout_s": 2}}], fault="an extra all-reduce", ranks=4)
    assert all(isinstance(e, DesyncError) for e in error.errors.values()), error
    assert any("the last operation of rank 1 was all_reduce over 'dp x tp' (" in str(e) for e in error.errors.values())


@pytest.mark.parametrize(("plugins", "ranks"), [([], 2), (["zero1"], 2), ([TP2], 4), ([TP2, "zero1"], 4)])
def test_a_weight_that_differs_is_named(plugins, ranks):
    error = failure(plugins, ["replica_check"], fault="a weight that differs", ranks=ranks)
    for rank in range(ranks):
        assert isinstance(error.errors[rank], DesyncError)
        text = str(error.errors[rank])
        others = ", ".join(str(r) for r in range(ranks) if r != 1)
        assert "different values of 1 parameter before the first step" in text
        assert f"norm.weight: rank {others} against rank 1" in text


def train_unevenly(compiles):
    """Rank 0 has three batches and rank 1 one. Returns when replicas were compared last, and the number of steps."""
    from neuron_accel import NeuronAccelerator

    check = ReplicaCheck(every=1)
    accelerator = NeuronAccelerator(plugins=[check])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    used = torch.compile(model, backend="eager") if compiles else model
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(1 if accelerator.process_index else 3):
            accelerator.backward(used(torch.ones(3, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.run.state(check)
    return list(state["checked"].values()), state["steps"]


@pytest.mark.parametrize("compiles", [False, True])
def test_ranks_without_data_compare_their_weights_with_the_others(compiles):
    assert run_ranks(train_unevenly, 2, compiles, timeout=110) == [([2], 3)] * 2


def train_unevenly_with_buffers():
    """Rank 0 has three batches and rank 1 one, of a model whose buffers are broadcast after each step."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[DesyncGuard(timeout_s=60)])
    model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for _ in range(1 if accelerator.process_index else 3):
            accelerator.backward(model(torch.randn(3, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)["1.num_batches_tracked"].item() if accelerator.is_main_process else 3


def test_ranks_without_data_are_ahead_of_the_others_only_in_their_count_of_steps():
    assert run_ranks(train_unevenly_with_buffers, 2, timeout=110) == [3, 3]


def test_without_the_check_only_a_save_finds_it():
    with pytest.raises(RanksError) as caught:
        run_ranks(train, 2, [], [], fault="a weight that differs", timeout=50)
    assert {type(error) for error in caught.value.errors.values()} == {CheckpointError}
    assert "different values of parameter 'norm.weight'" in str(caught.value)


SP = [TP2, "sequence_parallel", "zero1"]
PP = [{"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}]
ZERO_BUBBLE = [{"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2, "schedule": "zero-bubble"}}]
COMPOSITIONS = {
    "dp2": ([], 2, 1),
    "dp2-accumulating": ([], 2, 2),
    "zero1-accumulating": (["zero1"], 2, 2),
    "zero1-reducing-each": ([{"zero1": {"use_grad_acc_hook": True, "max_norm": 0.5}}], 2, 2),
    "tp2-sp-zero1-dp2": (SP, 4, 1),
    "tp2-dp2": ([TP2], 4, 1),
    "pp2": (PP, 2, 1),
    "pp2-zero-bubble": (ZERO_BUBBLE, 2, 1),
}


@pytest.mark.parametrize(("plugins", "ranks", "accumulation"), COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_step_whose_gradients_are_not_finite_is_skipped_as_if_it_had_not_been(plugins, ranks, accumulation):
    options = {"accumulation": accumulation, "timeout": 50}
    found = run_ranks(train_with_nan, ranks, plugins, "skip", at=4, **options)
    expected = run_ranks(train_with_nan, ranks, plugins, None, left_out=4, **options)
    fqn = found[1][-1]
    for rank, (said, skipped, count, rates, weights, _) in enumerate(found):
        assert (skipped, count) == ([4], 1)
        if rank == 0:
            (text,) = said
            assert text.startswith(f"Gradients of step 4 are not finite on rank 1: first that of {fqn!r}. The step is")
            assert f"rank 1: first {fqn!r}, in all 1 of " in text
        else:
            assert said == []
        assert rates[:3] + rates[4:] == expected[rank][3]
        assert rates[3] == rates[2]
        assert weights.keys() == expected[rank][4].keys()
        for name, value in weights.items():
            assert value.isfinite().all()
            assert torch.equal(value, expected[rank][4][name]), name


@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["dp", "zero1"])
def test_a_loss_that_is_not_finite_on_one_rank_stops_every_rank_before_the_weights_change(plugins):
    with pytest.raises(RanksError) as caught:
        run_ranks(train_with_nan, 3, plugins, "raise", at=2, loss=True, timeout=50)
    for rank in range(3):
        assert isinstance(caught.value.errors[rank], NonFiniteError), caught.value
        text = str(caught.value.errors[rank])
        assert "Gradients of step 2 are not finite on rank 1: first that of 'head.bias'." in text
        assert "rank 1: first 'head.bias', in all 5 of 5 parameters, and the loss" in text


def test_it_can_only_say_so():
    for rank, (said, skipped, count, _, weights, _) in enumerate(
        run_ranks(train_with_nan, 2, ["zero1"], "warn", at=2, loss=True, timeout=50)
    ):
        assert (skipped, count) == ([], 0)
        assert not any(value.isfinite().any() for value in weights.values())  # which is what happens without a guard
        if rank == 0:
            assert "Gradients of step 2 are not finite on rank 1" in said[0]
            assert "The step is taken." in said[0]
            assert len(said) == 4  # and ever after


def unfreeze_and_resume(folder):
    """A parameter that is unfrozen later is watched, each of two optimizers is judged by its own gradients, and counts
    are in checkpoints."""
    from neuron_accel import NeuronAccelerator

    def start():
        accelerator = NeuronAccelerator(plugins=[FiniteGuard(action="skip")])
        first, second = Bigrams(), Bigrams()
        first.head.weight.requires_grad_(False)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
        return accelerator, *accelerator.prepare(first, second, *optimizers)

    accelerator, first, second, *optimizers = start()
    ids = torch.arange(8).view(2, 4)
    weight = accelerator.unwrap_model(first).head.weight.requires_grad_(True)
    factor = [1.0]
    weight.register_hook(lambda gradient: gradient * factor[0])  # before the guard sees that it trains now
    outcome = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for factor[0] in (1.0, float("nan") if accelerator.run.backend.rank == 1 else 1.0):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                accelerator.backward(model(ids, labels=ids).loss)
                optimizer.step()
                outcome.append(optimizer.step_was_skipped)
                optimizer.zero_grad()
    accelerator.save_state(folder)
    guard = accelerator.plan.plugin("finite_guard")
    counted = guard.skipped(accelerator.run)
    accelerator.free_memory()
    again, *_ = start()
    again.load_state(folder)
    return outcome, counted, guard.skipped(again.run)


def test_what_is_unfrozen_later_is_watched_optimizers_are_judged_apart_and_counts_are_kept(tmp_path):
    expected = ([False, False, True, False], 1, 1)
    assert run_ranks(unfreeze_and_resume, 2, str(tmp_path), timeout=50) == [expected] * 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RecompileGuard(action="shout"),
        lambda: RecompileGuard(warmup_steps=0),
        lambda: DesyncGuard(timeout_s=0),
        lambda: ReplicaCheck(every=-1),
        lambda: FiniteGuard(action="ignore"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigurationError):
        wrong()
