"""Every public object has a repr that one can read: a short line that names its class and what it is about, without
addresses, and without values of tensors, for which one would wait for a device."""

from __future__ import annotations

import enum
import inspect
import re
import typing

import pytest
import torch
from torch import nn

import neuron_accel
from neuron_accel import (
    DryRun,
    FullyShardedPlugin,
    NeuronAccelerator,
    NeuronSeq2SeqTrainer,
    NeuronTrainer,
    NeuronTrainingArguments,
    PipelineParallelPlugin,
    StrategyPlugin,
    Zero1Plugin,
    ZeroRedundancyOptimizer,
    contract,
    find_instance,
    testing,
)
from neuron_accel.backends.board import LocalBoard
from neuron_accel.backends.group import Done
from neuron_accel.contract import events, families
from neuron_accel.contract import sharded as shards
from neuron_accel.engine.runtime.replica_groups import PartitionLimit
from neuron_accel.engine.shards.eager_gathered_shard import EagerGatheredShard
from neuron_accel.loop.profiling import ProfiledEvents

MOST = 350
"""A plugin with sixteen options has that many characters."""

EXEMPT = {
    "PluginConformance",
    "NeuronTrainerMixin",
    "NeuronSeq2SeqTrainingArguments",
    "NeuronModelForCausalLM",
    "UnitsOfModel",
}
"""A class of tests, what others derive from (of them pytest, and the class beside it, show instances), a class that has
no instances, and a protocol."""

SHOWN_BY_OTHERS = (nn.Module, torch.optim.Optimizer, NeuronTrainingArguments)
"""torch and transformers show these, on several lines."""


def public_classes() -> list[type]:
    modules = (neuron_accel, contract, events, families, shards, testing)
    found = {getattr(module, name) for module in modules for name in module.__all__ if name not in EXEMPT}
    return sorted(
        (value for value in found if inspect.isclass(value) and typing.get_origin(value) is None),
        key=lambda cls: cls.__name__,
    )


def decoder() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))


def sharded_state(optimizer) -> list[object]:
    (shard,) = optimizer.optimizer.shards
    gathered = EagerGatheredShard.__new__(EagerGatheredShard)
    vars(gathered).update(bucket=shard.bucket, parameters=shard.parameters, partition=shard.partition)
    return [optimizer.optimizer, shard, gathered]


@pytest.fixture(scope="module")
def objects(tmp_path_factory) -> list[object]:
    """An instance of every public class, most of them from a run."""
    accelerator = NeuronAccelerator(cpu=True, plugins=[Zero1Plugin()])
    run, layout = accelerator.run, contract.Layout(shape=(4, 4), dtype="float32")
    model, optimizer = accelerator.prepare(net := nn.Linear(4, 4), torch.optim.AdamW(net.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    prepared = run.models[0]
    records, parameter = list(prepared.parameters), next(model.parameters())
    with run.backend.record() as traffic:
        pass
    traffic.transfers.append(transfer := events.Transfer(op="all_reduce", group="dp", size=2, sent=64))
    reducer = contract.GradientReducer(prepared, run)
    weights = shards.WeightShard(read=torch.Tensor, start=0, stop=8, axes=("dp",), gather=torch.Tensor, changed=int)
    other = nn.Linear(4, 4)
    arguments = NeuronTrainingArguments(str(tmp_path_factory.mktemp("trainer")), use_cpu=True, report_to=[])
    sharded = contract.ShardedState({"weight": parameter.detach()})
    plugins = [getattr(neuron_accel, name) for name in neuron_accel.__all__ if name.endswith("Plugin")]
    errors = [cls for cls in public_classes() if issubclass(cls, neuron_accel.NeuronAccelError)]
    return [
        accelerator,
        arguments,
        NeuronTrainer(nn.Linear(4, 4), arguments),
        NeuronSeq2SeqTrainer.__new__(NeuronSeq2SeqTrainer),
        ZeroRedundancyOptimizer(other.parameters(), torch.optim.AdamW),
        DryRun(world_size=8),
        find_instance("trn1.32xlarge"),
        run,
        run.plan,
        run.mesh,
        run.mesh.axes[0],
        run.backend,
        run.backend.generator,
        run.gradients,
        shards.ShardedGradients(run, [], []),
        run.join,
        run.world,
        run.events,
        events.Event(run.events, "forward", "part", "forward", {}),
        events.Collective(run.events, "all_reduce", "collective", run.world, 8, torch.float32, (), False),
        events.Observer(),
        ProfiledEvents(),
        prepared,
        prepared.parameters,
        records[0],
        traffic,
        transfer,
        reducer,
        weights,
        sharded,
        layout,
        LocalBoard(),
        PartitionLimit(8, "a chip"),
        contract.BufferBroadcast(prepared, run),
        Done(parameter),
        contract.GradientPart(parameter, ("tp",)),
        contract.Cut(dim=0, axis="tp", degree=2, size=4, blocks=(4,)),
        torch.Tensor._make_wrapper_subclass(contract.LogitsTensor, (2, 4)),
        contract.PlanContext(mesh=run.mesh, plugins={"zero1": Zero1Plugin()}, capabilities=run.plan.capabilities),
        FullyShardedPlugin.spec,
        contract.RankRandomness(torch.device("cpu"), 1),
        contract.ReplicaState({"momentum": parameter}),
        PipelineParallelPlugin(pipeline_parallel_size=2, num_microbatches=4),
        *sharded_state(optimizer),
        shards.ShardedWeights(run, "fully_sharded"),
        shards.Unit("blocks.0", nn.Linear(4, 4), 1),
        families.Architecture.of(decoder()),
        families.Style(kind="rowwise"),
        families.Stack.of(decoder()),
        families.BlockwiseAttention(None),
        contract.WithProductHooks(),
        testing.PeakMemory(),
        testing.RankExit(1),
        testing.RankTimeout("slow"),
        testing.RanksError(2, {1: ValueError("wrong")}, {}, {}),
        testing.Tolerance(),
        testing.Trace([1.0, 0.5], [], {}, {"weight": parameter}),
        testing.Training(),
        *(cls() for cls in plugins if cls not in (StrategyPlugin, PipelineParallelPlugin)),
        *(cls("what") for cls in errors),
        *(next(iter(cls)) for cls in public_classes() if issubclass(cls, enum.Enum)),
    ]


@pytest.mark.parametrize("cls", public_classes(), ids=lambda cls: cls.__name__)
def test_a_public_object_has_a_repr_that_one_can_read(cls, objects):
    found = [value for value in objects if isinstance(value, cls)]
    assert found, f"no instance of {cls.__name__} above"
    for value in found:
        shown = repr(value)
        assert not re.search(r"0x[0-9a-f]{6}|SECRET|Parameter containing|tensor\(", shown), shown
        if not isinstance(value, SHOWN_BY_OTHERS):
            assert type(value).__name__ in shown
            assert "\n" not in shown
            assert len(shown) <= MOST, shown


@pytest.fixture(scope="module")
def documented(tmp_path_factory) -> dict[str, object]:
    """What public methods return, and instances of other classes of the reference, by the beginning of their repr."""

    accelerator = NeuronAccelerator(cpu=True, plugins=[Zero1Plugin()])
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    _, _, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    with accelerator.run.backend.record() as traffic:
        interruption = accelerator.watch_for_interruption(signals=(), notice_file="notice")
    return {
        "<PreparedScheduler of a LambdaLR>": scheduler,
        "<DataLoaderShard of a Tensor>": loader,
        "<Interruption: watches 'notice'>": interruption,
        "<Traffic: 0 bytes sent": traffic,
        "nothing to resume": accelerator.load_state(str(tmp_path_factory.mktemp("empty")), resume="latest"),
    }


def test_what_public_methods_return_has_a_repr_that_one_can_read(documented):
    for beginning, value in documented.items():
        shown = str(value) if beginning.startswith("nothing") else repr(value)
        assert shown.startswith(beginning), shown
        assert not re.search(r"0x[0-9a-f]{6}|\n", repr(value)), repr(value)
        assert len(repr(value)) <= MOST


def test_the_accelerator_and_its_plan_name_mesh_and_plugins(objects):
    shown = repr(objects[0])
    assert shown == "<NeuronAccelerator: one rank; plugins: zero1; rank 0 of 1 on cpu, backend 'torch'>"
    assert repr(objects[0].plan).startswith("<Plan: one rank; plugins: zero1; fingerprint ")


def test_the_version_is_that_of_the_package():
    from importlib import metadata

    assert neuron_accel.__version__ == metadata.version("neuron-accel")
