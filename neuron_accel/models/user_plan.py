# SPDX-License-Identifier: Apache-2.0
"""The plan of a user's own model, given as a dict of patterns to styles."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn

from neuron_accel.errors import ConfigurationError, LayoutError, UnsupportedModelError
from neuron_accel.models.plan import ArchitecturePlan, Style, colwise, matches_fqn, named_modules, rowwise, shared

BLOCK = "block"
"""The style of the repeated blocks of a model."""

_MADE = {"rowwise": rowwise, "shared": shared}


def read_plan(model: nn.Module, plan: Mapping[str, str], degree: int) -> dict[str, Any]:
    """Returns plan, configuration and names of blocks of an :class:`~neuron_accel.models.architecture.Architecture`.

    Args:
        model: any model.
        plan: FQN patterns (``*`` for one segment) and their styles: for a linear layer ``"colwise"``, ``"colwise:3"``
            (three blocks side by side, as query, key and value often are), ``"rowwise"`` or ``"shared"``; for an
            attribute that counts heads or features, ``"per_rank"``; for the repeated blocks, which are called one after
            the other, ``"block"`` (required for sequence parallelism).
        degree: number of ranks.

    Raises:
        ConfigurationError: if a style is not valid.
        UnsupportedModelError: if a pattern matches nothing, or the blocks are not in one list.
        LayoutError: if the value of an attribute is not divisible by the degree.
    """
    styles: dict[str, Style] = {}
    per_rank: dict[str, dict[str, str]] = {}
    counts: dict[str, int] = {}
    blocks: dict[str, nn.Module] = {}
    for pattern, style in plan.items():
        if style == "per_rank":
            parent, _, attribute = pattern.rpartition(".")
            counts[pattern] = _count(model, parent, attribute, degree)
            per_rank.setdefault(parent, {})[attribute] = pattern
        elif style == BLOCK:
            blocks |= _blocks(model, pattern)
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
        sequence="" if blocks else "its plan names no blocks, between which the sequence would be sharded",
    )
    config = SimpleNamespace(model_type=type(model).__name__, **counts)
    return {"plan": made, "config": config, "block_names": _of_one_list(model, blocks)}


def _blocks(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    found = dict(named_modules(model, pattern))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no module {pattern!r}.",
            where="tensor_parallel_plan of plugin tensor_parallel",
            why="the plan gives it the style 'block'",
        )
    return found


def _of_one_list(model: nn.Module, blocks: dict[str, nn.Module]) -> tuple[str, ...]:
    """Returns the FQNs of blocks in the order of the model, after checking that they are in one list."""
    parents = sorted({name.rpartition(".")[0] for name in blocks})
    if len(parents) > 1:
        raise UnsupportedModelError(
            f"The blocks of {type(model).__name__} are in {' and '.join(map(repr, parents))}.",
            where="tensor_parallel_plan of plugin tensor_parallel",
            why="'block' is for the modules of one list, which are called one after the other",
            fix="give the style 'block' to the modules of one list, or to none",
        )
    return tuple(name for name, _ in model.named_modules() if name in blocks)


def _style(pattern: str, style: str) -> Style:
    kind, _, blocks = style.partition(":")
    if kind == "colwise" and (not blocks or blocks.isdigit()):
        return colwise(blocks=int(blocks or 1))
    if style in _MADE:
        return _MADE[style]()
    raise ConfigurationError(
        f"{style!r}, for {pattern!r}, is not a valid style.",
        where="tensor_parallel_plan of plugin tensor_parallel",
        fix="use 'colwise', 'colwise:N', 'rowwise', 'shared', 'per_rank' or 'block'",
    )


def _count(model: nn.Module, parent: str, attribute: str, degree: int) -> int:
    found: set[Any] = {
        getattr(module, attribute, None) for name, module in model.named_modules() if matches_fqn(parent, name)
    }
    if len(found) != 1 or not all(isinstance(value, int) for value in found):
        raise UnsupportedModelError(
            f"'{parent}.{attribute}' is {', '.join(map(str, found)) or 'missing'} in {type(model).__name__}.",
            where="tensor_parallel_plan of plugin tensor_parallel",
            why="'per_rank' is for an integer attribute with the same value in all modules that the pattern matches",
        )
    count = found.pop()
    if count % degree:
        raise LayoutError(
            f"'{parent}.{attribute}' = {count} is not divisible by {degree}.",
            where=f"{type(model).__name__} with tensor_parallel_size={degree}",
            fix="choose a tensor_parallel_size that divides it",
        )
    return count
