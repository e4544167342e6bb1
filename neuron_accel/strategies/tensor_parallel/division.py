"""Which parameter of a model is cut where: a pure function of the model and the degree."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from neuron_accel.engine.errors import LayoutError, UnsupportedModelError
from neuron_accel.engine.layout import Cut, Layout
from neuron_accel.models.architecture import Architecture, join
from neuron_accel.models.plan import Style
from neuron_accel.strategies.tensor_parallel.linear import feature_dims

AXIS = "tp"
"""The mesh axis of tensor parallelism."""


@dataclass(frozen=True, kw_only=True)
class Division:
    """What becomes of one module.

    Args:
        fqn: the module's FQN.
        module: the module as it is.
        kind: ``"colwise"``, ``"rowwise"``, ``"shared"``, ``"embedding"`` or ``"head"``.
        layouts: how each of its own parameters will lie, by the parameter's name in the module.
    """

    fqn: str
    module: nn.Module
    kind: str
    layouts: dict[str, Layout]


@dataclass(frozen=True, kw_only=True)
class _Requirement:
    """``count`` of something called ``name`` must divide by the degree."""

    name: str
    count: int


def divide(architecture: Architecture, degree: int, *, parallelize_embeddings: bool = True) -> list[Division]:
    """Decides what becomes of every module that tensor parallelism touches. Changes nothing.

    Args:
        architecture: the model.
        degree: number of ranks of the axis.
        parallelize_embeddings: whether the token embedding and the head are divided along the vocabulary.

    Raises:
        LayoutError: if heads or features do not divide by ``degree``.
        UnsupportedModelError: if the model is not built as its plan says, or a parameter of a region has no style.
    """
    styled = list(_styled(architecture))
    _check_divisible(architecture, [r for _, m, s in styled if (r := _requirement(architecture, m, s))], degree)
    divisions = [
        Division(fqn=fqn, module=module, kind=style.kind, layouts=_layouts(architecture, fqn, module, style, degree))
        for fqn, module, style in styled
    ]
    _check_covered(architecture, divisions)
    if parallelize_embeddings:
        divisions += _vocabulary(architecture, degree)
    return divisions


def _styled(architecture: Architecture) -> Iterator[tuple[str, nn.Module, Style]]:
    for pattern, style in architecture.plan.styles.items():
        found = list(architecture.find(pattern))
        if not found:
            raise UnsupportedModelError(
                f"{type(architecture.owner).__name__} has no module {pattern!r}.",
                where=f"the plan of model type {architecture.model_type!r}",
                why="the model is not built as its model type says",
            )
        for fqn, module in found:
            if style.kind not in ("colwise", "rowwise", "shared"):
                raise UnsupportedModelError(
                    f"The style {style.kind!r} of {fqn!r} is not known.", where=f"plan of {architecture.model_type!r}"
                )
            if style.kind != "shared" and feature_dims(module) is None:
                raise UnsupportedModelError(
                    f"{fqn!r} is a {type(module).__name__}; style {style.kind!r} divides linear layers.",
                    where=type(architecture.owner).__name__,
                    why="a layer with a forward of its own, quantized or wrapped, cannot be divided like a linear one",
                )
            yield fqn, module, style


def _requirement(architecture: Architecture, module: nn.Module, style: Style) -> _Requirement | None:
    size = _divided_size(module, style)
    if size is None:
        return None
    count = getattr(architecture.config, style.units, None) if style.units else None
    if count is None:
        side = "output" if style.kind == "colwise" else "input"
        return _Requirement(name=f"the number of {side} features", count=size // style.blocks)
    return _Requirement(name=str(style.units), count=count)


def _divided_size(module: nn.Module, style: Style) -> int | None:
    dims = feature_dims(module)
    if style.kind == "shared" or dims is None:
        return None
    return module.weight.shape[dims.output if style.kind == "colwise" else dims.input]


def _check_divisible(architecture: Architecture, requirements: list[_Requirement], degree: int) -> None:
    failing = {r.name: r.count for r in requirements if r.count % degree}
    if failing:
        common = math.gcd(*(r.count for r in requirements))
        legal = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise LayoutError(
            "; ".join(f"{name} = {count} does not divide by {degree}" for name, count in failing.items()) + ".",
            where=f"{type(architecture.owner).__name__} with tensor_parallel_size={degree}",
            why="every rank computes whole heads, and the same number of heads and features as the others",
            fix=f"choose tensor_parallel_size from: {', '.join(legal)}",
        )


def _layouts(architecture: Architecture, fqn: str, module: nn.Module, style: Style, degree: int) -> dict[str, Layout]:
    whole = {name: Layout.of(parameter) for name, parameter in module.named_parameters()}
    dims, size = feature_dims(module), _divided_size(module, style)
    if style.kind == "shared" or dims is None or size is None:
        return whole
    count = (getattr(architecture.config, style.units, None) if style.units else None) or size // style.blocks
    block = size // style.blocks
    if size % style.blocks or block % count:
        raise UnsupportedModelError(
            f"{fqn!r} has {size} features along the divided dim, which are not {style.blocks} blocks of {count} equal "
            "units.",
            where=f"the plan of model type {architecture.model_type!r}",
            why="the model is not built as its model type says",
        )
    dim = dims.output if style.kind == "colwise" else dims.input
    blocks = (block,) * style.blocks
    cuts = {"weight": Cut(dim=dim, axis=AXIS, degree=degree, size=size, blocks=blocks, unit=block // count)}
    if style.kind == "colwise":
        cuts["bias"] = Cut(dim=0, axis=AXIS, degree=degree, size=size, blocks=blocks, unit=block // count)
    return {name: _cut(layout, cuts.get(name)) for name, layout in whole.items()}


def _cut(layout: Layout, cut: Cut | None) -> Layout:
    return Layout(shape=layout.shape, dtype=layout.dtype, cuts=() if cut is None else (cut,))


def _vocabulary(architecture: Architecture, degree: int) -> Iterator[Division]:
    parts = [("embedding", architecture.token_embedding, nn.Embedding)]
    if architecture.head is not None:
        parts.append(("head", architecture.head, nn.Linear))
    for kind, (fqn, module), expected in parts:
        if type(module).forward is not expected.forward or "forward" in vars(module):
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
        yield Division(fqn=fqn, module=module, kind=kind, layouts=layouts)


def _check_covered(architecture: Architecture, divisions: list[Division]) -> None:
    """A parameter of a region that is neither cut nor declared shared would get a wrong gradient, silently."""
    covered = {join(division.fqn, name) for division in divisions for name in division.layouts}
    for region, module in architecture.regions:
        for name, _ in module.named_parameters():
            if join(region, name) not in covered:
                raise UnsupportedModelError(
                    f"Nothing is known about the parameter {join(region, name)!r}.",
                    where=f"the plan of model type {architecture.model_type!r}",
                    why="inside a tensor-parallel region it has to be said how a parameter is divided",
                    fix="add a style for its module to the plan",
                )
