# SPDX-License-Identifier: Apache-2.0
"""Decides how each parameter of a model is sharded, as a pure function of the model and the degree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron_accel.contract import Architecture, Cut, Layout, LayoutError, Style, UnsupportedModelError, join_fqn
from neuron_accel.strategies.tensor_parallel.embedding import is_plain, is_scaled_embedding
from neuron_accel.strategies.tensor_parallel.head_split import HeadSplit, head_splits
from neuron_accel.strategies.tensor_parallel.linear import RowBlock, feature_dims

AXIS = "tp"
"""The mesh axis of tensor parallelism."""

STYLES = frozenset(
    {"colwise", "rowwise", "shared", "sharded", "spanning", "partial", "experts", "own_queries", "counted_once"}
)

_ACTIVATIONS = ("act", "act_fn", "activation_fn", "activation", "activation_func")
"""Names of the activation function in feed-forward modules."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """How one module is sharded.

    Args:
        fqn: the module's FQN.
        module: the module before sharding.
        kind: the kind of a style (:class:`~neuron_accel.models.Style`), ``"own_rows"`` (replicated; each rank computes
            only its output features), ``"embedding"`` or ``"head"``.
        layouts: the layout of each of its own parameters, by the parameter's name in the module.
        rows: for kind ``"own_rows"``, the rows of its weight.
        split: for kind ``"spanning"``, how the heads that its features belong to are split.
    """

    fqn: str
    module: nn.Module
    kind: str
    layouts: dict[str, Layout]
    rows: tuple[RowBlock, ...] = ()
    split: HeadSplit | None = None


def plan_shards(architecture: Architecture, degree: int, *, parallelize_embeddings: bool = True) -> list[ShardPlan]:
    """Returns how tensor parallelism shards every module, without changing the model.

    Args:
        architecture: the model.
        degree: number of ranks of the axis.
        parallelize_embeddings: whether the token embedding and the head are sharded along the vocabulary.

    Raises:
        LayoutError: if heads or features are not divisible by ``degree``.
        UnsupportedModelError: if the model does not match its plan, or a parameter in a region has no style.
    """
    architecture = architecture.at(degree)
    splits = head_splits(architecture, degree)
    shard_plans = [
        _shard_plan(architecture, fqn, module, style, splits, degree) for fqn, module, style in _styled(architecture)
    ]
    shard_plans += _tables(architecture, splits, degree)
    _check_padding(architecture, shard_plans, splits)
    _check_covered(architecture, shard_plans)
    if parallelize_embeddings and architecture.plan.token_embedding:
        shard_plans += _vocabulary(architecture, degree)
    return shard_plans


def _shard_plan(
    architecture: Architecture, fqn: str, module: nn.Module, style: Style, splits: dict[str, HeadSplit], degree: int
) -> ShardPlan:
    if style.kind == "spanning":
        unsharded = {name: Layout.of(parameter) for name, parameter in module.named_parameters()}
        units = style.units_of_blocks[0]
        split = None if units is None else splits.get(units) or splits.get(architecture.plan.heads)
        return ShardPlan(fqn=fqn, module=module, kind=style.kind, layouts=unsharded, split=split)
    rows = _own_rows(architecture, fqn, module, style, splits) if style.kind == "colwise" else ()
    if rows:
        unsharded = {name: Layout.of(parameter) for name, parameter in module.named_parameters()}
        return ShardPlan(fqn=fqn, module=module, kind="own_rows", layouts=unsharded, rows=rows)
    layouts = _layouts(architecture, fqn, module, style, splits, degree)
    return ShardPlan(fqn=fqn, module=module, kind=style.kind, layouts=layouts)


def sizes_of(model: nn.Module, shard_plans: list[ShardPlan]) -> dict[str, int]:
    """Returns the numbers of elements in ``"sharded"`` parameters, in ``"replicated"`` parameters, and on each rank
    (``"local"``). Tied weights are counted once."""
    layouts = {join_fqn(d.fqn, name): layout for d in shard_plans for name, layout in d.layouts.items()}
    sizes = dict.fromkeys(("sharded", "replicated", "local"), 0)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, known in names.items():
        layout = next((layouts[name] for name in known if name in layouts), Layout.of(parameter))
        sizes["sharded" if layout.cuts else "replicated"] += parameter.numel()
        sizes["local"] += math.prod(layout.local_shape)
    return sizes


def _styled(architecture: Architecture) -> Iterator[tuple[str, nn.Module, Style]]:
    for pattern, style in architecture.plan.styles.items():
        found = list(architecture.find(pattern))
        if not found and any(True for _ in _holders(architecture, pattern)):
            continue  # a parameter
        if not found:
            raise UnsupportedModelError(
                f"{type(architecture.owner).__name__} has no module {pattern!r}.",
                where=f"the plan of model type {architecture.model_type!r}",
                why="the model is not built as its model type says",
            )
        for fqn, module in found:
            if style.kind not in STYLES:
                raise UnsupportedModelError(
                    f"The style {style.kind!r} of {fqn!r} is not known.", where=f"plan of {architecture.model_type!r}"
                )
            if style.kind in ("colwise", "rowwise", "partial", "own_queries") and feature_dims(module) is None:
                raise UnsupportedModelError(
                    f"{fqn!r} is a {type(module).__name__}; style {style.kind!r} shards linear layers.",
                    where=type(architecture.owner).__name__,
                    why="a layer with a forward of its own, quantized or wrapped, cannot be sharded like a linear one",
                )
            yield fqn, module, style


def _holders(architecture: Architecture, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Returns FQN and module of the owner of each parameter that a pattern matches."""
    holder, _, name = pattern.rpartition(".")
    return ((fqn, module) for fqn, module in architecture.find(holder) if name in module._parameters)


def _tables(architecture: Architecture, splits: dict[str, HeadSplit], degree: int) -> Iterator[ShardPlan]:
    """Yields the plans of parameters that have a style of their own: sharded along one dim, or shared."""
    for pattern, style in architecture.plan.styles.items():
        name = pattern.rpartition(".")[2]
        if style.kind not in ("sharded", "shared") or any(True for _ in architecture.find(pattern)):
            continue
        for fqn, module in _holders(architecture, pattern):
            layout = Layout.of(getattr(module, name))
            if style.kind == "shared":
                yield ShardPlan(fqn=fqn, module=module, kind="shared", layouts={name: layout})
                continue
            size = layout.shape[style.dim]
            cut = _cut_of(architecture, join_fqn(fqn, name), style, splits, degree, dim=style.dim, size=size)
            yield ShardPlan(fqn=fqn, module=module, kind="sharded", layouts={name: _cut(layout, cut)})


def _layouts(
    architecture: Architecture, fqn: str, module: nn.Module, style: Style, splits: dict[str, HeadSplit], degree: int
) -> dict[str, Layout]:
    unsharded = {name: Layout.of(parameter) for name, parameter in module.named_parameters()}
    dims = feature_dims(module)
    if style.kind == "sharded":
        return {
            name: _cut(
                layout,
                _cut_of(architecture, fqn, style, splits, degree, dim=style.dim, size=layout.shape[style.dim]),
            )
            for name, layout in unsharded.items()
        }
    if style.kind == "experts":
        stacked = _experts(fqn, module, degree)
        return {name: _cut(layout, stacked.get(name)) for name, layout in unsharded.items()}
    if style.kind in ("shared", "spanning", "own_queries", "counted_once") or dims is None:
        return unsharded
    if style.kind == "partial" and module.bias is not None:
        raise UnsupportedModelError(
            f"{fqn!r} has a bias.",
            where=f"the plan of model type {architecture.model_type!r}",
            why="its output is summed over ranks later, and the bias would be counted once for each rank",
        )
    dim = dims.output if style.kind == "colwise" else dims.input
    weight: Any = module.weight
    size = weight.shape[dim]
    found: dict[str, Cut] = {"weight": _cut_of(architecture, fqn, style, splits, degree, dim=dim, size=size)}
    if style.kind == "colwise":
        found["bias"] = _cut_of(architecture, fqn, style, splits, degree, dim=0, size=size)
    return {name: _cut(layout, found.get(name)) for name, layout in unsharded.items()}


def _experts(fqn: str, module: nn.Module, degree: int) -> dict[str, Cut]:
    """Returns the cuts of ``gate_up_proj`` [experts, 2 x features, hidden] and ``down_proj`` [experts, hidden,
    features], or of both transposed, and of the bias of the first. Gate and up are concatenated or interleaved."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    transposed, has_bias = getattr(module, "is_transposed", False), getattr(module, "has_bias", False)
    outer, inner = (2, 1) if transposed else (1, 2)
    gate_up, down = shapes.get("gate_up_proj", ()), shapes.get("down_proj", ())
    expected = {"gate_up_proj", "down_proj", *(("gate_up_proj_bias", "down_proj_bias") if has_bias else ())}
    fits = len(gate_up) == len(down) == 3 and gate_up[outer] == 2 * down[inner] and gate_up[inner] == down[outer]
    if set(shapes) != expected or not fits or not getattr(module, "has_gate", False):
        raise UnsupportedModelError(
            f"The experts {fqn!r} ({type(module).__name__}) have parameters {shapes}.",
            why="only gated experts, gate and up in one tensor [experts, 2 x features, hidden], are sharded",
        )
    features = down[inner]
    if features % degree:
        raise LayoutError(
            f"{fqn!r} has {features} features, not divisible by {degree}.",
            fix="choose a tensor_parallel_size that divides them",
        )
    together: dict[str, Any] = {"blocks": (features, features)} if module.is_concatenated else {"unit": 2}
    cuts = {
        "gate_up_proj": Cut(dim=outer, axis=AXIS, degree=degree, size=2 * features, **together),
        "down_proj": Cut(dim=inner, axis=AXIS, degree=degree, size=features),
    }
    if has_bias:
        cuts["gate_up_proj_bias"] = Cut(dim=1, axis=AXIS, degree=degree, size=2 * features, **together)
    return cuts


def _own_rows(
    architecture: Architecture, fqn: str, module: nn.Module, style: Style, splits: dict[str, HeadSplit]
) -> tuple[RowBlock, ...]:
    """Returns the rows that a rank uses of a weight that fuses heads and key/value heads with different replication or
    units, which a cut cannot describe. Empty if a cut can."""
    if not isinstance(module, nn.Linear) or style.widths or style.groups > 1:
        return ()
    size = module.weight.shape[0]
    sizes, maybe_split = _blocks_of(architecture, fqn, style, splits, size)
    blocks = [split for split in maybe_split if split is not None]
    if len(blocks) < len(maybe_split):
        return ()
    if style.fused:
        return _own_rows_of_groups(size, splits.get(architecture.plan.heads), blocks[0])
    units = {block // split.units for block, split in zip(sizes, blocks, strict=True)}
    if len(units) == 1 and len({split.replicas for split in blocks}) == 1:
        return ()
    starts = itertools.accumulate(sizes, initial=0)
    return tuple(
        RowBlock(start=start, size=block, local=block // split.count * split.local, replicas=split.replicas)
        for start, block, split in zip(starts, sizes, blocks, strict=False)
    )


def _own_rows_of_groups(size: int, heads: HeadSplit | None, groups: HeadSplit) -> tuple[RowBlock, ...]:
    """The same for a weight in which each key/value head follows the queries of its heads (queries, key, value), if
    key/value heads are replicated on several ranks."""
    if groups.replicas == 1 or heads is None:
        return ()
    readers = heads.count // groups.count
    stride = size // groups.count
    width = stride // (readers + 2)
    queries = RowBlock(start=0, size=heads.count * width, local=heads.local * width, run=readers * width, stride=stride)
    one = {"size": groups.count * width, "local": width, "replicas": groups.replicas, "run": width, "stride": stride}
    return queries, RowBlock(start=readers * width, **one), RowBlock(start=(readers + 1) * width, **one)


def _blocks_of(
    architecture: Architecture, fqn: str, style: Style, splits: dict[str, HeadSplit], size: int
) -> tuple[list[int], list[HeadSplit | None]]:
    """Returns the sizes of the fused blocks of a weight's sharded features, and how the units of each block are split.

    Raises:
        UnsupportedModelError: if the features do not consist of such blocks.
    """
    blocks = [splits.get(name) if name else None for name in style.units_of_blocks]
    counts = [split.count if split else 0 for split in blocks]
    total = sum(counts) if all(counts) else 0
    sizes = [size * count // total for count in counts] if total else [size // len(blocks)] * len(blocks)
    if style.widths:
        widths = [getattr(architecture.config, name) for name in style.widths]
        sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    exact = sum(sizes) == size and not any(
        block % split.count for block, split in zip(sizes, blocks, strict=True) if split
    )
    if not exact:
        raise UnsupportedModelError(
            f"{fqn!r} has {size} features along the sharded dim, which are not {len(blocks)} blocks of "
            f"{', '.join(str(count or 'any') for count in counts)} equal units.",
            where=f"the plan of model type {architecture.model_type!r}",
            why="the model is not built as its model type says",
        )
    return sizes, blocks


def _cut_of(
    architecture: Architecture,
    fqn: str,
    style: Style,
    splits: dict[str, HeadSplit],
    degree: int,
    *,
    dim: int,
    size: int,
) -> Cut:
    sizes, blocks = _blocks_of(architecture, fqn, style, splits, size)
    units = {block * style.groups // split.units if split else 1 for block, split in zip(sizes, blocks, strict=True)}
    if style.widths:
        units = {math.gcd(*(getattr(architecture.config, name) for name in style.widths))}
    replicas = {split.replicas if split else 1 for split in blocks}
    no_padding = style.fused or style.widths
    uneven = any(split.padded or split.replicas > 1 for split in blocks if split)
    if len(units) > 1 or len(replicas) > 1 or (no_padding and uneven):
        raise LayoutError(
            f"{fqn!r} fuses {', '.join(f'{s.name} = {s.count}' for s in blocks if s)}, not divisible by {degree}.",
            where=f"{type(architecture.owner).__name__} with tensor_parallel_size={degree}",
            why="heads and key/value heads fused in one weight can be neither padded nor replicated separately",
            fix="choose a tensor_parallel_size that divides both",
        )
    return Cut(
        dim=dim,
        axis=AXIS,
        degree=degree,
        size=size,
        blocks=tuple(sizes),
        unit=units.pop(),
        replicas=replicas.pop(),
        padded=True,
    )


def _check_padding(architecture: Architecture, shard_plans: list[ShardPlan], splits: dict[str, HeadSplit]) -> None:
    """Checks that padding has no effect: zero features must stay zero in a region, and get no gradient."""
    heads = {name for name in (architecture.plan.heads, architecture.plan.key_value_heads) if name in splits}
    uneven_heads = any(splits[name].padded or splits[name].replicas > 1 for name in heads)
    counted = {
        pattern: heads.intersection(style.units_of_blocks) for pattern, style in architecture.plan.styles.items()
    }
    of_heads = {fqn for pattern, names in counted.items() if names for fqn, _ in architecture.find(pattern)}
    regions = architecture.regions
    for shard_plan in shard_plans:
        if shard_plan.kind == "spanning" and shard_plan.split is None and uneven_heads:
            raise _no_padding(architecture, shard_plan.fqn, "it uses the features of all heads at once")
        shares = any(cut.replicas > 1 for layout in shard_plan.layouts.values() for cut in layout.cuts)
        if shares and not isinstance(shard_plan.module, nn.Linear):
            raise _no_padding(
                architecture, shard_plan.fqn, "only linear layers sum gradients over ranks that hold the same"
            )
        if shard_plan.fqn in of_heads or not any(layout.padded for layout in shard_plan.layouts.values()):
            continue
        region = next((module for name, module in regions if shard_plan.fqn.startswith(name + ".")), None)
        activation = next(
            (getattr(region, name) for name in _ACTIVATIONS if callable(getattr(region, name, None))), None
        )
        if activation is None or bool(activation(torch.zeros(1)).any()):
            raise _no_padding(architecture, shard_plan.fqn, "its activation may not map zero to zero")


def _no_padding(architecture: Architecture, fqn: str, why: str) -> LayoutError:
    return LayoutError(
        f"The features of {fqn!r} are not evenly divisible.",
        where=type(architecture.owner).__name__,
        why=f"they cannot be padded: {why}",
        fix="choose a tensor_parallel_size that divides them",
    )


def _cut(layout: Layout, cut: Cut | None) -> Layout:
    return Layout(shape=layout.shape, dtype=layout.dtype, cuts=() if cut is None else (cut,))


def _vocabulary(architecture: Architecture, degree: int) -> Iterator[ShardPlan]:
    tables = [architecture.token_embedding]
    tables += [found for pattern in architecture.plan.further_embeddings for found in architecture.find(pattern)]
    parts: list[tuple[str, tuple[str, nn.Module], type[nn.Module]]]
    parts = [("embedding", table, nn.Embedding) for table in tables]
    if architecture.head is not None:
        parts.append(("head", architecture.head, nn.Linear))
    for kind, (fqn, module), expected in parts:
        if not (is_plain(module, expected) or (kind == "embedding" and is_scaled_embedding(module))):
            raise UnsupportedModelError(
                f"{fqn!r} is a {type(module).__name__}, not a plain {expected.__name__}.",
                where=type(architecture.owner).__name__,
                why="it computes something that a sharded vocabulary would not reproduce",
                fix="keep it unsharded with parallelize_embeddings=False",
            )
        layouts = {
            name: _cut(
                Layout.of(parameter),
                Cut(dim=0, axis=AXIS, degree=degree, size=parameter.shape[0], padded=True),
            )
            for name, parameter in module.named_parameters()
        }
        yield ShardPlan(fqn=fqn, module=module, kind=kind, layouts=layouts)


def _check_covered(architecture: Architecture, shard_plans: list[ShardPlan]) -> None:
    """Checks that every parameter in a region has a style; otherwise its gradient would silently be wrong."""
    covered = {join_fqn(shard_plan.fqn, name) for shard_plan in shard_plans for name in shard_plan.layouts}
    for region, module in architecture.regions:
        for name, _ in module.named_parameters():
            if join_fqn(region, name) not in covered:
                raise UnsupportedModelError(
                    f"The parameter {join_fqn(region, name)!r} has no style.",
                    where=f"the plan of model type {architecture.model_type!r}",
                    why="the style of every parameter in a tensor-parallel region must be known",
                    fix="add a style for its module to the plan",
                )
