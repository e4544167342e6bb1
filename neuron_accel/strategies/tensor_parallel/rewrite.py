# SPDX-License-Identifier: Apache-2.0
"""Shards a model by its shard plans: replaces modules, shards parameters, and installs the hooks of regions."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from neuron_accel.contract import Architecture, PreparedModel, Run, install_resize, join_fqn
from neuron_accel.strategies.tensor_parallel.embedding import (
    VocabularyParallelHead,
    parallel_embedding,
    parallel_head,
)
from neuron_accel.strategies.tensor_parallel.head_split import HeadSplit, head_splits
from neuron_accel.strategies.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowBlock,
    own_rows_linear,
    parallel_linear,
    refresh_features,
)
from neuron_accel.strategies.tensor_parallel.regions import (
    change_output,
    count_once,
    fraction_of_gradient,
    gather_heads,
    install_logits_switch,
    install_regions,
    shard_arguments,
    span_features,
)
from neuron_accel.strategies.tensor_parallel.shard_plan import AXIS, ShardPlan
from neuron_accel.strategies.tensor_parallel.tp_region import TpRegion
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary

if TYPE_CHECKING:
    from neuron_accel.contract import Group


_HEADS_OF_A_GROUP = "num_key_value_groups"
"""Attribute of attention modules with the number of heads for each key/value head."""


_SUMMED = ("partial", "experts", "counted_once")
"""Kinds of modules whose output is a partial sum at the exit of the region."""


def rewrite(architecture: Architecture, shard_plans: list[ShardPlan], model: PreparedModel, run: Run) -> None:
    """Shards a model in place.

    Args:
        architecture: the model.
        shard_plans: how each of its modules is sharded.
        model: the model; the layouts of its parameters are set.
        run: the run.
    """
    parameters = model.parameters
    architecture = architecture.at(run.group(AXIS).size)
    tp_region = TpRegion(run.backend, run.group(AXIS), architecture, run.randomness(AXIS))
    splits = head_splits(architecture, tp_region.group.size)
    replica_groups = _replica_groups(splits, run)
    sharder = _Sharder(run.coordinates)
    module: nn.Module
    for shards in shard_plans:
        for name in shards.layouts:
            parameters[join_fqn(shards.fqn, name)].rule = shards.kind
        if shards.kind in ("shared", "counted_once"):
            for name in shards.layouts:
                parameters.add_partial_axis(join_fqn(shards.fqn, name), AXIS)
            if shards.kind == "counted_once":
                count_once(shards.module, tp_region)
            continue
        if shards.kind == "spanning":
            span_features(shards.module, tp_region, shards.split)
            continue
        if shards.kind in ("own_queries", "own_rows"):
            for name in shards.layouts:
                parameters.add_partial_axis(join_fqn(shards.fqn, name), AXIS)
            if shards.kind == "own_rows":
                module = own_rows_linear(shards.module, tp_region, shards.rows)
            else:
                module = _own_queries(architecture, shards, tp_region, splits, shard_plans)
            _put(architecture.model, shards.fqn, module)
            continue
        if shards.kind == "experts":
            for name in scale_bias(shards.module, tp_region.group.size):
                parameters.add_partial_axis(join_fqn(shards.fqn, name), AXIS)
        module = _replacement(shards, tp_region)
        for name, layout in shards.layouts.items():
            if layout.cuts:
                parameters.set_layout(join_fqn(shards.fqn, name), layout)
                full = getattr(module, name)
                module.register_parameter(name, sharder.shard(full, layout))
                _put_tied(architecture.model, parameters[join_fqn(shards.fqn, name)].names, full, getattr(module, name))
                replicas = layout.cuts[0].replicas
                if replicas > 1:
                    cast(ColumnParallelLinear, module).replica_group = replica_groups[replicas]
        refresh_features(module)
        _put(architecture.model, shards.fqn, module)
    heads = splits.get(architecture.plan.heads)
    _shard_attributes(architecture, splits)
    install_regions(architecture, tp_region, [d.fqn for d in shard_plans if d.kind in _SUMMED])
    if heads is not None:
        shard_arguments(architecture, tp_region, heads)
    change_output(architecture, "attentions", gather_heads(tp_region, heads))
    for field in architecture.plan.region_outputs:
        change_output(architecture, field, fraction_of_gradient(tp_region))
    install_resize(model, run)
    head = architecture.head
    if head is not None and isinstance(head[1], VocabularyParallelHead):
        install_logits_switch(architecture.owner, head[1])


class _Sharder:
    """Shards each parameter once, so that tied weights stay tied."""

    def __init__(self, coordinates: dict[str, int]) -> None:
        self._coordinates = coordinates
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def shard(self, parameter: nn.Parameter, layout) -> nn.Parameter:
        if parameter not in self._done:
            shard = layout.shard(parameter.detach(), self._coordinates)
            self._done[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        return self._done[parameter]


def _replacement(shard_plan: ShardPlan, tp_region: TpRegion) -> nn.Module:
    if shard_plan.kind in ("colwise", "rowwise", "partial"):
        return parallel_linear(shard_plan.module, shard_plan.kind, tp_region)
    if shard_plan.kind in ("sharded", "experts"):
        return shard_plan.module
    table: Any = shard_plan.module  # an nn.Embedding or an nn.Linear, which the shard plan has checked
    vocabulary = Vocabulary(size=table.weight.shape[0], backend=tp_region.backend, group=tp_region.group)
    if shard_plan.kind == "embedding":
        return parallel_embedding(shard_plan.fqn, table, vocabulary)
    return parallel_head(table, vocabulary)


def _own_queries(
    architecture: Architecture,
    shard_plan: ShardPlan,
    tp_region: TpRegion,
    splits: dict[str, HeadSplit],
    all: list[ShardPlan],
) -> nn.Module:
    heads = splits[architecture.plan.heads]
    holder = shard_plan.fqn.rpartition(".")[0]
    exit = next(d for d in all if d.kind == "rowwise" and d.fqn.startswith(holder + "."))
    queries = exit.layouts["weight"].shape[1]  # as many as the output projection has input features
    projection: Any = shard_plan.module
    both = projection.weight.shape[0] - queries  # one key head and one value head
    local = queries // heads.count * heads.local
    blocks = (
        RowBlock(start=0, size=queries, local=local),
        RowBlock(start=queries, size=both, local=both, replicas=tp_region.group.size),
    )
    module = own_rows_linear(shard_plan.module, tp_region, blocks)
    if heads.padded:

        def without_padding(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (args[0].masked_fill(module.padding(args[0].device)[:local], 0), *args[1:])

        # The output of padded heads is not zero, as they attend to the same values as all others.
        architecture.model.get_submodule(exit.fqn).register_forward_pre_hook(without_padding)
    return module


def _put(model: nn.Module, fqn: str, module: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _put_tied(model: nn.Module, names: Iterable[str], full: nn.Parameter, shard: nn.Parameter) -> None:
    """Keeps tied parameters tied in modules that are not sharded themselves."""
    for fqn in names:
        owner, _, name = fqn.rpartition(".")
        module = model.get_submodule(owner)
        if getattr(module, name) is full and not isinstance(module, (nn.Linear, nn.Embedding)):
            module.register_parameter(name, shard)


def _replica_groups(splits: dict[str, HeadSplit], run: Run) -> dict[int, Group]:
    """Returns, for each number of replicas, the group of neighbouring ranks that hold the same heads."""
    counts = sorted({split.replicas for split in splits.values() if split.replicas > 1})
    groups = run.mesh.groups(AXIS)
    return {
        count: run.backend.new_group(
            [group[start : start + count] for group in groups for start in range(0, len(group), count)],
            f"{AXIS}, the same heads",
        )
        for count in counts
    }


def _shard_attributes(architecture: Architecture, splits: dict[str, HeadSplit]) -> None:
    for pattern, counted in architecture.plan.per_rank.items():
        for _, module in architecture.find(pattern):
            for name, counts in counted.items():
                holder, _, attribute = name.rpartition(".")
                if holder:  # a copy of the configuration, which other modules use too
                    setattr(module, holder, copy.copy(getattr(module, holder)))
                target, split = getattr(module, holder) if holder else module, splits[counts]
                setattr(target, attribute, getattr(target, attribute) // split.count * split.local)
    groups = splits.get(architecture.plan.key_value_heads)
    if groups is None or groups.replicas == 1:
        return
    for _, module in architecture.regions:
        if hasattr(module, _HEADS_OF_A_GROUP):
            setattr(module, _HEADS_OF_A_GROUP, getattr(module, _HEADS_OF_A_GROUP) // groups.replicas)


# ---- Biases of experts -----------------------------------------------------------------------------------------------
_BIAS = "down_proj_bias"


def scale_bias(module: nn.Module, degree: int) -> list[str]:
    """Makes each rank add 1 / ``degree`` of the bias of the experts' last projection, so that it counts once in the sum
    over ranks.

    Returns:
        The names of the parameters whose gradients are then partial sums.
    """
    if _BIAS not in module._parameters:
        return []

    def scaled(experts: nn.Module) -> torch.Tensor:
        bias = experts._parameters[_BIAS]
        assert bias is not None
        return bias / degree

    # All of transformers' forward functions of experts read the bias as an attribute.
    members: dict[str, Any] = {_BIAS: property(scaled)}
    module.__class__ = type(type(module).__name__, (type(module),), members)
    return [_BIAS]
