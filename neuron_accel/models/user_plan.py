"""A model of the user's own, divided by the plan that they give for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from torch import nn

from neuron_accel.errors import ConfigurationError, LayoutError, UnsupportedModelError
from neuron_accel.models.architecture import Architecture
from neuron_accel.models.plan import ArchitecturePlan, Style, colwise, matches, rowwise, shared

_MADE = {"rowwise": rowwise, "shared": shared}


def given_architecture(model: nn.Module, plan: Mapping[str, str], degree: int) -> Architecture:
    """A model with the plan that a user gave.

    Args:
        model: any model.
        plan: FQN patterns, ``*`` for one segment, and what becomes of what they name: of a linear layer ``"colwise"``,
            ``"colwise:3"`` (three blocks side by side, as query, key and value often are), ``"rowwise"`` or
            ``"shared"``; of an attribute that counts heads or features, ``"per_rank"``.
        degree: number of ranks.

    Raises:
        ConfigurationError: for a style that there is not.
        UnsupportedModelError: if a pattern names nothing.
        LayoutError: if what an attribute counts does not divide.
    """
    styles: dict[str, Style] = {}
    per_rank: dict[str, dict[str, str]] = {}
    counts: dict[str, int] = {}
    for pattern, style in plan.items():
        if style == "per_rank":
            holder, _, attribute = pattern.rpartition(".")
            counts[pattern] = _count(model, holder, attribute, degree)
            per_rank.setdefault(holder, {})[attribute] = pattern
        else:
            styles[pattern] = _style(pattern, style)
    made = ArchitecturePlan(
        model_types=(),
        blocks="",
        token_embedding="",
        final_norm="",
        regions=tuple(pattern for pattern, style in styles.items() if style.kind == "colwise"),
        styles=styles,
        per_rank=per_rank,
        sequence="the plan given for it names linear layers, and no blocks",
    )
    config = SimpleNamespace(model_type=type(model).__name__, **counts)
    return Architecture(plan=made, config=config, model=model, owner=model, owner_name="", base=model, base_name="")


def _style(pattern: str, style: str) -> Style:
    kind, _, blocks = style.partition(":")
    if kind == "colwise" and (not blocks or blocks.isdigit()):
        return colwise(blocks=int(blocks or 1))
    if style in _MADE:
        return _MADE[style]()
    raise ConfigurationError(
        f"{style!r}, for {pattern!r}, is no style.",
        where="tensor_parallel_plan of plugin model_parallelism",
        fix="use 'colwise', 'colwise:N', 'rowwise', 'shared' or 'per_rank'",
    )


def _count(model: nn.Module, holder: str, attribute: str, degree: int) -> int:
    found = {getattr(module, attribute, None) for name, module in model.named_modules() if matches(holder, name)}
    if len(found) != 1 or not all(isinstance(value, int) for value in found):
        raise UnsupportedModelError(
            f"'{holder}.{attribute}' is {', '.join(map(str, found)) or 'nowhere'} in {type(model).__name__}.",
            where="tensor_parallel_plan of plugin model_parallelism",
            why="'per_rank' divides an attribute that is the same whole number wherever the pattern matches",
        )
    count = found.pop()
    if count % degree:
        raise LayoutError(
            f"'{holder}.{attribute}' = {count} does not divide by {degree}.",
            where=f"{type(model).__name__} with tensor_parallel_size={degree}",
            fix="choose a tensor_parallel_size that divides it",
        )
    return count
