# SPDX-License-Identifier: Apache-2.0
"""Shards a model by the styles of its modules, and installs the hooks of regions."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from neuron_accel.contract import PreparedModel, Run
from neuron_accel.contract.families import Architecture, install_resize, join_fqn
from neuron_accel.strategies.tensor_parallel.cuts import AXIS
from neuron_accel.strategies.tensor_parallel.embedding import VocabularyParallelHead
from neuron_accel.strategies.tensor_parallel.head_split import HeadSplit, head_splits
from neuron_accel.strategies.tensor_parallel.regions import (
    change_output,
    fraction_of_gradient,
    gather_heads,
    install_logits_switch,
    install_regions,
    shard_arguments,
)
from neuron_accel.strategies.tensor_parallel.styles import ModuleStyle, ShardedModel
from neuron_accel.strategies.tensor_parallel.tp_region import TpRegion

if TYPE_CHECKING:
    from neuron_accel.contract import Group

_HEADS_OF_A_GROUP = "num_key_value_groups"
"""Attribute of attention modules with the number of heads for each key/value head."""


def rewrite(architecture: Architecture, styles: list[ModuleStyle], model: PreparedModel, run: Run) -> None:
    """Shards a model in place.

    Args:
        architecture: the model.
        styles: how each of its modules is sharded.
        model: the model; the layouts of its parameters are set.
        run: the run.
    """
    architecture = architecture.at(run.group(AXIS).size)
    tp_region = TpRegion(run.backend, run.group(AXIS), architecture, run.randomness(AXIS))
    splits = head_splits(architecture, tp_region.group.size)
    replica_groups = _replica_groups(splits, run)
    sharded = ShardedModel(architecture, model.parameters, tp_region, splits, replica_groups, run.coordinates, styles)
    for style in styles:
        for name in style.layouts:
            model.parameters[join_fqn(style.fqn, name)].rule = style.kind
        style.apply(sharded)
    heads = splits.get(architecture.plan.heads)
    _shard_attributes(architecture, splits)
    install_regions(architecture, tp_region, [style.fqn for style in styles if style.summed])
    if heads is not None:
        shard_arguments(architecture, tp_region, heads)
    for field, counted in {"attentions": architecture.plan.heads, **architecture.plan.attentions}.items():
        change_output(architecture, field, gather_heads(tp_region, splits.get(counted)))
    for field in architecture.plan.region_outputs:
        change_output(architecture, field, fraction_of_gradient(tp_region))
    install_resize(model, run)
    head = architecture.head
    if head is not None and isinstance(head[1], VocabularyParallelHead):
        install_logits_switch(architecture.owner, head[1])


def _replica_groups(splits: dict[str, HeadSplit], run: Run) -> dict[int, Group]:
    """Returns, for each number of replicas, the group of neighbouring ranks that hold the same heads."""
    counts = sorted({split.replicas for split in splits.values() if split.replicas > 1})
    groups = run.mesh.groups(AXIS)
    return {
        count: run.backend.new_group(
            [group[start : start + count] for group in groups for start in range(0, len(group), count)],
            f"{AXIS} (same heads)",
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
