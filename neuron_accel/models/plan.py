"""The description of a family of decoders: where its parts are, and how each may be divided.

Everything here is plain data, so that a new family is about a dozen lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one module inside a tensor-parallel region is divided.

    Args:
        kind: ``"colwise"`` (each rank computes a share of the output features), ``"rowwise"`` (each rank holds a share
            of the input features; the outputs are summed) or ``"shared"`` (whole on every rank, each rank applies it to
            its own share, so that its gradient is a sum over the ranks).
        units: the configuration attribute that counts what cannot be cut: attention heads, say. None, or an attribute
            that is None, means that single features may be told apart.
        blocks: number of equal blocks that the divided features fuse: 3 for query, key and value side by side.
    """

    kind: str
    units: str | None = None
    blocks: int = 1


def colwise(*, units: str | None = None, blocks: int = 1) -> Style:
    """A projection whose output features are divided."""
    return Style(kind="colwise", units=units, blocks=blocks)


def rowwise(*, units: str | None = None) -> Style:
    """A projection whose input features are divided."""
    return Style(kind="rowwise", units=units)


def shared() -> Style:
    """A module that every rank holds whole and applies to its own share of heads or features."""
    return Style(kind="shared")


@dataclass(frozen=True, kw_only=True)
class ArchitecturePlan:
    """What is known about a family of decoders.

    Patterns are FQNs relative to the base model, in which ``*`` stands for one segment.

    Args:
        model_types: the families (``config.model_type``) that this describes.
        blocks: the repeated blocks, in order.
        token_embedding: maps token ids to hidden states.
        final_norm: the norm after the last block.
        regions: the modules whose input, ``hidden_states`` of shape [batch, sequence, hidden], enters a tensor-parallel
            region. A region ends in one row-wise projection.
        styles: the modules of the regions that hold parameters, and how each is divided.
        head: FQN, relative to the model around the base model, of the projection to the vocabulary.
        per_rank: attributes of modules that count what a rank computes, and are therefore divided by the degree.
        unsupported: configuration attributes that, when set, make a model that this plan does not cover, and why.
    """

    model_types: tuple[str, ...]
    blocks: str
    token_embedding: str
    final_norm: str
    regions: tuple[str, ...]
    styles: Mapping[str, Style]
    head: str = "lm_head"
    per_rank: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` is one of the FQNs that ``pattern`` stands for."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None
