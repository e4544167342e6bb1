# SPDX-License-Identifier: Apache-2.0
"""Styles of sharding: each decides the layouts of one module's parameters, and applies itself to the module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from neuron_accel.contract import Cut, Layout, ParameterMap
from neuron_accel.contract.families import Architecture, Style, join_fqn
from neuron_accel.errors import UnsupportedModelError
from neuron_accel.strategies.tensor_parallel.cuts import AXIS, Cuts, cut_layout
from neuron_accel.strategies.tensor_parallel.embedding import parallel_embedding, parallel_head
from neuron_accel.strategies.tensor_parallel.head_split import HeadSplit
from neuron_accel.strategies.tensor_parallel.linear import (
    ColumnParallelLinear,
    FeatureDims,
    RowBlock,
    feature_dims,
    own_rows_linear,
    parallel_linear,
    refresh_features,
)
from neuron_accel.strategies.tensor_parallel.regions import count_once, span_features
from neuron_accel.strategies.tensor_parallel.tp_region import TpRegion
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary

if TYPE_CHECKING:
    from neuron_accel.contract import Group

Layouts = dict[str, Layout]
"""Layouts of the parameters of a module, by their names in it."""


@dataclass
class ShardedModel:
    """The model that styles are applied to.

    Args:
        architecture: the model.
        parameters: the layouts of its parameters.
        tp_region: entry and exit of its regions.
        splits: how its heads are split.
        replica_groups: for each number of replicas, the group of ranks that hold the same heads as this one.
        coordinates: of this rank.
        styles: the styles of all its modules.
    """

    architecture: Architecture
    parameters: ParameterMap
    tp_region: TpRegion
    splits: dict[str, HeadSplit]
    replica_groups: dict[int, Group]
    coordinates: dict[str, int]
    styles: Sequence[ModuleStyle]
    _shards: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def shard(self, module: nn.Module, fqn: str, name: str, layout: Layout) -> None:
        """Replaces a parameter of a module by this rank's shard: once, so that tied weights stay tied, also in modules
        that are not sharded themselves."""
        record, full = self.parameters[join_fqn(fqn, name)], getattr(module, name)
        self.parameters.set_layout(join_fqn(fqn, name), layout)
        if full not in self._shards:
            shard = layout.shard(full.detach(), self.coordinates)
            self._shards[full] = nn.Parameter(shard, requires_grad=full.requires_grad)
        module.register_parameter(name, self._shards[full])
        for owner, _, tied in (each.rpartition(".") for each in record.names):
            other = self.architecture.model.get_submodule(owner)
            if getattr(other, tied) is full and not isinstance(other, (nn.Linear, nn.Embedding)):
                other.register_parameter(tied, self._shards[full])


@dataclass(frozen=True, kw_only=True)
class ModuleStyle(ABC):
    """How one module is sharded.

    Args:
        fqn: the module's FQN.
        module: the module before sharding.
        layouts: the layout of each of its own parameters, by the parameter's name in the module.
    """

    kind: ClassVar[str]
    """The kind of a style in plans (:class:`~neuron_accel.models.Style`), and the rule that `explain` shows."""
    of_linear: ClassVar[bool] = False
    """Whether the module has to be a linear layer."""
    summed: ClassVar[bool] = False
    """Whether its output is a partial sum at the exit of the region."""

    fqn: str
    module: nn.Module
    layouts: Layouts

    @classmethod
    def of(cls, cuts: Cuts, fqn: str, module: nn.Module, style: Style, layouts: Layouts) -> ModuleStyle:
        """Returns how a module is sharded. Changes nothing.

        Args:
            layouts: the layouts of its parameters when they are not sharded.
        """
        found = cls.cut(cuts, fqn, module, style, layouts)
        return cls(fqn=fqn, module=module, layouts={n: cut_layout(each, found.get(n)) for n, each in layouts.items()})

    @classmethod
    def cut(cls, cuts: Cuts, fqn: str, module: Any, style: Style, layouts: Layouts) -> Mapping[str, Cut]:
        """Returns the cuts of those parameters that are sharded."""
        return {}

    @abstractmethod
    def apply(self, sharded: ShardedModel) -> None:
        """Shards the module."""


class Replicated(ModuleStyle):
    """The module is replicated, and all ranks apply it to the same: behind the region whose module contains it."""

    kind = "replicated"

    def apply(self, sharded: ShardedModel) -> None:
        """Changes nothing."""


class Shared(ModuleStyle):
    """The module is replicated, and each rank applies it to its own features: its gradient is a partial sum."""

    kind = "shared"

    def apply(self, sharded: ShardedModel) -> None:
        for name in self.layouts:
            sharded.parameters.add_partial_axis(join_fqn(self.fqn, name), AXIS)


class CountedOnce(Shared):
    """A shared module of which each rank contributes a fraction of the output."""

    kind, summed = "counted_once", True

    def apply(self, sharded: ShardedModel) -> None:
        super().apply(sharded)
        count_once(self.module, sharded.tp_region)


@dataclass(frozen=True, kw_only=True)
class Spanning(ModuleStyle):
    """The module is replicated and applied to the features of all ranks.

    Args:
        split: how the heads that its features belong to are split.
    """

    kind = "spanning"
    split: HeadSplit | None

    @classmethod
    def of(cls, cuts: Cuts, fqn: str, module: nn.Module, style: Style, layouts: Layouts) -> ModuleStyle:
        units = style.units_of_blocks[0]
        split = None if units is None else cuts.splits.get(units) or cuts.heads
        return cls(fqn=fqn, module=module, layouts=layouts, split=split)

    def apply(self, sharded: ShardedModel) -> None:
        span_features(self.module, sharded.tp_region, self.split)


@dataclass(frozen=True, kw_only=True)
class OwnRows(Shared):
    """The linear layer is replicated, and each rank computes only its output features.

    Args:
        rows: the rows of its weight.
    """

    kind = "own_rows"
    rows: tuple[RowBlock, ...]

    def apply(self, sharded: ShardedModel) -> None:
        super().apply(sharded)
        module = own_rows_linear(self.module, sharded.tp_region, self.rows)
        sharded.architecture.model.set_submodule(self.fqn, module)


class OwnQueries(Shared):
    """The linear layer is replicated; each rank computes the queries of its heads, and the one key and value head."""

    kind, of_linear = "own_queries", True

    def apply(self, sharded: ShardedModel) -> None:
        super().apply(sharded)
        architecture, heads = sharded.architecture, sharded.splits[sharded.architecture.plan.heads]
        holder = self.fqn.rpartition(".")[0]
        exit = next(s for s in sharded.styles if s.kind == "rowwise" and s.fqn.startswith(holder + "."))
        queries = exit.layouts["weight"].shape[1]  # as many as the output projection has input features
        both = cast(Any, self.module).weight.shape[0] - queries  # one key head and one value head
        local = queries // heads.count * heads.local
        blocks = (
            RowBlock(start=0, size=queries, local=local),
            RowBlock(start=queries, size=both, local=both, replicas=sharded.tp_region.group.size),
        )
        module = own_rows_linear(self.module, sharded.tp_region, blocks)
        architecture.model.set_submodule(self.fqn, module)
        if not heads.padded:
            return

        def without_padding(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return (args[0].masked_fill(module.padding(args[0].device)[:local], 0), *args[1:])

        # The output of padded heads is not zero, as they attend to the same values as all others.
        architecture.model.get_submodule(exit.fqn).register_forward_pre_hook(without_padding)


class Sharded(ModuleStyle):
    """The parameters are sharded along one dim, like the module's input."""

    kind = "sharded"

    @classmethod
    def cut(cls, cuts: Cuts, fqn: str, module: Any, style: Style, layouts: Layouts) -> Mapping[str, Cut]:
        return {name: cuts.of(fqn, style, style.dim, layout.shape[style.dim]) for name, layout in layouts.items()}

    def replacement(self, tp_region: TpRegion) -> nn.Module:
        """Returns the module that replaces this one, still with the full parameters."""
        return self.module

    def apply(self, sharded: ShardedModel) -> None:
        module = self.replacement(sharded.tp_region)
        for name, layout in self.layouts.items():
            if layout.cuts:
                sharded.shard(module, self.fqn, name, layout)
                replicas = layout.cuts[0].replicas
                if replicas > 1:
                    cast(ColumnParallelLinear, module).replica_group = sharded.replica_groups[replicas]
        refresh_features(module)
        if module is not self.module:
            sharded.architecture.model.set_submodule(self.fqn, module)


class Rowwise(Sharded):
    """The input features of a linear layer are sharded, and its outputs are summed."""

    kind, of_linear = "rowwise", True

    @classmethod
    def cut(cls, cuts: Cuts, fqn: str, module: Any, style: Style, layouts: Layouts) -> Mapping[str, Cut]:
        dim = cast(FeatureDims, feature_dims(module)).input
        return {"weight": cuts.of(fqn, style, dim, layouts["weight"].shape[dim])}

    def replacement(self, tp_region: TpRegion) -> nn.Module:
        return parallel_linear(self.module, self.kind, tp_region)


class Colwise(Rowwise):
    """The output features of a linear layer are sharded."""

    kind = "colwise"

    @classmethod
    def of(cls, cuts: Cuts, fqn: str, module: nn.Module, style: Style, layouts: Layouts) -> ModuleStyle:
        rows = cuts.own_rows(fqn, module, style)
        if rows:
            return OwnRows(fqn=fqn, module=module, layouts=layouts, rows=rows)
        return super().of(cuts, fqn, module, style, layouts)

    @classmethod
    def cut(cls, cuts: Cuts, fqn: str, module: Any, style: Style, layouts: Layouts) -> Mapping[str, Cut]:
        dim = cast(FeatureDims, feature_dims(module)).output
        size = layouts["weight"].shape[dim]
        return {"weight": cuts.of(fqn, style, dim, size), "bias": cuts.of(fqn, style, 0, size)}


class Partial(Rowwise):
    """As row-wise, but the outputs are summed at the end of the region."""

    kind, summed = "partial", True

    @classmethod
    def cut(cls, cuts: Cuts, fqn: str, module: Any, style: Style, layouts: Layouts) -> Mapping[str, Cut]:
        if "bias" in layouts:
            raise UnsupportedModelError(
                f"{fqn!r} has a bias.",
                where=f"the plan of model type {cuts.architecture.model_type!r}",
                why="its output is summed over ranks later, and the bias would be counted once for each rank",
            )
        return super().cut(cuts, fqn, module, style, layouts)


class StackedExperts(Sharded):
    """The features of many gated MLPs in two tensors are sharded."""

    kind, summed = "experts", True

    @classmethod
    def cut(cls, cuts: Cuts, fqn: str, module: Any, style: Style, layouts: Layouts) -> Mapping[str, Cut]:
        return cuts.of_experts(fqn, module)

    def apply(self, sharded: ShardedModel) -> None:
        for name in _scale_bias(self.module, sharded.tp_region.group.size):
            sharded.parameters.add_partial_axis(join_fqn(self.fqn, name), AXIS)
        super().apply(sharded)


class VocabularyEmbedding(Sharded):
    """The rows of a token embedding are sharded along the vocabulary."""

    kind = "embedding"

    @classmethod
    def cut(cls, cuts: Cuts, fqn: str, module: Any, style: Style, layouts: Layouts) -> Mapping[str, Cut]:
        common: dict[str, Any] = {"dim": 0, "axis": AXIS, "degree": cuts.degree, "padded": True}
        return {name: Cut(size=layout.shape[0], **common) for name, layout in layouts.items()}

    def replacement(self, tp_region: TpRegion) -> nn.Module:
        rows, module = self.layouts["weight"].shape[0], cast(Any, self.module)
        vocabulary = Vocabulary(size=rows, backend=tp_region.backend, group=tp_region.group)
        if isinstance(module, nn.Linear):
            return parallel_head(module, vocabulary)
        return parallel_embedding(self.fqn, module, vocabulary)


class VocabularyHead(VocabularyEmbedding):
    """The rows of the projection to the vocabulary are sharded."""

    kind = "head"


STYLES: dict[str, type[ModuleStyle]] = {
    cls.kind: cls
    for cls in (
        Colwise,
        Rowwise,
        Replicated,
        Shared,
        Sharded,
        Spanning,
        Partial,
        StackedExperts,
        OwnQueries,
        CountedOnce,
    )
}
"""The styles that plans name."""

_BIAS = "down_proj_bias"


def _scale_bias(module: nn.Module, degree: int) -> list[str]:
    """Makes each rank add 1 / ``degree`` of the bias of the experts' last projection, so that it counts once in the sum
    over ranks. Returns the names of the parameters whose gradients are then partial sums."""
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
