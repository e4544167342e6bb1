"""The description of a family of decoders: where its parts are, and how each may be divided.

Everything here is plain data, so that a new family is about a dozen lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one module inside a tensor-parallel region is divided.

    Args:
        kind: ``"colwise"`` (each rank computes a share of the output features), ``"rowwise"`` (each rank holds a share
            of the input features; the outputs are summed), ``"shared"`` (whole on every rank, each rank applies it to
            its own share, so that its gradient is a sum over the ranks), ``"divided"`` (its parameters are cut along
            one dim, as its input is), ``"spanning"`` (whole on every rank, and applied to the features of all
            ranks, of which each goes on with its own), ``"partial"`` (like ``"rowwise"``, but the outputs are summed
            only where the region ends), ``"experts"`` (many gated feed-forward layers in two tensors, gate and up
            [experts, 2 x features, hidden] and down [experts, hidden, features], or transposed, whose features are
            divided), ``"own_queries"`` (whole on every rank, which computes the queries of its own heads and the keys
            and values of all, the last of the output features) or ``"counted_once"`` (whole on every rank, inside a
            region whose output is summed at its end, to which each rank gives its part of the output).
        units: the configuration attribute that counts what cannot be cut: attention heads, say. None, or an attribute
            that is None, means that single features may be told apart. One name for each block where they differ.
        blocks: number of equal blocks that the divided features fuse: 3 for query, key and value side by side.
        groups: in how many groups the units are laid out one after the other; each block has the units of one.
        fused: whether a unit is a key/value head together with all that belongs to it, so that it can be neither
            padded nor held by several ranks.
        widths: configuration attributes that say how many features a unit of each block has, where they differ; then
            nothing can be padded.
        dim: the dim of parameters that is cut, of kind ``"divided"``.
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
        """What cannot be cut in each block."""
        return self.units if isinstance(self.units, tuple) else (self.units,) * self.blocks


def colwise(
    *,
    units: str | tuple[str, ...] | None = None,
    blocks: int = 1,
    groups: int = 1,
    fused: bool = False,
    widths: tuple[str, ...] = (),
) -> Style:
    """A projection whose output features are divided."""
    return Style(kind="colwise", units=units, blocks=blocks, groups=groups, fused=fused, widths=widths)


def rowwise(*, units: str | None = None, blocks: int = 1, groups: int = 1) -> Style:
    """A projection whose input features are divided."""
    return Style(kind="rowwise", units=units, blocks=blocks, groups=groups)


def shared() -> Style:
    """A module that every rank holds whole and applies to its own share of heads or features."""
    return Style(kind="shared")


def divided(
    *, units: str | tuple[str, ...] | None = None, blocks: int = 1, widths: tuple[str, ...] = (), dim: int = 0
) -> Style:
    """A parameter, or a module whose parameters are all divided along the same dim."""
    return Style(kind="divided", units=units, blocks=blocks, widths=widths, dim=dim)


def spanning(*, units: str | None = None) -> Style:
    """A module without a division of its own, a norm say, over features that lie on all ranks.

    Args:
        units: what the features belong to; where it is not named, they have to divide evenly.
    """
    return Style(kind="spanning", units=units)


def partial() -> Style:
    """A projection whose input features are divided, inside a region whose output is summed at its end."""
    return Style(kind="partial")


def experts() -> Style:
    """Gated feed-forward layers, their weights stacked, whose features are divided."""
    return Style(kind="experts")


def own_queries(*, units: str) -> Style:
    """A projection to the queries of all heads and then one key and one value head, which all of them read."""
    return Style(kind="own_queries", units=units)


def counted_once() -> Style:
    """A module without a division, an identity say, inside a region whose output is summed at its end."""
    return Style(kind="counted_once")


@dataclass(frozen=True, kw_only=True)
class ArchitecturePlan:
    """What is known about a family of decoders.

    Patterns are FQNs relative to the base model, in which ``*`` stands for one segment.

    Args:
        model_types: the families (``config.model_type``) that this describes.
        blocks: the repeated blocks, in order.
        token_embedding: maps token ids to hidden states.
        further_embeddings: other tables that are looked up by token ids.
        final_norm: the norm after the last block; empty if there is none.
        regions: the modules whose input, ``hidden_states`` of shape [batch, sequence, hidden], enters a tensor-parallel
            region. A region ends in one row-wise projection, or holds parts that are ``"partial"`` or ``"experts"``:
            then what the module returns is summed.
        styles: the modules of the regions that hold parameters, and how each is divided.
        head: FQN, relative to the model around the base model, of the projection to the vocabulary.
        heads, key_value_heads: the configuration attributes that count attention heads and key/value heads; the first
            is a multiple of the second, where there is one.
        per_rank: attributes of modules that count what a rank computes, and what their count follows; ``config.name``
            stands for an entry of the module's own view of the configuration.
        per_head: arguments of modules, [batch x heads, ...] or, of four dims, [batch, heads, ...], of which each rank
            gets those of its heads.
        unsupported: configuration attributes that, when set, make a model that this plan does not cover, and why.
        refused: arguments of a model's forward that are not possible when it is divided, and why.
        whole_if_uneven: regions that stay whole where what these configuration attributes count does not divide by the
            number of ranks.
        sequence: why the family cannot be divided along the sequence; empty if it can.
        variants: configuration attributes, and the plan that holds in place of this one if they are set; the first
            that is set counts.
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
    unsupported: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    whole_if_uneven: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sequence: str = ""
    variants: Mapping[str, ArchitecturePlan] = field(default_factory=dict)

    def of(self, config: Any) -> ArchitecturePlan:
        """The plan of a model with this configuration."""
        return next((plan for name, plan in self.variants.items() if getattr(config, name, None)), self)

    def at(self, degree: int, config: Any) -> ArchitecturePlan:
        """The plan of a model with this configuration over ``degree`` ranks."""
        whole = {
            region
            for region, counts in self.whole_if_uneven.items()
            if any(getattr(config, name) % degree for name in counts)
        }

        def divides(pattern: str) -> bool:
            return not any(pattern == region or pattern.startswith(f"{region}.") for region in whole)

        return replace(
            self,
            regions=tuple(filter(divides, self.regions)),
            styles={pattern: style for pattern, style in self.styles.items() if divides(pattern)},
            per_rank={pattern: counted for pattern, counted in self.per_rank.items() if divides(pattern)},
            whole_if_uneven={},
        )


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` is one of the FQNs that ``pattern`` stands for."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def named_modules(base: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """FQN in ``base`` and module of all that a pattern stands for, in the order of the model; a module of several names
    once."""
    found = [("", base)]
    for segment in pattern.split(".") if pattern else ():
        found = [
            (f"{name}.{child}" if name else child, module)
            for name, parent in found
            for child, module in parent.named_children()
            if child == segment or ("*" in segment and matches(segment, child))
        ]
    first = {module: name for name, module in reversed(found)}
    return [(name, module) for name, module in found if first[module] == name]
