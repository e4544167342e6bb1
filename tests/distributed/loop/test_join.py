"""Ranks with different numbers of batches end with the results of one process, and with equal state."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.utils.data import DataLoader

from neuron_accel.testing import RanksError, run_ranks
from tests.distributed.loop.loops_support import COMPOSITIONS, TP2, Tokens, adamw, assert_close, forward, model

RANKS_WITH_DATA, BATCH, MAX_NORM, CLIP_VALUE = 2, 2, 0.5, 0.05
OTHERS = {
    "pp2-dp2-zero1": (4, [{"pipeline_parallel": {"pipeline_parallel_size": 2, "num_microbatches": 2}}, "zero1"]),
    "zero1-accumulating": (2, [{"zero1": {"use_grad_acc_hook": True}}]),
}


def shares(batches):
    """The batches of each data-parallel rank: distributed in turn, or given numbers of them."""
    data = Tokens(BATCH * (sum(batches) if isinstance(batches, tuple) else batches))
    every = [
        torch.utils.data.default_collate([data[i] for i in range(start, start + BATCH)])
        for start in range(0, len(data), BATCH)
    ]
    return [every[: batches[0]], every[batches[0] :]] if isinstance(batches, tuple) else [every[0::2], every[1::2]]


def make_training():
    net = model()
    optimizer = adamw(net.parameters())
    return net, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)


def train_alone(batches, accumulation):
    net, optimizer, scheduler = make_training()
    own, norms = shares(batches), []
    for first in range(0, max(map(len, own)), accumulation):
        for batch in (b for mine in own for b in mine[first : first + accumulation]):
            (forward(net, batch).loss / accumulation / RANKS_WITH_DATA).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
        torch.nn.utils.clip_grad_value_(net.parameters(), CLIP_VALUE)
        optimizer.step()
        for _ in range(RANKS_WITH_DATA):
            scheduler.step()
        optimizer.zero_grad()
    return net.state_dict(), norms, scheduler.get_last_lr()


def train_on_rank(plugins, batches, accumulation, *, driven=True, report=False):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, gradient_accumulation_steps=accumulation)
    net, optimizer, scheduler = accelerator.prepare(*make_training())
    if isinstance(batches, tuple):
        loader = shares(batches)[accelerator.data_parallel_rank]
    else:
        loader = accelerator.prepare(DataLoader(Tokens(BATCH * batches), batch_size=BATCH))
    norms, steps = [], 0
    with accelerator.join_uneven_inputs([net], even_batches=False):
        for batch in loader:
            with accelerator.accumulate(net):
                loss = forward(net, batch).loss
                accelerator.backward(loss) if driven else (loss / accumulation).backward()
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), MAX_NORM)))
                    accelerator.clip_grad_value_(net.parameters(), CLIP_VALUE)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                steps += 1
            if report:
                accelerator.reduce(loss.detach())
    moments = [float(v.float().sum()) for s in optimizer.state.values() for v in s.values()]
    with torch.no_grad():
        after = float(accelerator.reduce(forward(net, shares(4)[0][0]).loss, "mean"))
    weights = accelerator.get_state_dict(net)
    return weights, norms, scheduler.get_last_lr(), (accelerator.data_parallel_rank, steps), moments, after


@pytest.mark.parametrize(
    ("composition", "batches", "accumulation"),
    [
        ("none", (5, 2), 1),
        ("none", (1, 4), 1),
        ("none", 9, 2),
        ("zero1", (5, 2), 1),
        ("zero1", (1, 4), 1),
        ("zero1", 9, 2),
        ("tp2-dp2-zero1-sp", (1, 3), 1),
        ("tp2-dp2-zero1-sp", 5, 2),
        ("zero1", 7, 2),  # the last batch of one rank completes a step, that of the other at its side does not
        ("zero1-accumulating", 7, 2),
        ("pp2-dp2-zero1", 7, 2),
    ],
)
def test_like_one_process_with_empty_shares(composition, batches, accumulation):
    ranks, plugins = (COMPOSITIONS | OTHERS)[composition]
    results = run_ranks(train_on_rank, ranks, plugins, batches, accumulation)
    weights, norms, rates = run_ranks(train_alone, 1, batches, accumulation, backend=None)[0]
    own = [len(share) for share in shares(batches)]
    for rank, (found, found_norms, found_rates, (place, steps), moments, after) in enumerate(results):
        assert steps == own[place]
        assert found_norms == pytest.approx(norms[: len(found_norms)], rel=1e-5)
        assert found_rates == pytest.approx(rates)
        assert after == results[0][5]
        if rank == 0:
            assert_close(found, weights)
        if composition == "none":
            assert moments == results[0][4], "a rank that was through has another optimizer state"
            assert all(torch.equal(found[name], results[0][0][name]) for name in found)


@pytest.mark.parametrize("plugins", [[], ["zero1"]])
def test_backward_passes_that_the_loop_runs_itself(plugins):
    results = run_ranks(train_on_rank, 2, plugins, (3, 1), 1, driven=False)
    weights, _, _ = run_ranks(train_alone, 1, (3, 1), 1, backend=None)[0]
    assert_close(results[0][0], weights)


def test_what_needs_every_rank_is_refused_on_all_of_them():
    with pytest.raises(RanksError) as caught:
        run_ranks(train_on_rank, 2, [], (3, 1), 1, report=True, grace=20)
    assert {type(error).__name__ for error in caught.value.errors.values()} == {"UsageError"}
    assert "`reduce` is not possible while some ranks have run out of data" in str(caught.value)
    run_ranks(train_on_rank, 2, [], (2, 2), 1, report=True)  # nobody left before the others


def buffers_on_rank(batches):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    net = accelerator.prepare(torch.nn.BatchNorm1d(1, momentum=1.0))
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    rank = accelerator.process_index
    with accelerator.join_uneven_inputs([net], even_batches=False):
        for i in range(batches[rank]):
            accelerator.backward(net(torch.tensor([[10.0 * rank + i], [10.0 * rank + i + 1]])).sum())
            optimizer.step()
            optimizer.zero_grad()
    return net.running_mean.item()


@pytest.mark.parametrize(("batches", "expected"), [((4, 1), 3.5), ((1, 4), 13.5)])
def test_buffers_are_those_of_the_rank_that_trained_longest(batches, expected):
    assert run_ranks(buffers_on_rank, 2, batches) == [expected, expected]


def traffic_on_rank(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net, optimizer, _ = accelerator.prepare(*make_training())
    calls = []
    gather = accelerator.run.backend.all_gather_object
    accelerator.run.backend.all_gather_object = lambda *arguments: calls.append(1) or gather(*arguments)
    counts = []
    for joined in (False, True):
        calls.clear()
        with accelerator.join_uneven_inputs([net], even_batches=not joined):
            for batch in shares((2, 2))[accelerator.data_parallel_rank]:
                accelerator.backward(forward(net, batch).loss)
                optimizer.step()
                optimizer.zero_grad()
        counts.append(len(calls))
    return counts


@pytest.mark.parametrize("plugins", [[], ["zero1"]])
def test_nothing_is_announced_where_batches_are_even(plugins):
    for without, joined in run_ranks(traffic_on_rank, 2, plugins):
        assert without == 0
        assert joined == 2 * 3 + 1  # backward, step, zero_grad of two batches, and that all are through


def different_loops_on_rank():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    net, optimizer, scheduler = accelerator.prepare(*make_training())
    with accelerator.join_uneven_inputs([net], even_batches=False):
        accelerator.backward(forward(net, shares((1, 1))[0][0]).loss)
        optimizer.step() if accelerator.is_main_process else scheduler.step()


def test_loops_that_differ_are_named():
    with pytest.raises(RanksError, match="rank 0: an optimizer step; data-parallel rank 1: a scheduler step") as caught:
        run_ranks(different_loops_on_rank, 2)
    assert {type(error).__name__ for error in caught.value.errors.values()} == {"DesyncError"}


def tensor_parallel_alone_on_rank():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": [TP2]})
    net = accelerator.prepare(model())
    with accelerator.join_uneven_inputs([net], even_batches=False):
        accelerator.backward(forward(net, shares((1, 1))[0][0]).loss)
    return True


def test_ranks_without_data_of_their_own_have_nothing_to_join():
    assert run_ranks(tensor_parallel_alone_on_rank, 2) == [True, True]


def _functions_of_join(plugins):
    """The functions of both files join.py that a step enters before, in and after uneven inputs."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net = model()
    net.register_buffer("seen", torch.zeros(()))  # broadcast after a step
    optimizer = adamw(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    (batch, *_), entered = shares(2)[0], set()

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.endswith(("runtime/join.py", "loop/join.py")):
            entered.add(frame.f_code.co_name)

    def step():
        entered.clear()
        sys.setprofile(watch)
        try:
            with accelerator.accumulate(net):
                accelerator.backward(forward(net, batch).loss, num_items=3)
                accelerator.clip_grad_norm_(net.parameters(), MAX_NORM)
                accelerator.clip_grad_value_(net.parameters(), CLIP_VALUE)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        finally:
            sys.setprofile(None)
        return sorted(entered)

    plain = step()
    with accelerator.join_uneven_inputs([net], even_batches=False):
        uneven = step()
    return plain, uneven, step()


@pytest.mark.parametrize("plugins", [[], ["zero1"], ["fully_sharded"]], ids=["dp", "zero1", "fully-sharded"])
def test_outside_of_uneven_inputs_a_step_enters_no_function_of_join(plugins):
    for plain, uneven, after in run_ranks(_functions_of_join, 2, plugins):
        assert {"__call__", "announce"} <= set(uneven)
        assert plain == after == []
