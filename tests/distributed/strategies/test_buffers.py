"""Running statistics on ranks that see different samples: those of the first rank, as in DistributedDataParallel."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from neuron_accel import Zero1Plugin
from neuron_accel.testing import run_ranks
from neuron_accel.testing.xla_ranks import one_at_a_time
from tests.distributed.strategies.expert_parallel.mixture import ExpertParallelPlugin, Experts, Mixture, batches

STEPS, ROWS = 3, 4


class Normed(nn.Module):
    """Statistics of whatever is seen, a counter that is assigned, a sum that is made when it is first needed, and a
    buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("own", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.rows = self.rows + x.shape[0]
            if not hasattr(self, "late"):
                self.register_buffer("late", torch.zeros((), device=x.device))
            self.late += x.sum().detach()
            self.own += x.mean().detach()
        return self.last(torch.tanh(self.norm(self.first(x))))


def normed():
    torch.manual_seed(0)
    return Normed()


def data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2 * ROWS, 6, generator=generator) for _ in range(count)]


def train(plugins, backend=None, accumulation=1):
    """Evaluated logits of held-out rows, and the buffers, after some steps on shares of batches."""
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(
        config={"plugins": plugins, "backend": backend, "gradient_accumulation_steps": accumulation}
    )
    with one_at_a_time():
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    for x in data(STEPS * accumulation, 1):
        with accelerator.accumulate(model):
            accelerator.backward(model(x.chunk(size)[rank].to(accelerator.device)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    copy.deepcopy(accelerator.unwrap_model(model))(data(1, 3)[0].to(accelerator.device))  # changes nothing here
    model.eval()
    with torch.no_grad():
        logits = model(data(1, 2)[0].to(accelerator.device))
    buffers = {name: accelerator.run.backend.to_host(value) for name, value in model.named_buffers()}
    logits = accelerator.run.backend.to_host(logits)
    accelerator.free_memory()
    return logits, buffers


def train_alone(accumulation=1):
    """The same in one process: the second rank's rows are normalised by their own statistics, which are not kept."""
    model = normed()
    other = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, x in enumerate(data(STEPS * accumulation, 1)):
        other.load_state_dict(model.state_dict())
        mine, theirs = x.chunk(2)
        (model(mine).square().mean() / 2 / accumulation).backward()
        (other(theirs).square().mean() / 2 / accumulation).backward()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad, q.grad = p.grad + q.grad, None
        if (index + 1) % accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return model(data(1, 2)[0]), dict(model.named_buffers())


def assert_those_of_the_first_rank(results, accumulation=1, biased=False):
    """``biased``: running variances are of another kind, and are compared between ranks only."""
    logits, buffers = train_alone(accumulation)
    if biased:
        logits, buffers = results[0][0], buffers | {"norm.running_var": results[0][1]["norm.running_var"]}
    for rank, (found, own) in enumerate(results):
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-5)
        for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "rows", "late"):
            torch.testing.assert_close(own[name], buffers[name], rtol=1e-4, atol=1e-5, msg=f"rank {rank}: {name}")
    assert not torch.equal(results[0][1]["own"], results[1][1]["own"])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("plugins", [[], ["zero1"]], ids=["data-parallel", "zero1"])
def test_a_rank_evaluates_with_the_statistics_of_the_first(plugins, accumulation):
    assert_those_of_the_first_rank(run_ranks(train, 2, plugins, None, accumulation), accumulation)


@pytest.mark.parametrize("name", ["data_parallel", "zero1"])
def test_a_rank_keeps_its_own_where_it_is_asked_to(name):
    (_, first), (_, second) = run_ranks(train, 2, [{name: {"broadcast_buffers": False}}])
    assert not torch.equal(first["norm.running_mean"], second["norm.running_mean"])


# ---- experts ---------------------------------------------------------------------------------------------------------
class CountingExperts(Experts):
    """How many tokens this rank's experts have had."""

    def __init__(self, some_unused):
        super().__init__(some_unused)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, tokens, expert):
        if self.run is not None and self.training:
            self.tokens += torch.tensor(1.0 + self.run.group("ep").index).to(self.tokens.device)
        return super().forward(tokens, expert)


def count_tokens(plugins):
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=[ExpertParallelPlugin(size=2), *plugins])
    torch.manual_seed(0)
    model = Mixture()
    model.experts = CountingExperts(False)
    model.register_buffer("seen", torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, size = accelerator.data_parallel_rank, accelerator.data_parallel_size
    for batch in batches(2):
        model.seen += torch.tensor(1.0 + rank).to(accelerator.device)
        share = {name: value.chunk(size)[rank].to(accelerator.device) for name, value in batch.items()}
        accelerator.backward(model(**share))
        optimizer.step()
        optimizer.zero_grad()
    found = [float(accelerator.run.backend.to_host(b)) for b in (model.experts.tokens, model.seen)]
    accelerator.free_memory()
    return found


@pytest.mark.parametrize("plugins", [[], [Zero1Plugin()]], ids=["data-parallel", "zero1"])
def test_buffers_of_experts_are_not_broadcast(plugins):
    assert run_ranks(count_tokens, 2, plugins) == [[2.0, 2.0], [4.0, 2.0]]
    assert run_ranks(count_tokens, 4, plugins) == [[2.0, 2.0], [4.0, 2.0], [2.0, 2.0], [4.0, 2.0]]
