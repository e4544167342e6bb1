"""One rank of a dry run against the same rank among real ones: what it sends, computes and keeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from unittest import mock

import pytest
import torch

from neuron_accel.testing import run_ranks
from tests.distributed.as_predicted import as_predicted

COMPOSITIONS = {
    "pp2": (2, ("pp",)),
    "pp2 x tp2 + sp + zero1": (4, ("pp", "tp", "sp", "zero1")),
    "pp2 x dp2 + zero bubble + recomputation": (4, ("pp-zb", "zero1", "recompute")),
    "dp2": (2, ()),
    "tp2": (2, ("tp",)),
    "tp2 + sp": (2, ("tp", "sp")),
    "tp2 + overlapping sp": (2, ("tp", "sp-overlap")),
    "tp2 + sp, inputs kept": (2, ("tp", "sp-keep")),
    "zero1": (2, ("zero1",)),
    "tp2 + recomputation": (2, ("tp", "recompute")),
    "tp2 x dp2 + zero1": (4, ("tp", "zero1")),
    "tp2 x dp2 + sp + zero1 + recomputation": (4, ("tp", "sp", "zero1", "recompute")),
    "fully sharded": (2, ("stage 3",)),
    "tp2 x dp2 + fully sharded + recomputation": (4, ("tp", "stage 3", "recompute")),
    "dp4, fully sharded, gathered once": (4, ("stage 2",)),
}


def plugins_of(names: Sequence[str]):
    from neuron_accel import (
        ActivationCheckpointingPlugin,
        FullyShardedPlugin,
        PipelineParallelPlugin,
        SequenceParallelPlugin,
        TensorParallelPlugin,
        Zero1Plugin,
    )

    made = {
        "tp": lambda: TensorParallelPlugin(tensor_parallel_size=2),
        "sp": SequenceParallelPlugin,
        "sp-overlap": lambda: SequenceParallelPlugin(overlap_gather=True),
        "sp-keep": lambda: SequenceParallelPlugin(regather=False),
        "zero1": Zero1Plugin,
        "stage 3": FullyShardedPlugin,
        "stage 2": lambda: FullyShardedPlugin(reshard_after_forward=False),
        "recompute": ActivationCheckpointingPlugin,
        "pp": lambda: PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2),
        "pp-zb": lambda: PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=2, schedule="zero-bubble"),
    }
    return [made[name]() for name in names]


def train(names: Sequence[str], dry_run=None):
    """Two steps of a small Llama; returns what was sent in the second, and the numbers of elements kept."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator(plugins=plugins_of(names), backend=dry_run or "torch")
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=256, attn_implementation="eager", **size)
    with torch.device("meta" if dry_run else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    ids = torch.ones(2, 32, dtype=torch.long, device=accelerator.device)
    for _ in range(2):
        with accelerator.run.backend.record() as traffic:
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if v.dim())
    weights = sum(p.nbytes for p in model.parameters())
    return [(t.op, t.group, t.size, t.sent, str(t.dtype)) for t in traffic.transfers], weights, state, traffic.order


def train_really(compositions: Sequence[Sequence[str]]):
    """On one of several ranks."""
    with as_predicted():
        return [train(names) for names in compositions]


def train_dry(compositions: Sequence[Sequence[str]], ranks: int, rank: int):
    from neuron_accel.backends.select import DryRun

    return [train(names, DryRun(world_size=ranks, rank=rank)) for names in compositions]


@cache
def really(ranks: int):
    chosen = {name: names for name, (size, names) in COMPOSITIONS.items() if size == ranks}
    found = run_ranks(train_really, ranks, list(chosen.values()))
    return {name: [rank[index] for rank in found] for index, name in enumerate(chosen)}


@cache
def dry(ranks: int, rank: int):
    chosen = {name: names for name, (size, names) in COMPOSITIONS.items() if size == ranks}
    (found,) = run_ranks(train_dry, 1, list(chosen.values()), ranks, rank, backend=None)
    return dict(zip(chosen, found, strict=True))


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_dry_rank_sends_and_keeps_what_a_real_one_does(name):
    ranks, _ = COMPOSITIONS[name]
    for rank in (0, ranks - 1):
        sent, weights, state, _ = really(ranks)[name][rank]
        dry_sent, dry_weights, dry_state, _ = dry(ranks, rank)[name]
        assert dry_sent == sent
        assert (dry_weights, dry_state) == (weights, state)


def test_starts_and_waits_are_in_order_and_overlap():
    sent, _, _, order = dry(4, 0)["tp2 x dp2 + sp + zero1 + recomputation"]
    assert sorted(order) == sorted((kind, index) for kind in ("start", "wait") for index in range(len(sent)))
    assert [index for kind, index in order if kind == "start"] == list(range(len(sent)))
    gathers = [index for index, (op, group, *_) in enumerate(sent) if (op, group) == ("all_gather", "dp")]
    assert len(gathers) == 2  # of the weights of two buckets: the second is started before the first is complete
    assert order.index(("start", gathers[1])) < order.index(("wait", gathers[0]))


def lose_one():
    """A composition that leaves out one all-reduce of tensor parallelism."""
    from neuron_accel.backends.dry_run import DryRunBackend
    from neuron_accel.backends.group import Done

    start, calls = DryRunBackend.start_all_reduce, []

    def faulty(self, tensor, group, op="sum"):
        calls.append(group.name)
        return Done(tensor) if calls.count("tp") == 20 else start(self, tensor, group, op)

    with mock.patch.object(DryRunBackend, "start_all_reduce", faulty):
        return train_dry([("tp",)], 2, 0)[0]


def test_a_missing_collective_is_seen():
    (found,) = run_ranks(lose_one, 1, backend=None)
    sent, *_ = really(2)["tp2"][0]
    assert found[0] != sent
    assert len(found[0]) == len(sent) - 1


def train_from_environment():
    """A script that knows nothing of dry runs."""
    from torch import nn

    from neuron_accel import NeuronAccelerator, Zero1Plugin

    accelerator = NeuronAccelerator(plugins=[Zero1Plugin()])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), data)
    steps = 0
    for batch in data:
        loss = model(batch).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    losses = accelerator.gather(loss.detach())
    backend = accelerator.run.backend
    return steps, accelerator.data_parallel_size, backend.rank, str(losses.device), tuple(losses.shape)


def test_a_script_runs_dry_by_its_environment():
    environ = {
        "NEURON_ACCEL_BACKEND": "dryrun",
        "NEURON_ACCEL_DRYRUN_WORLD_SIZE": "8",
        "NEURON_ACCEL_DRYRUN_RANK": "5",
    }
    (found,) = run_ranks(train_from_environment, 1, backend=None, env=environ)
    assert found == (2, 8, 5, "meta", (8,))


def refusals():
    from accelerate.state import AcceleratorState

    from neuron_accel import NeuronAccelerator
    from neuron_accel.backends.select import DryRun
    from neuron_accel.errors import NeuronAccelError

    with pytest.raises(NeuronAccelError) as caught:
        NeuronAccelerator(backend=DryRun(world_size=4), mixed_precision="bf16")
    AcceleratorState._reset_state(True)
    return str(caught.value)


def test_what_cannot_run_dry_is_refused_with_the_reason():
    (precision,) = run_ranks(refusals, 1, backend=None)
    assert "mixed_precision='bf16' is not possible in a dry run" in precision
