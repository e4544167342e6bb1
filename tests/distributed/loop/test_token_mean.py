"""Averaging over tokens does not depend on their distribution over ranks and micro-batches."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import pytest
import torch

from neuron_accel.contract import Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import UsageError
from neuron_accel.testing import run_ranks
from tests.distributed.loop.loops_support import COMPOSITIONS, Tokens, adamw, assert_close, forward, model

STEPS, SAMPLES_A_STEP, IGNORED = 3, 8, -100


def step_samples(step):
    """The samples of a step; the number of labels that are not ignored ranges from none to all."""
    data = Tokens(STEPS * SAMPLES_A_STEP, length=10)
    batch = torch.utils.data.default_collate([data[SAMPLES_A_STEP * step + i] for i in range(SAMPLES_A_STEP)])
    for i in range(SAMPLES_A_STEP):
        batch["labels"][i, (3 * i + step) % 11 :] = IGNORED
    return batch


def tokens(batch):
    return (batch["labels"][:, 1:] != IGNORED).sum()  # position i is predicted from those before it


def train_alone():
    net = model()
    optimizer = adamw(net.parameters())
    norms = []
    for step in range(STEPS):
        forward(net, step_samples(step)).loss.backward()  # the mean over all tokens
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict(), norms


def train_on_rank(plugins, micro_batches, clip, by_item=True):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins}, gradient_accumulation_steps=micro_batches)
    net = model()
    net, optimizer = accelerator.prepare(net, adamw(net.parameters()))
    norms = []
    for step in range(STEPS):
        mine = {
            key: value.chunk(accelerator.data_parallel_size)[accelerator.data_parallel_rank].chunk(micro_batches)
            for key, value in step_samples(step).items()
        }
        for i in range(micro_batches):
            batch = {key: value[i] for key, value in mine.items()}
            with accelerator.accumulate(net):
                accelerator.backward(forward(net, batch).loss, num_items=tokens(batch) if by_item else None)
                if accelerator.sync_gradients and clip:
                    norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
    return accelerator.get_state_dict(net), norms


@pytest.fixture(scope="module")
def expected():
    return run_ranks(train_alone, 1, backend=None)[0]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("composition", ["none", "zero1"])
def test_ragged_tokens_over_ranks_and_micro_batches(expected, composition, micro_batches):
    ranks, plugins = COMPOSITIONS[composition]
    weights, norms = run_ranks(train_on_rank, ranks, plugins, micro_batches, True)[0]
    assert norms == pytest.approx(expected[1], rel=1e-5)
    assert_close(weights, expected[0])


@pytest.mark.parametrize("composition", ["tp2", "tp2-sp", "tp2-dp2-zero1-sp"])
def test_ragged_tokens_under_other_compositions(expected, composition):
    ranks, plugins = COMPOSITIONS[composition]
    weights, norms = run_ranks(train_on_rank, ranks, plugins, 2, True)[0]
    assert norms == pytest.approx(expected[1], rel=1e-5)
    assert_close(weights, expected[0])


def test_more_ranks(expected):
    weights, _ = run_ranks(train_on_rank, 4, [], 2, True)[0]
    assert_close(weights, expected[0])


def test_the_mean_of_means_is_another_one(expected):
    """Without ``num_items`` the results differ, so that the tests above can fail."""
    _, norms = run_ranks(train_on_rank, 2, [], 1, True, by_item=False)[0]
    assert norms[0] != pytest.approx(expected[1][0], rel=2e-3)


def masked_on_a_rank():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    layer = accelerator.prepare(torch.nn.Linear(3, 3))
    labels = torch.tensor([1, IGNORED if accelerator.process_index else 2])[-1:]
    said = []
    for given in (None, (labels != IGNORED).sum()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accelerator.backward(torch.nn.functional.cross_entropy(layer(torch.ones(1, 3)), labels), num_items=given)
        said.append([f"{w.filename}: {w.message}" for w in caught if "num_items" in str(w.message)])
    return said


def test_a_rank_whose_labels_are_all_masked_is_told_what_to_give():
    assert run_ranks(masked_on_a_rank, 2)[0] == [[], []]
    (said,), silent = run_ranks(masked_on_a_rank, 2)[1]
    assert said.startswith(f"{__file__}: ")
    assert "labels are masked" in said
    assert silent == []


def sgd_on_rank(plugins, counts):
    """Without clipping, so that the division falls to the step; returns the weight's change for unit gradients."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(config={"plugins": plugins})
    net = torch.nn.Linear(1, 1, bias=False)
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    before = net.weight.item()
    count = counts[accelerator.process_index]
    value = float(10 ** (accelerator.process_index + 1))
    mean = net(torch.full((max(count, 1), 1), value)).sum() / count if count else net(torch.zeros(1, 1)).sum() / 0
    with accelerator.no_sync(net):
        accelerator.backward(net(torch.ones(1, 1)).sum(), num_items=1)  # one item of value 1 more on every rank
    accelerator.backward(mean, num_items=torch.tensor(count))
    optimizer.step()
    return before - net.weight.item()


@pytest.mark.parametrize("plugins", [[], ["zero1"]])
def test_the_division_falls_to_the_step_and_counts_what_no_sync_left(plugins):
    for change in run_ranks(sgd_on_rank, 2, plugins, (3, 2)):
        assert change == pytest.approx((1 + 1 + 3 * 10 + 2 * 100) / (2 + 3 + 2), rel=1e-5)


@dataclass(frozen=True, kw_only=True)
class WeightsByItself(StrategyPlugin):
    """Weights losses by numbers of its own, so that the loop may not."""

    spec = PluginSpec(name="weights_by_itself", api_version=4, phase=Phase.GRADIENTS)

    def backward_pass(self, loss, run):
        if run.num_items is not None:
            raise UsageError(f"num_items={int(run.num_items)} is not possible here.", fix="leave it out")
        yield


def seen_by_a_plugin():
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[WeightsByItself()])
    layer = accelerator.prepare(torch.nn.Linear(2, 1))
    accelerator.backward(layer(torch.ones(1, 2)).mean())
    with pytest.raises(UsageError, match="num_items=3 is not"):
        accelerator.backward(layer(torch.ones(3, 2)).mean(), num_items=3)
    assert accelerator.run.num_items is None
    accelerator.backward(layer(torch.ones(1, 2)).mean())


def test_a_plugin_sees_that_num_items_is_given():
    run_ranks(seen_by_a_plugin, 1)
