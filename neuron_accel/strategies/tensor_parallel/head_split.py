# SPDX-License-Identifier: Apache-2.0
"""How heads are split over ranks: evenly, padded, or replicated on several ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from neuron_accel.contract.families import Architecture
from neuron_accel.errors import LayoutError


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """How the heads or groups of a model are split over the ranks.

    Args:
        name: the configuration attribute with their number.
        count: number of heads or groups.
        units: number of indivisible units that they form; heads that share a key/value head may be one unit.
        degree: number of ranks.
        replicas: number of neighbouring ranks that hold the same heads.
        groups: number of groups in which the weights lay them out, see :class:`~neuron_accel.models.Style`.
    """

    name: str
    count: int
    units: int
    degree: int
    replicas: int = 1
    groups: int = 1

    @property
    def shards(self) -> int:
        return self.degree // self.replicas

    @property
    def padded(self) -> bool:
        """Whether some ranks hold units that the model does not have."""
        return self.units % (self.shards * self.groups) != 0

    @property
    def local(self) -> int:
        """Number of heads of each rank, padding included."""
        return -(-self.units // (self.shards * self.groups)) * self.groups * (self.count // self.units)


def head_splits(architecture: Architecture, degree: int) -> dict[str, HeadSplit]:
    """Returns how the heads and groups that a plan counts are split, by configuration attribute. Attributes that the
    configuration does not have are left out.

    If their number is not divisible, heads are padded with heads of zero weights. Key/value heads are replicated on
    several ranks if there are more ranks than heads.

    Raises:
        LayoutError: if there are fewer heads than ranks, or heads and key/value heads cannot be sharded together.
    """
    plan, config = architecture.plan, architecture.config
    names = {name for style in plan.styles.values() for name in style.units_of_blocks if name}
    names |= {name for counted in plan.per_rank.values() for name in counted.values()}
    counts = {name: getattr(config, name, None) for name in sorted(names)}
    splits = {
        name: HeadSplit(name=name, count=count, units=count, degree=degree, groups=_groups(architecture, name))
        for name, count in counts.items()
        if count
    }
    heads = splits.get(plan.heads)
    groups = splits.get(plan.key_value_heads)
    if heads is not None and groups is not None:
        splits[heads.name], splits[groups.name] = _together(architecture, heads, groups)
    elif heads is not None and heads.count < degree * heads.groups:
        raise _too_many(architecture, heads, degree)
    return splits


def _groups(architecture: Architecture, name: str) -> int:
    """Returns the number of groups in which weights lay out the units that a configuration attribute counts."""
    return max((s.groups for s in architecture.plan.styles.values() if name in s.units_of_blocks), default=1)


def _together(architecture: Architecture, heads: HeadSplit, groups: HeadSplit) -> tuple[HeadSplit, HeadSplit]:
    degree, layout = heads.degree, heads.groups
    shared = groups.count // layout
    if heads.count < degree * layout or heads.count % groups.count or groups.count % layout:
        raise _too_many(architecture, heads, degree)
    if shared % degree == 0:
        return heads, groups
    if degree % shared == 0:
        if heads.count // layout % degree:
            raise _too_many(architecture, heads, degree)
        return heads, replace(groups, replicas=degree // shared)
    if shared < degree:
        raise _too_many(architecture, groups, degree)
    # A key/value head and the heads that use it form a unit, and are padded together.
    return replace(heads, units=groups.count), groups


def _too_many(architecture: Architecture, split: HeadSplit, degree: int) -> LayoutError:
    heads = getattr(architecture.config, architecture.plan.heads) // split.groups
    legal = [str(n) for n in range(1, heads + 1) if heads % n == 0 and _fits(architecture, n, split.groups)]
    what, why = f"{split.name} = {split.count} is not divisible by {degree}.", ""
    if split.groups > 1:
        each = split.count // split.groups
        what = f"{split.name} = {split.count} cannot be sharded over {degree} ranks."
        why = (
            f"; the model lays heads out in {split.groups} groups of {each}, of each of which every rank computes some"
        )
    return LayoutError(
        what,
        where=f"{type(architecture.owner).__name__} with tensor_parallel_size={degree}",
        why=f"every rank computes the same number of heads, together with the key/value heads that they read{why}",
        fix=f"choose tensor_parallel_size from: {', '.join(legal)}",
    )


def _fits(architecture: Architecture, degree: int, layout: int) -> bool:
    groups = (getattr(architecture.config, architecture.plan.key_value_heads, None) or 0) // layout
    return not groups or groups % degree == 0 or degree % groups == 0
