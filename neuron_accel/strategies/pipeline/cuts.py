# SPDX-License-Identifier: Apache-2.0
"""Splits a model into stages of balanced cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import nn

from neuron_accel.contract import ParameterMap
from neuron_accel.contract.families import Stack
from neuron_accel.errors import UnsupportedModelError


def cut(
    model: nn.Module, stages: int, stage_cuts: Sequence[str] | None, parameters: ParameterMap | None = None
) -> tuple[Stack, tuple[int, ...]]:
    """Returns the blocks of a model, and the index of the first block of each stage.

    Args:
        model: the model.
        stages: number of stages.
        stage_cuts: FQNs of the blocks at which all stages but the first begin; None for a balanced cut.
        parameters: its parameters, if other strategies have changed it. The costs are those of the original model then:
            a rank that keeps a share of a block's experts runs them for the tokens of other ranks, too.

    Raises:
        UnsupportedModelError: if no plan describes the model's blocks, or it cannot be split into this number of stages
            or at these blocks.
    """
    if stage_cuts is None:
        stack = Stack.of(model)
        _check_count(model, stack, stages)
        return stack, balanced(*costs_of(model, stack, parameters), stages)
    if len(stage_cuts) != stages - 1:
        raise UnsupportedModelError(
            f"{len(stage_cuts)} stage_cuts make {len(stage_cuts) + 1} stages, but there are {stages}.",
            where="stage_cuts",
            why="a cut names the first block of every stage but the first",
            fix=f"name {stages - 1} blocks",
        )
    container, indices = Stack.container_of(model, stage_cuts)
    stack = Stack.of(model, container)
    _check_count(model, stack, stages)
    starts = (0, *indices)
    if any(a >= b for a, b in itertools.pairwise(starts)):
        raise UnsupportedModelError(
            f"The cuts {', '.join(stage_cuts)} leave a stage without a block.",
            where="stage_cuts",
            fix="name them in the order of the model, none of them its first block",
        )
    return stack, starts


def _check_count(model: nn.Module, stack: Stack, stages: int) -> None:
    if stages > stack.blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {stack.blocks} blocks and cannot be split into {stages} stages.",
            where=f"{stack.container}, pipeline_parallel_size x virtual_stages = {stages}",
            why="every stage needs at least one block",
            fix=f"use {stack.blocks} stages at most",
        )


def costs_of(
    model: nn.Module, stack: Stack, parameters: ParameterMap | None = None
) -> tuple[list[float], float, float]:
    """Returns the cost of each block, of the modules before the blocks, and of the modules after them."""
    modules = dict(model.named_modules())
    blocks = [cost(modules[stack.block(index)], parameters) for index in range(stack.blocks)]
    before, after = (sum(cost(modules[name], parameters) for name in names) for names in (stack.before, stack.after))
    return blocks, before, after


def cost(module: nn.Module, parameters: ParameterMap | None = None) -> float:
    """Returns the cost of a module per token, in operations: one for each weight and each output of a matrix, and for
    an embedding one for each element of a row. Attention scores are not counted, since they cost the same in all
    blocks. With ``parameters`` it is that of the original module.
    """
    total = 0.0
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            record = None if parameters is None else parameters.find(parameter)
            if record is not None and record.added:
                continue
            shape = parameter.shape if record is None else record.layout.shape
            if isinstance(part, nn.Embedding):
                total += shape[-1]
            else:
                total += math.prod(shape) + (shape[0] if len(shape) > 1 else 0)
    return total


def balanced(blocks: Sequence[float], before: float, after: float, stages: int) -> tuple[int, ...]:
    """Returns the index of the first block of each stage, such that the cost of the most expensive stage is minimal.

    Among such splits, the one with the smallest sum of squared costs is chosen.

    Args:
        blocks: cost of each block.
        before: cost of the first stage besides its blocks.
        after: cost of the last stage besides its blocks.
        stages: number of stages, no more than there are blocks.
    """
    count = len(blocks)
    sums = [0.0]
    for block in blocks:
        sums.append(sums[-1] + block)

    def stage_cost(stage: int, start: int, stop: int) -> float:
        extra = (before if stage == 0 else 0.0) + (after if stage == stages - 1 else 0.0)
        return sums[stop] - sums[start] + extra

    # best[stop]: (largest cost, sum of squares, starts) of the first stages over the first `stop` blocks
    best: dict[int, tuple[float, float, tuple[int, ...]]]
    best = {stop: (stage_cost(0, 0, stop), stage_cost(0, 0, stop) ** 2, (0,)) for stop in range(1, count + 1)}
    for stage in range(1, stages):
        better = {}
        for stop in range(stage + 1, count + 1):
            options = []
            for start in range(stage, stop):
                largest, squares, starts = best[start]
                own = stage_cost(stage, start, stop)
                options.append((max(largest, own), squares + own**2, (*starts, start)))
            better[stop] = min(options)
        best = better
    return best[count][2]
