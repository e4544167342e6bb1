"""How many heads a rank gets: which divide evenly, which are padded, which several ranks hold."""

from __future__ import annotations

from dataclasses import dataclass

from neuron_accel.contract import LayoutError
from neuron_accel.models.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class HeadSplit:
    """How something countable (heads, groups) is split over the ranks.

    Args:
        name: the configuration attribute that counts it.
        count: how many there are.
        units: of how many indivisible units they are made; heads that share a key/value head may be one.
        degree: number of ranks.
        replicas: number of neighbouring ranks that hold the same.
    """

    name: str
    count: int
    units: int
    degree: int
    replicas: int = 1

    @property
    def parts(self) -> int:
        return self.degree // self.replicas

    @property
    def padded(self) -> bool:
        """Whether some ranks hold units that the model does not have."""
        return self.units % self.parts != 0

    @property
    def local(self) -> int:
        """How many each rank has, padding included."""
        return -(-self.units // self.parts) * (self.count // self.units)


def head_splits(architecture: Architecture, degree: int) -> dict[str, HeadSplit]:
    """How everything that a plan counts is split, by configuration attribute. Attributes that the configuration lacks
    are left out.

    Heads that do not divide are padded with heads that compute nothing; more ranks than key/value heads hold them
    several times.

    Raises:
        LayoutError: if there are fewer heads than ranks, or heads and key/value heads cannot be divided together.
    """
    plan, config = architecture.plan, architecture.config
    names = {name for style in plan.styles.values() for name in style.units_of_blocks if name}
    names |= {name for counted in plan.per_rank.values() for name in counted.values()}
    counts = {name: getattr(config, name, None) for name in sorted(names)}
    splits = {
        name: HeadSplit(name=name, count=count, units=count, degree=degree) for name, count in counts.items() if count
    }
    heads = splits.get(plan.heads)
    groups = splits.get(plan.key_value_heads)
    if heads is not None and groups is not None:
        splits[heads.name], splits[groups.name] = _together(architecture, heads, groups)
    elif heads is not None and heads.count < degree:
        raise _too_many(architecture, heads, degree)
    return splits


def _together(architecture: Architecture, heads: HeadSplit, groups: HeadSplit) -> tuple[HeadSplit, HeadSplit]:
    degree = heads.degree
    if heads.count < degree or heads.count % groups.count:
        raise _too_many(architecture, heads, degree)
    if groups.count % degree == 0:
        return heads, groups
    if degree % groups.count == 0:
        if heads.count % degree:
            raise _too_many(architecture, heads, degree)
        replicated = HeadSplit(
            name=groups.name, count=groups.count, units=groups.count, degree=degree, replicas=degree // groups.count
        )
        return heads, replicated
    if groups.count < degree:
        raise _too_many(architecture, groups, degree)
    # A key/value head and the heads that read it stay together, and are padded together.
    return HeadSplit(name=heads.name, count=heads.count, units=groups.count, degree=degree), groups


def _too_many(architecture: Architecture, split: HeadSplit, degree: int) -> LayoutError:
    heads = getattr(architecture.config, architecture.plan.heads)
    legal = [str(n) for n in range(1, heads + 1) if heads % n == 0 and _fits(architecture, n)]
    return LayoutError(
        f"{split.name} = {split.count} does not divide by {degree}.",
        where=f"{type(architecture.owner).__name__} with tensor_parallel_size={degree}",
        why="every rank computes whole heads, as many as the others, together with the key/value heads that they read",
        fix=f"choose tensor_parallel_size from: {', '.join(legal)}",
    )


def _fits(architecture: Architecture, degree: int) -> bool:
    groups = getattr(architecture.config, architecture.plan.key_value_heads, None)
    return not groups or groups % degree == 0 or degree % groups == 0
