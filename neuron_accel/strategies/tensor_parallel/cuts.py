# SPDX-License-Identifier: Apache-2.0
"""Along which dim, and in which units, a parameter is cut: a pure function of the model, its plan and the degree."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from neuron_accel.contract import Cut, Layout
from neuron_accel.contract.families import Architecture, Style
from neuron_accel.errors import LayoutError, UnsupportedModelError
from neuron_accel.strategies.tensor_parallel.head_split import HeadSplit, head_splits
from neuron_accel.strategies.tensor_parallel.linear import RowBlock

AXIS = "tp"
"""The mesh axis of tensor parallelism."""


@dataclass(frozen=True)
class Cuts:
    """The cuts of a model's parameters.

    Args:
        architecture: the model.
        degree: number of ranks of the axis.
    """

    architecture: Architecture
    degree: int
    splits: dict[str, HeadSplit] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", head_splits(self.architecture, self.degree))

    @property
    def heads(self) -> HeadSplit | None:
        return self.splits.get(self.architecture.plan.heads)

    def of(self, fqn: str, style: Style, dim: int, size: int) -> Cut:
        """Returns the cut of a parameter with ``size`` features along ``dim``.

        Raises:
            UnsupportedModelError: if the features do not consist of the units of the style.
            LayoutError: if they can be neither padded nor replicated, and are not divisible.
        """
        sizes, blocks = self._blocks(fqn, style, size)
        units = {
            block * style.groups // split.units if split else 1 for block, split in zip(sizes, blocks, strict=True)
        }
        if style.widths:
            units = {math.gcd(*(getattr(self.architecture.config, name) for name in style.widths))}
        replicas = {split.replicas if split else 1 for split in blocks}
        no_padding = style.fused or style.widths
        uneven = any(split.padded or split.replicas > 1 for split in blocks if split)
        if len(units) > 1 or len(replicas) > 1 or (no_padding and uneven):
            raise LayoutError(
                f"{fqn!r} fuses {', '.join(f'{s.name} = {s.count}' for s in blocks if s)}, not divisible by "
                f"{self.degree}.",
                where=f"{type(self.architecture.owner).__name__} with tensor_parallel_size={self.degree}",
                why="heads and key/value heads fused in one weight can be neither padded nor replicated separately",
                fix="choose a tensor_parallel_size that divides both",
            )
        return Cut(
            dim=dim,
            axis=AXIS,
            degree=self.degree,
            size=size,
            blocks=tuple(sizes),
            unit=units.pop(),
            replicas=replicas.pop(),
            padded=True,
        )

    def of_experts(self, fqn: str, module: nn.Module) -> dict[str, Cut]:
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
        if features % self.degree:
            raise LayoutError(
                f"{fqn!r} has {features} features, not divisible by {self.degree}.",
                fix="choose a tensor_parallel_size that divides them",
            )
        together: dict[str, Any] = {"blocks": (features, features)} if module.is_concatenated else {"unit": 2}
        common: dict[str, Any] = {"axis": AXIS, "degree": self.degree}
        cuts = {
            "gate_up_proj": Cut(dim=outer, size=2 * features, **common, **together),
            "down_proj": Cut(dim=inner, size=features, **common),
        }
        if has_bias:
            cuts["gate_up_proj_bias"] = Cut(dim=1, size=2 * features, **common, **together)
        return cuts

    def own_rows(self, fqn: str, module: nn.Module, style: Style) -> tuple[RowBlock, ...]:
        """Returns the rows that a rank uses of a weight that fuses heads and key/value heads with different replication
        or units, which a cut cannot describe. Empty if a cut can."""
        if not isinstance(module, nn.Linear) or style.widths or style.groups > 1:
            return ()
        size = module.weight.shape[0]
        sizes, maybe_split = self._blocks(fqn, style, size)
        blocks = [split for split in maybe_split if split is not None]
        if len(blocks) < len(maybe_split):
            return ()
        if style.fused:
            return _own_rows_of_groups(size, self.heads, blocks[0])
        units = {block // split.units for block, split in zip(sizes, blocks, strict=True)}
        if len(units) == 1 and len({split.replicas for split in blocks}) == 1:
            return ()
        starts = itertools.accumulate(sizes, initial=0)
        return tuple(
            RowBlock(start=start, size=block, local=block // split.count * split.local, replicas=split.replicas)
            for start, block, split in zip(starts, sizes, blocks, strict=False)
        )

    def _blocks(self, fqn: str, style: Style, size: int) -> tuple[list[int], list[HeadSplit | None]]:
        """Returns the sizes of the fused blocks of a weight's sharded features, and how the units of each block are
        split."""
        blocks = [self.splits.get(name) if name else None for name in style.units_of_blocks]
        counts = [split.count if split else 0 for split in blocks]
        total = sum(counts) if all(counts) else 0
        sizes = [size * count // total for count in counts] if total else [size // len(blocks)] * len(blocks)
        if style.widths:
            widths = [getattr(self.architecture.config, name) for name in style.widths]
            sizes = [count * width for count, width in zip(counts, widths, strict=True)]
        exact = sum(sizes) == size and not any(
            block % split.count for block, split in zip(sizes, blocks, strict=True) if split
        )
        if not exact:
            raise UnsupportedModelError(
                f"{fqn!r} has {size} features along the sharded dim, which are not {len(blocks)} blocks of "
                f"{', '.join(str(count or 'any') for count in counts)} equal units.",
                where=f"the plan of model type {self.architecture.model_type!r}",
                why="the model is not built as its model type says",
            )
        return sizes, blocks


def cut_layout(layout: Layout, cut: Cut | None) -> Layout:
    """Returns the layout of an unsharded parameter after a cut."""
    return Layout(shape=layout.shape, dtype=layout.dtype, cuts=() if cut is None else (cut,))


def _own_rows_of_groups(size: int, heads: HeadSplit | None, groups: HeadSplit) -> tuple[RowBlock, ...]:
    """The rows of a weight in which each key/value head follows the queries of its heads (queries, key, value), if
    key/value heads are replicated on several ranks."""
    if groups.replicas == 1 or heads is None:
        return ()
    readers = heads.count // groups.count
    stride = size // groups.count
    width = stride // (readers + 2)
    queries = RowBlock(start=0, size=heads.count * width, local=heads.local * width, run=readers * width, stride=stride)
    one = {"size": groups.count * width, "local": width, "replicas": groups.replicas, "run": width, "stride": stride}
    return queries, RowBlock(start=readers * width, **one), RowBlock(start=(readers + 1) * width, **one)
