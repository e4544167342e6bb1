"""Carries out a division: replaces modules, cuts parameters, and lets activations in and out."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.contract import ParameterMap, Run
from neuron_accel.models.architecture import Architecture, join
from neuron_accel.strategies.resize import install_resize
from neuron_accel.strategies.tensor_parallel.embedding import (
    VocabularyParallelHead,
    parallel_embedding,
    parallel_head,
)
from neuron_accel.strategies.tensor_parallel.head_split import Share, shares_of
from neuron_accel.strategies.tensor_parallel.linear import RowBlock, own_rows_linear, parallel_linear, refresh_features
from neuron_accel.strategies.tensor_parallel.regions import (
    change_output,
    count_once,
    divide_arguments,
    gather_heads,
    install_logits_switch,
    install_regions,
    refuse_arguments,
    span_features,
)
from neuron_accel.strategies.tensor_parallel.shard_plan import AXIS, Division
from neuron_accel.strategies.tensor_parallel.tp_region import Boundary
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary

if TYPE_CHECKING:
    from neuron_accel.contract import Group


_HEADS_OF_A_GROUP = "num_key_value_groups"
"""What attention modules call the number of heads that read one key/value head."""


_SUMMED = ("partial", "experts", "counted_once")
"""Kinds of modules whose output is a share of a sum when it leaves the region."""


def rewrite(architecture: Architecture, divisions: list[Division], run: Run, parameters: ParameterMap) -> None:
    """Divides a model in place.

    Args:
        architecture: the model.
        divisions: what becomes of its modules.
        run: ranks and backend.
        parameters: gets the layouts; to be told to follow the model afterwards.
    """
    architecture = architecture.at(run.group(AXIS).size)
    boundary = Boundary(run.backend, run.group(AXIS), architecture, run.randomness(AXIS))
    shares = shares_of(architecture, boundary.group.size)
    sharing = _groups_that_share(shares, run)
    cutter = _Cutter(run.coordinates)
    for division in divisions:
        for name in division.layouts:
            parameters[join(division.fqn, name)].rule = division.kind
        if division.kind in ("shared", "counted_once"):
            for name in division.layouts:
                parameters.add_partial_axis(join(division.fqn, name), AXIS)
            if division.kind == "counted_once":
                count_once(division.module, boundary)
            continue
        if division.kind == "spanning":
            span_features(division.module, boundary, division.share)
            continue
        if division.kind in ("own_queries", "own_rows"):
            for name in division.layouts:
                parameters.add_partial_axis(join(division.fqn, name), AXIS)
            if division.kind == "own_rows":
                module = own_rows_linear(division.module, boundary, division.rows)
            else:
                module = _own_queries(architecture, division, boundary, shares, divisions)
            _put(architecture.model, division.fqn, module)
            continue
        if division.kind == "experts":
            for name in share_bias(division.module, boundary.group.size):
                parameters.add_partial_axis(join(division.fqn, name), AXIS)
        module = _replacement(division, boundary)
        for name, layout in division.layouts.items():
            if layout.cuts:
                parameters.set_layout(join(division.fqn, name), layout)
                whole = getattr(module, name)
                module.register_parameter(name, cutter.cut(whole, layout))
                _put_tied(architecture.model, parameters[join(division.fqn, name)].names, whole, getattr(module, name))
                if layout.replicas > 1:
                    module.alike = sharing[layout.replicas]
        refresh_features(module)
        _put(architecture.model, division.fqn, module)
    heads = shares.get(architecture.plan.heads)
    _divide_attributes(architecture, shares)
    install_regions(architecture, boundary, [d.fqn for d in divisions if d.kind in _SUMMED])
    refuse_arguments(architecture)
    if heads is not None:
        divide_arguments(architecture, boundary, heads)
    change_output(architecture, "attentions", gather_heads(boundary, heads.count if heads else None))
    install_resize(architecture.model, run, parameters)
    head = architecture.head
    if head is not None and isinstance(head[1], VocabularyParallelHead):
        install_logits_switch(architecture.owner, head[1])


class _Cutter:
    """Cuts each parameter once, so that tied weights stay tied."""

    def __init__(self, coordinates: dict[str, int]) -> None:
        self._coordinates = coordinates
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def cut(self, parameter: nn.Parameter, layout) -> nn.Parameter:
        if parameter not in self._done:
            shard = layout.shard(parameter.detach(), self._coordinates)
            self._done[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        return self._done[parameter]


def _replacement(division: Division, boundary: Boundary) -> nn.Module:
    if division.kind in ("colwise", "rowwise", "partial"):
        return parallel_linear(division.module, division.kind, boundary)
    if division.kind in ("divided", "experts"):
        return division.module
    vocabulary = Vocabulary(size=division.module.weight.shape[0], backend=boundary.backend, group=boundary.group)
    if division.kind == "embedding":
        return parallel_embedding(division.fqn, division.module, vocabulary)
    return parallel_head(division.module, vocabulary)


def _own_queries(
    architecture: Architecture, division: Division, boundary: Boundary, shares: dict[str, Share], all: list[Division]
) -> nn.Module:
    heads = shares[architecture.plan.heads]
    holder = division.fqn.rpartition(".")[0]
    exit = next(d for d in all if d.kind == "rowwise" and d.fqn.startswith(holder + "."))
    queries = exit.layouts["weight"].shape[1]  # as many as there are features behind the attention
    both = division.module.weight.shape[0] - queries  # one key and one value head
    local = queries // heads.count * heads.local
    blocks = (
        RowBlock(start=0, size=queries, local=local),
        RowBlock(start=queries, size=both, local=both, replicas=boundary.group.size),
    )
    module = own_rows_linear(division.module, boundary, blocks)
    if heads.padded:

        def without_padding(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (args[0].masked_fill(module.padding(args[0].device)[:local], 0), *args[1:])

        # heads that there are not look at the same values as all others
        architecture.model.get_submodule(exit.fqn).register_forward_pre_hook(without_padding)
    return module


def _put(model: nn.Module, fqn: str, module: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _put_tied(model: nn.Module, names: Iterable[str], whole: nn.Parameter, cut: nn.Parameter) -> None:
    """What is tied to a parameter stays tied, in modules that are not divided themselves, too."""
    for fqn in names:
        owner, _, name = fqn.rpartition(".")
        module = model.get_submodule(owner)
        if getattr(module, name) is whole and not isinstance(module, (nn.Linear, nn.Embedding)):
            module.register_parameter(name, cut)


def _groups_that_share(shares: dict[str, Share], run: Run) -> dict[int, Group]:
    """For each number of replicas, the neighbouring ranks of this one that hold the same heads."""
    counts = sorted({share.replicas for share in shares.values() if share.replicas > 1})
    groups = run.mesh.groups(AXIS)
    return {
        count: run.backend.new_group(
            [group[start : start + count] for group in groups for start in range(0, len(group), count)],
            f"{AXIS}, the same heads",
        )
        for count in counts
    }


def _divide_attributes(architecture: Architecture, shares: dict[str, Share]) -> None:
    for pattern, counted in architecture.plan.per_rank.items():
        for _, module in architecture.find(pattern):
            for name, counts in counted.items():
                holder, _, attribute = name.rpartition(".")
                if holder:  # the module's own view of the configuration, which others share
                    setattr(module, holder, copy.copy(getattr(module, holder)))
                target, share = getattr(module, holder) if holder else module, shares[counts]
                setattr(target, attribute, getattr(target, attribute) // share.count * share.local)
    groups = shares.get(architecture.plan.key_value_heads)
    if groups is None or groups.replicas == 1:
        return
    for _, module in architecture.regions:
        if hasattr(module, _HEADS_OF_A_GROUP):
            setattr(module, _HEADS_OF_A_GROUP, getattr(module, _HEADS_OF_A_GROUP) // groups.replicas)


# ---- Experts whose last bias is added on every rank ------------------------------------------------------------------
_BIAS = "down_proj_bias"


def share_bias(module: nn.Module, degree: int) -> list[str]:
    """Lets each of ``degree`` ranks add its part of the bias behind the experts' last product, so that it counts once
    in the sum over the ranks.

    Returns:
        the names of the parameters whose gradients are shares of a sum from now on.
    """
    if _BIAS not in module._parameters:
        return []

    def part(experts: nn.Module) -> torch.Tensor:
        return experts._parameters[_BIAS] / degree

    # The experts' forward, of which transformers has several, reads the bias as an attribute.
    members: dict[str, Any] = {_BIAS: property(part)}
    module.__class__ = type(type(module).__name__, (type(module),), members)
    return [_BIAS]
