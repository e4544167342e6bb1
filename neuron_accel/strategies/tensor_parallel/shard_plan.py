"""Which parameter of a model is sharded along which dim: a pure function of the model and the degree."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuron_accel.contract import Cut, Layout, LayoutError, UnsupportedModelError
from neuron_accel.models.architecture import Architecture, join
from neuron_accel.models.plan import Style
from neuron_accel.strategies.tensor_parallel.embedding import is_plain, is_scaled_embedding
from neuron_accel.strategies.tensor_parallel.head_split import HeadSplit, head_splits
from neuron_accel.strategies.tensor_parallel.linear import RowBlock, feature_dims

AXIS = "tp"
"""The mesh axis of tensor parallelism."""

STYLES = frozenset(
    {"colwise", "rowwise", "shared", "divided", "spanning", "partial", "experts", "own_queries", "counted_once"}
)

_ACTIVATIONS = ("act", "act_fn", "activation_fn", "activation", "activation_func")
"""What models call the function between their feed-forward layers."""


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What becomes of one module.

    Args:
        fqn: the module's FQN.
        module: the module as it is.
        kind: a style's (:class:`~neuron_accel.models.Style`), ``"own_rows"`` (whole on every rank, which computes the
            output features that it needs), ``"embedding"`` or ``"head"``.
        layouts: how each of its own parameters will lie, by the parameter's name in the module.
        rows: of kind ``"own_rows"``, the rows of its weight.
        split: of kind ``"spanning"``, how the heads that its features belong to are split.
    """

    fqn: str
    module: nn.Module
    kind: str
    layouts: dict[str, Layout]
    rows: tuple[RowBlock, ...] = ()
    split: HeadSplit | None = None


def divide(architecture: Architecture, degree: int, *, parallelize_embeddings: bool = True) -> list[ShardPlan]:
    """Decides what becomes of every module that tensor parallelism touches. Changes nothing.

    Args:
        architecture: the model.
        degree: number of ranks of the axis.
        parallelize_embeddings: whether the token embedding and the head are divided along the vocabulary.

    Raises:
        LayoutError: if heads or features do not divide by ``degree``.
        UnsupportedModelError: if the model is not built as its plan says, or a parameter of a region has no style.
    """
    architecture = architecture.at(degree)
    splits = head_splits(architecture, degree)
    shard_plans = [
        _shard_plan(architecture, fqn, module, style, splits, degree) for fqn, module, style in _styled(architecture)
    ]
    shard_plans += _tables(architecture, splits, degree)
    _check_padding(architecture, shard_plans, splits)
    _check_covered(architecture, shard_plans)
    if parallelize_embeddings:
        shard_plans += _vocabulary(architecture, degree)
    return shard_plans


def _shard_plan(
    architecture: Architecture, fqn: str, module: nn.Module, style: Style, splits: dict[str, HeadSplit], degree: int
) -> ShardPlan:
    if style.kind == "spanning":
        whole = {name: Layout.of(parameter) for name, parameter in module.named_parameters()}
        units = style.units_of_blocks[0]
        split = None if units is None else splits.get(units) or splits.get(architecture.plan.heads)
        return ShardPlan(fqn=fqn, module=module, kind=style.kind, layouts=whole, split=split)
    rows = _own_rows(architecture, fqn, module, style, splits) if style.kind == "colwise" else ()
    if rows:
        whole = {name: Layout.of(parameter) for name, parameter in module.named_parameters()}
        return ShardPlan(fqn=fqn, module=module, kind="own_rows", layouts=whole, rows=rows)
    layouts = _layouts(architecture, fqn, module, style, splits, degree)
    return ShardPlan(fqn=fqn, module=module, kind=style.kind, layouts=layouts)


def sizes_of(model: nn.Module, shard_plans: list[ShardPlan]) -> dict[str, int]:
    """Numbers of elements, tied weights counted once: of parameters that are ``"divided"``, of those that are
    ``"whole"`` on every rank, and those of both that are ``"local"`` to each."""
    layouts = {join(d.fqn, name): layout for d in shard_plans for name, layout in d.layouts.items()}
    sizes = dict.fromkeys(("divided", "whole", "local"), 0)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, known in names.items():
        layout = next((layouts[name] for name in known if name in layouts), Layout.of(parameter))
        sizes["divided" if layout.cuts else "whole"] += parameter.numel()
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
                    f"{fqn!r} is a {type(module).__name__}; style {style.kind!r} divides linear layers.",
                    where=type(architecture.owner).__name__,
                    why="a layer with a forward of its own, quantized or wrapped, cannot be divided like a linear one",
                )
            yield fqn, module, style


def _holders(architecture: Architecture, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """FQN and module of what holds a parameter that a pattern names."""
    holder, _, name = pattern.rpartition(".")
    return ((fqn, module) for fqn, module in architecture.find(holder) if name in module._parameters)


def _tables(architecture: Architecture, splits: dict[str, HeadSplit], degree: int) -> Iterator[ShardPlan]:
    """Parameters that have a style of their own: divided along one dim, or shared."""
    for pattern, style in architecture.plan.styles.items():
        name = pattern.rpartition(".")[2]
        if style.kind not in ("divided", "shared") or any(True for _ in architecture.find(pattern)):
            continue
        for fqn, module in _holders(architecture, pattern):
            layout = Layout.of(getattr(module, name))
            if style.kind == "shared":
                yield ShardPlan(fqn=fqn, module=module, kind="shared", layouts={name: layout})
                continue
            size = layout.shape[style.dim]
            cut = _cut_of(architecture, join(fqn, name), style, splits, degree, dim=style.dim, size=size)
            yield ShardPlan(fqn=fqn, module=module, kind="divided", layouts={name: _cut(layout, cut)})


def _layouts(
    architecture: Architecture, fqn: str, module: nn.Module, style: Style, splits: dict[str, HeadSplit], degree: int
) -> dict[str, Layout]:
    whole = {name: Layout.of(parameter) for name, parameter in module.named_parameters()}
    dims = feature_dims(module)
    if style.kind == "divided":
        return {
            name: _cut(
                layout,
                _cut_of(architecture, fqn, style, splits, degree, dim=style.dim, size=layout.shape[style.dim]),
            )
            for name, layout in whole.items()
        }
    if style.kind == "experts":
        stacked = _experts(fqn, module, degree)
        return {name: _cut(layout, stacked.get(name)) for name, layout in whole.items()}
    if style.kind in ("shared", "spanning", "own_queries", "counted_once") or dims is None:
        return whole
    if style.kind == "partial" and module.bias is not None:
        raise UnsupportedModelError(
            f"{fqn!r} has a bias.",
            where=f"the plan of model type {architecture.model_type!r}",
            why="its output is summed later, and the bias would count on every rank",
        )
    dim = dims.output if style.kind == "colwise" else dims.input
    weight: Any = module.weight
    size = weight.shape[dim]
    found: dict[str, Cut] = {"weight": _cut_of(architecture, fqn, style, splits, degree, dim=dim, size=size)}
    if style.kind == "colwise":
        found["bias"] = _cut_of(architecture, fqn, style, splits, degree, dim=0, size=size)
    return {name: _cut(layout, found.get(name)) for name, layout in whole.items()}


def _experts(fqn: str, module: nn.Module, degree: int) -> dict[str, Cut]:
    """The cuts of ``gate_up_proj`` [experts, 2 x features, hidden] and ``down_proj`` [experts, hidden, features], or of
    both transposed, and of the first one's bias. Gate and up lie one after the other, or in turn."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    transposed, has_bias = getattr(module, "is_transposed", False), getattr(module, "has_bias", False)
    outer, inner = (2, 1) if transposed else (1, 2)
    gate_up, down = shapes.get("gate_up_proj", ()), shapes.get("down_proj", ())
    expected = {"gate_up_proj", "down_proj", *(("gate_up_proj_bias", "down_proj_bias") if has_bias else ())}
    fits = len(gate_up) == len(down) == 3 and gate_up[outer] == 2 * down[inner] and gate_up[inner] == down[outer]
    if set(shapes) != expected or not fits or not getattr(module, "has_gate", False):
        raise UnsupportedModelError(
            f"The experts {fqn!r} ({type(module).__name__}) have parameters {shapes}.",
            why="only gated experts, gate and up in one tensor [experts, 2 x features, hidden], are divided",
        )
    features = down[inner]
    if features % degree:
        raise LayoutError(
            f"{fqn!r} has {features} features, which do not divide by {degree}.",
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
    """The rows that a rank needs of a weight that fuses heads and key/value heads which ranks do not hold equally often
    or in equal units, so that no cut gives each rank its own. Empty where a cut does."""
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
    """The same of a weight in which each key/value head is laid out with the heads that read it, first queries, then
    key, then value, where several ranks hold one."""
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
    """Sizes of the blocks that the divided features of a weight fuse, and how what each consists of is divided.

    Raises:
        UnsupportedModelError: if the features are no such blocks.
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
            f"{fqn!r} has {size} features along the divided dim, which are not {len(blocks)} blocks of "
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
    uneven = any(split.units // style.groups % split.parts or split.units % style.groups for split in blocks if split)
    whole_only = style.fused or style.groups > 1 or style.widths
    if len(units) > 1 or len(replicas) > 1 or (whole_only and (uneven or replicas != {1})):
        raise LayoutError(
            f"{fqn!r} fuses {', '.join(f'{s.name} = {s.count}' for s in blocks if s)}, not divisible by {degree}.",
            where=f"{type(architecture.owner).__name__} with tensor_parallel_size={degree}",
            why="in one weight, heads and key/value heads can be neither padded nor held several times apart",
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
    """Padding must compute nothing: zero features stay zero on their way through a region, and get no gradient."""
    heads = {name for name in (architecture.plan.heads, architecture.plan.key_value_heads) if name in splits}
    uneven_heads = any(splits[name].padded or splits[name].replicas > 1 for name in heads)
    counted = {
        pattern: heads.intersection(style.units_of_blocks) for pattern, style in architecture.plan.styles.items()
    }
    of_heads = {fqn for pattern, names in counted.items() if names for fqn, _ in architecture.find(pattern)}
    for shard_plan in shard_plans:
        if shard_plan.kind == "spanning" and shard_plan.split is None and uneven_heads:
            raise _no_padding(architecture, shard_plan.fqn, "it looks at the features of all heads at once")
        if any(layout.replicas > 1 for layout in shard_plan.layouts.values()) and not isinstance(
            shard_plan.module, nn.Linear
        ):
            raise _no_padding(
                architecture, shard_plan.fqn, "only linear layers sum gradients over ranks that hold the same"
            )
        if shard_plan.fqn in of_heads or not any(layout.padded for layout in shard_plan.layouts.values()):
            continue
        region = _region_around(architecture, shard_plan.fqn)
        activation = next(
            (getattr(region, name) for name in _ACTIVATIONS if callable(getattr(region, name, None))), None
        )
        if activation is None or bool(activation(torch.zeros(1)).any()):
            raise _no_padding(architecture, shard_plan.fqn, "what its activation makes of zero is not known to be zero")


def _region_around(architecture: Architecture, fqn: str) -> nn.Module | None:
    inside = [module for name, module in architecture.regions if fqn.startswith(name + ".")]
    return inside[0] if inside else None


def _no_padding(architecture: Architecture, fqn: str, why: str) -> LayoutError:
    return LayoutError(
        f"The features of {fqn!r} do not divide evenly.",
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
                why="it computes something that dividing the vocabulary would not reproduce",
                fix="leave it whole with parallelize_embeddings=False",
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
    """A parameter of a region that is neither cut nor declared shared would get a wrong gradient, silently."""
    covered = {join(shard_plan.fqn, name) for shard_plan in shard_plans for name in shard_plan.layouts}
    for region, module in architecture.regions:
        for name, _ in module.named_parameters():
            if join(region, name) not in covered:
                raise UnsupportedModelError(
                    f"Nothing is known about the parameter {join(region, name)!r}.",
                    where=f"the plan of model type {architecture.model_type!r}",
                    why="inside a tensor-parallel region it has to be said how a parameter is divided",
                    fix="add a style for its module to the plan",
                )
