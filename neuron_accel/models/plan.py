# SPDX-License-Identifier: Apache-2.0
"""Descriptions of families of models as plain data: the names of their modules, and how each is sharded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a module in a tensor-parallel region is sharded.

    Args:
        kind: ``"colwise"`` (the output features are sharded), ``"rowwise"`` (the input features are sharded; the
            outputs are summed), ``"shared"`` (replicated; each rank applies it to its shard of the features, so that
            its gradient is a sum over the ranks), ``"replicated"`` (each rank applies it to the summed outputs of a
            row-wise projection), ``"sharded"`` (its parameters are sharded along one dim, like its
            input), ``"spanning"`` (replicated; it is applied to the gathered features of all ranks, of which each rank
            keeps its shard), ``"partial"`` (like ``"rowwise"``, but the outputs are summed at the end of the region),
            ``"experts"`` (many gated MLPs in two tensors, gate and up [experts, 2 x features, hidden] and down
            [experts, hidden, features], or transposed, whose features are sharded), ``"own_queries"`` (replicated; a
            rank computes the queries of its own heads and the keys and values of all heads, which are the last of the
            output features) or ``"counted_once"`` (replicated, inside a region whose output is summed at its end; each
            rank contributes a fraction of the output).
        units: the configuration attribute that counts the indivisible units, such as attention heads. None, or an
            attribute that is None, means single features. One name for each block if they differ.
        blocks: number of equal blocks that are fused in the sharded features: 3 for query, key and value.
        groups: number of groups in which the units are laid out one after the other; each block has the units of one.
        fused: whether a unit is a key/value head together with its query heads, so that it can be neither padded nor
            replicated.
        widths: configuration attributes with the number of features in a unit of each block, if they differ; such a
            module cannot be padded.
        dim: the dim along which parameters of kind ``"sharded"`` are sharded.
    """

    kind: str
    units: str | tuple[str, ...] | None = None
    blocks: int = 1
    groups: int = 1
    fused: bool = False
    widths: tuple[str, ...] = ()
    dim: int = 0

    @property
    def units_of_blocks(self) -> tuple[str | None, ...]:
        """The indivisible units of each block."""
        return self.units if isinstance(self.units, tuple) else (self.units,) * self.blocks


def colwise(
    *,
    units: str | tuple[str, ...] | None = None,
    blocks: int = 1,
    groups: int = 1,
    fused: bool = False,
    widths: tuple[str, ...] = (),
) -> Style:
    """A projection whose output features are sharded."""
    return Style(kind="colwise", units=units, blocks=blocks, groups=groups, fused=fused, widths=widths)


def rowwise(*, units: str | None = None, blocks: int = 1, groups: int = 1) -> Style:
    """A projection whose input features are sharded."""
    return Style(kind="rowwise", units=units, blocks=blocks, groups=groups)


def shared() -> Style:
    """A replicated module that each rank applies to its shard of heads or features."""
    return Style(kind="shared")


def replicated() -> Style:
    """A replicated module that all ranks apply to the same, behind a row-wise projection of its region."""
    return Style(kind="replicated")


def sharded(
    *, units: str | tuple[str, ...] | None = None, blocks: int = 1, widths: tuple[str, ...] = (), dim: int = 0
) -> Style:
    """A parameter, or a module, whose parameters are all sharded along the same dim."""
    return Style(kind="sharded", units=units, blocks=blocks, widths=widths, dim=dim)


def spanning(*, units: str | None = None) -> Style:
    """A replicated module, such as a norm, over features that are sharded over all ranks.

    Args:
        units: the units of the features; if it is not given, their number must be divisible by the number of ranks.
    """
    return Style(kind="spanning", units=units)


def partial() -> Style:
    """A projection whose input features are sharded, inside a region whose output is summed at its end."""
    return Style(kind="partial")


def experts() -> Style:
    """Gated MLPs with stacked weights, whose features are sharded."""
    return Style(kind="experts")


def own_queries(*, units: str) -> Style:
    """A projection to the queries of all heads, followed by one key head and one value head for all of them."""
    return Style(kind="own_queries", units=units)


def counted_once() -> Style:
    """A replicated module, such as an identity, inside a region whose output is summed at its end."""
    return Style(kind="counted_once")


@dataclass(frozen=True, kw_only=True)
class ArchitecturePlan:
    """The description of a family of models.

    Patterns are FQNs relative to the base model, in which ``*`` stands for one segment.

    Args:
        model_types: the families (``config.model_type``) that this describes.
        blocks: the repeated blocks, in order.
        token_embedding: maps token ids to hidden states; empty if there is none.
        further_embeddings: other tables that are looked up by token ids.
        final_norm: the norm after the last block; empty if there is none.
        regions: the modules whose input, ``hidden_states`` of shape [batch, sequence, hidden], enters a tensor-parallel
            region. A region ends in one row-wise projection, or contains modules that are ``"partial"`` or
            ``"experts"``: then the output of the module is summed.
        styles: the modules of the regions that hold parameters, and how each is sharded.
        head: FQN, relative to the model around the base model, of the projection to the vocabulary.
        heads, key_value_heads: the configuration attributes that count attention heads and key/value heads; the first
            is a multiple of the second, where there is one.
        per_rank: attributes of modules that count what a rank computes, and the configuration attribute behind them;
            ``config.name`` is an entry of the module's own view of the configuration.
        per_head: arguments of modules, [batch x heads, ...] or, with four dims, [batch, heads, ...]; each rank receives
            those of its heads.
        region_inputs: arguments of regions, by keyword, that enter them as the hidden states do, such as the encoder's
            output that a decoder attends to.
        attentions: further fields of the base model's output with attention weights, beside ``attentions``, and the
            configuration attribute that counts their heads.
        unsupported: configuration attributes that this plan does not support when they are set, and why.
        region_outputs: fields of the base model's output, tuples of tensors, that regions compute beside their own
            output, and that are equal on all ranks, such as the routers' logits.
        replicated_if_uneven: regions that are replicated if the value of these configuration attributes is not
            divisible by the number of ranks.
        sequence: why the family does not support sequence parallelism; empty if it does.
        variants: configuration attributes, and the plan that replaces this one if they are set; the first one that is
            set is used.
    """

    model_types: tuple[str, ...]
    blocks: str
    token_embedding: str
    final_norm: str
    regions: tuple[str, ...]
    styles: Mapping[str, Style]
    further_embeddings: tuple[str, ...] = ()
    head: str = "lm_head"
    heads: str = "num_attention_heads"
    key_value_heads: str = "num_key_value_heads"
    per_rank: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    per_head: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    region_inputs: tuple[str, ...] = ()
    attentions: Mapping[str, str] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    region_outputs: tuple[str, ...] = ()
    replicated_if_uneven: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sequence: str = ""
    variants: Mapping[str, ArchitecturePlan] = field(default_factory=dict)

    def of(self, config: Any) -> ArchitecturePlan:
        """Returns the plan of a model with this configuration."""
        return next((plan for name, plan in self.variants.items() if getattr(config, name, None)), self)

    def at(self, degree: int, config: Any) -> ArchitecturePlan:
        """Returns the plan of a model with this configuration over ``degree`` ranks."""
        uneven = {
            region
            for region, counts in self.replicated_if_uneven.items()
            if any(getattr(config, name) % degree for name in counts)
        }

        def shards(pattern: str) -> bool:
            return not any(pattern == region or pattern.startswith(f"{region}.") for region in uneven)

        return replace(
            self,
            regions=tuple(filter(shards, self.regions)),
            styles={pattern: style for pattern, style in self.styles.items() if shards(pattern)},
            per_rank={pattern: counted for pattern, counted in self.per_rank.items() if shards(pattern)},
            replicated_if_uneven={},
        )


def matches_fqn(pattern: str, name: str) -> bool:
    """Returns whether ``pattern`` matches the FQN ``name``."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def named_modules(base: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Returns FQN in ``base`` and module of all modules that a pattern matches, in the order of the model; a module
    with several names once."""
    found = [("", base)]
    for segment in pattern.split(".") if pattern else ():
        found = [
            (f"{name}.{child}" if name else child, module)
            for name, parent in found
            for child, module in parent.named_children()
            if child == segment or ("*" in segment and matches_fqn(segment, child))
        ]
    first = {module: name for name, module in reversed(found)}
    return [(name, module) for name, module in found if first[module] == name]
