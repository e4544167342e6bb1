# SPDX-License-Identifier: Apache-2.0
"""Decides how each parameter of a model is sharded, as a pure function of the model and the degree."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn

from neuron_accel.contract import Layout
from neuron_accel.contract.families import Architecture, Style, join_fqn
from neuron_accel.errors import LayoutError, UnsupportedModelError
from neuron_accel.strategies.tensor_parallel.cuts import Cuts
from neuron_accel.strategies.tensor_parallel.embedding import is_plain, is_scaled_embedding
from neuron_accel.strategies.tensor_parallel.linear import feature_dims
from neuron_accel.strategies.tensor_parallel.styles import (
    STYLES,
    ModuleStyle,
    Sharded,
    Shared,
    Spanning,
    VocabularyEmbedding,
    VocabularyHead,
)

_ACTIVATIONS = ("act", "act_fn", "activation_fn", "activation", "activation_func")
"""Names of the activation function in feed-forward modules."""


def plan_shards(architecture: Architecture, degree: int, *, parallelize_embeddings: bool = True) -> list[ModuleStyle]:
    """Returns how tensor parallelism shards every module, without changing the model.

    Args:
        architecture: the model.
        degree: number of ranks of the axis.
        parallelize_embeddings: whether the token embedding and the head are sharded along the vocabulary.

    Raises:
        LayoutError: if heads or features are not divisible by ``degree``.
        UnsupportedModelError: if the model does not match its plan, or a parameter in a region has no style.
    """
    cuts = Cuts(architecture.at(degree), degree)
    styles = [*_styled(cuts)]
    _check_padding(cuts, styles)
    _check_covered(cuts.architecture, styles)
    if parallelize_embeddings and architecture.plan.token_embedding:
        styles += _vocabulary(cuts)
    return styles


def sizes_of(model: nn.Module, styles: list[ModuleStyle]) -> dict[str, int]:
    """Returns the numbers of elements in ``"sharded"`` parameters, in ``"replicated"`` parameters, and on each rank
    (``"local"``). Tied weights are counted once."""
    layouts = {join_fqn(each.fqn, name): layout for each in styles for name, layout in each.layouts.items()}
    sizes = dict.fromkeys(("sharded", "replicated", "local"), 0)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, known in names.items():
        layout = next((layouts[name] for name in known if name in layouts), Layout.of(parameter))
        sizes["sharded" if layout.cuts else "replicated"] += parameter.numel()
        sizes["local"] += math.prod(layout.local_shape)
    return sizes


def _styled(cuts: Cuts) -> Iterator[ModuleStyle]:
    """Yields the styles of modules, then those of parameters that have a style of their own."""
    architecture = cuts.architecture
    of_parameters: list[ModuleStyle] = []
    for pattern, style in architecture.plan.styles.items():
        found, cls = list(architecture.find(pattern)), STYLES.get(style.kind)
        if cls is None:
            fqn = found[0][0] if found else pattern
            raise UnsupportedModelError(
                f"The style {style.kind!r} of {fqn!r} is not known.", where=f"plan of {architecture.model_type!r}"
            )
        for fqn, module in found:
            if cls.of_linear and feature_dims(module) is None:
                raise UnsupportedModelError(
                    f"{fqn!r} is a {type(module).__name__}; style {style.kind!r} shards linear layers.",
                    where=type(architecture.owner).__name__,
                    why="a layer with a forward of its own, quantized or wrapped, cannot be sharded like a linear one",
                )
            yield cls.of(cuts, fqn, module, style, _layouts(module))
        if found:
            continue
        holder, _, name = pattern.rpartition(".")
        holders = [(fqn, module) for fqn, module in architecture.find(holder) if name in module._parameters]
        if not holders:
            raise UnsupportedModelError(
                f"{type(architecture.owner).__name__} has no module {pattern!r}.",
                where=f"the plan of model type {architecture.model_type!r}",
                why="the model is not built as its model type says",
            )
        of_parameters += [
            cls.of(cuts, fqn, module, style, {name: Layout.of(getattr(module, name))})
            for fqn, module in holders
            if cls in (Shared, Sharded)
        ]
    yield from of_parameters


def _check_padding(cuts: Cuts, styles: list[ModuleStyle]) -> None:
    """Checks that padding has no effect: zero features must stay zero in a region, and get no gradient."""
    architecture, splits = cuts.architecture, cuts.splits
    heads = {name for name in (architecture.plan.heads, architecture.plan.key_value_heads) if name in splits}
    uneven_heads = any(splits[name].padded or splits[name].replicas > 1 for name in heads)
    counted = {pattern: heads.intersection(each.units_of_blocks) for pattern, each in architecture.plan.styles.items()}
    of_heads = {fqn for pattern, names in counted.items() if names for fqn, _ in architecture.find(pattern)}
    regions = architecture.regions
    for style in styles:
        if isinstance(style, Spanning) and style.split is None and uneven_heads:
            raise _no_padding(architecture, style.fqn, "it uses the features of all heads at once")
        shares = any(cut.replicas > 1 for layout in style.layouts.values() for cut in layout.cuts)
        if shares and not isinstance(style.module, nn.Linear):
            raise _no_padding(architecture, style.fqn, "only linear layers sum gradients over ranks that hold the same")
        if style.fqn in of_heads or not any(layout.padded for layout in style.layouts.values()):
            continue
        region = next((module for name, module in regions if style.fqn.startswith(name + ".")), None)
        activation = next(
            (getattr(region, name) for name in _ACTIVATIONS if callable(getattr(region, name, None))), None
        )
        if activation is None or bool(activation(torch.zeros(1)).any()):
            raise _no_padding(architecture, style.fqn, "its activation may not map zero to zero")


def _no_padding(architecture: Architecture, fqn: str, why: str) -> LayoutError:
    return LayoutError(
        f"The features of {fqn!r} are not evenly divisible.",
        where=type(architecture.owner).__name__,
        why=f"they cannot be padded: {why}",
        fix="choose a tensor_parallel_size that divides them",
    )


def _vocabulary(cuts: Cuts) -> Iterator[ModuleStyle]:
    architecture = cuts.architecture
    tables = [architecture.token_embedding]
    tables += [found for pattern in architecture.plan.further_embeddings for found in architecture.find(pattern)]
    parts: list[tuple[type[VocabularyEmbedding], type[nn.Module], tuple[str, nn.Module]]]
    parts = [(VocabularyEmbedding, nn.Embedding, table) for table in tables]
    if architecture.head is not None:
        parts.append((VocabularyHead, nn.Linear, architecture.head))
    for cls, expected, (fqn, module) in parts:
        if not (is_plain(module, expected) or (cls is VocabularyEmbedding and is_scaled_embedding(module))):
            raise UnsupportedModelError(
                f"{fqn!r} is a {type(module).__name__}, not a plain {expected.__name__}.",
                where=type(architecture.owner).__name__,
                why="it computes something that a sharded vocabulary would not reproduce",
                fix="keep it unsharded with parallelize_embeddings=False",
            )
        yield cls.of(cuts, fqn, module, Style(kind=cls.kind), _layouts(module))


def _layouts(module: nn.Module) -> dict[str, Layout]:
    return {name: Layout.of(parameter) for name, parameter in module.named_parameters()}


def _check_covered(architecture: Architecture, styles: list[ModuleStyle]) -> None:
    """Checks that every parameter in a region has a style; otherwise its gradient would silently be wrong."""
    covered = {join_fqn(style.fqn, name) for style in styles for name in style.layouts}
    for region, module in architecture.regions:
        for name, _ in module.named_parameters():
            if join_fqn(region, name) not in covered:
                raise UnsupportedModelError(
                    f"The parameter {join_fqn(region, name)!r} has no style.",
                    where=f"the plan of model type {architecture.model_type!r}",
                    why="the style of every parameter in a tensor-parallel region must be known",
                    fix="add a style for its module to the plan",
                )
