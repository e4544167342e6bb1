# SPDX-License-Identifier: Apache-2.0
"""The layout of one tensor of the original model over the mesh.

A :class:`Layout` is pure data: a global shape, the name of a dtype, and one :class:`Cut` per sharded dim. It maps
global elements to a rank's shard and back, and can be serialized. This one description is used by loading, model
transformation, gradient norms, ZeRO, checkpoints, resharding and ``explain``.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from neuron_accel.errors import LayoutError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A range of indices along one dim: ``global[start:stop]`` is ``local[local_start:local_stop]``."""

    start: int
    stop: int
    local_start: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def local_stop(self) -> int:
        return self.local_start + self.size


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one dim of a tensor is sharded along one axis of the mesh.

    Args:
        dim: the tensor's dim, non-negative.
        axis: the mesh axis whose ranks hold the shards.
        degree: number of ranks along ``axis``.
        size: global size of the dim.
        blocks: sizes of the independently sharded blocks of the dim, for weights that fuse several (for example query,
            key and value); one block when empty. Each shard holds a shard of every block.
        unit: shards begin only at multiples of this many indices of a block (a head's size).
        replicas: number of neighbouring ranks that hold the same shard (more ranks than key/value heads).
        padded: whether a block whose units are not evenly divisible is padded at its end. Padding exists only in
            shards.

    Raises:
        LayoutError: if the cut is not possible.
    """

    dim: int
    axis: str
    degree: int
    size: int
    blocks: tuple[int, ...] = ()
    unit: int = 1
    replicas: int = 1
    padded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks) or (self.size,))
        if sum(self.blocks) != self.size or min(self.blocks) < 0:
            raise LayoutError(f"Blocks {self.blocks} do not add up to the size {self.size} of dim {self.dim}.")
        if self.degree < 1 or self.unit < 1 or self.replicas < 1 or self.degree % self.replicas:
            raise LayoutError(
                f"Dim {self.dim} cannot be sharded over {self.degree} ranks of axis {self.axis!r} with {self.replicas} "
                f"replicas of units of {self.unit}.",
                why="degree, unit and replicas are at least 1, and replicas divides degree",
            )
        for block in self.blocks:
            if block % self.unit:
                raise LayoutError(
                    f"A block of {block} along dim {self.dim} is not a multiple of the unit {self.unit}.",
                    why="shards begin only between units",
                )
            if not self.padded and (block // self.unit) % self.parts:
                what = f"{block // self.unit} units of {self.unit}" if self.unit > 1 else f"{block} elements"
                raise LayoutError(
                    f"{what} of dim {self.dim} cannot be split evenly into {self.parts} shards of axis {self.axis!r}.",
                    why="the shards of a tensor have equal shapes on all ranks",
                    fix=f"choose a degree of axis {self.axis!r} that divides {block // self.unit}, or allow padding",
                )

    @property
    def parts(self) -> int:
        """Number of different shards."""
        return self.degree // self.replicas

    @property
    def local_blocks(self) -> tuple[int, ...]:
        """Size of each block in a shard, padding included."""
        return tuple(-(-block // (self.unit * self.parts)) * self.unit for block in self.blocks)

    @property
    def local_size(self) -> int:
        """Size of the dim in a shard, padding included."""
        return sum(self.local_blocks)

    def segments(self, index: int) -> tuple[Segment, ...]:
        """Returns the segments that the rank at ``index`` along the axis holds. Elements of the shard in no segment are
        padding."""
        if not 0 <= index < self.degree:
            raise ValueError(f"index {index} is not on axis {self.axis!r} of degree {self.degree}")
        part = index // self.replicas
        segments = []
        global_start = local_start = 0
        for block, local in zip(self.blocks, self.local_blocks, strict=True):
            start, stop = min(part * local, block), min((part + 1) * local, block)
            if stop > start:
                segments.append(Segment(start=global_start + start, stop=global_start + stop, local_start=local_start))
            global_start += block
            local_start += local
        return tuple(segments)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A contiguous box of a tensor: its slices in the global tensor and in a rank's shard."""

    global_slices: tuple[slice, ...]
    local_slices: tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of one tensor of the original model over the mesh.

    Args:
        shape: global shape, as in the original model.
        dtype: name of the dtype without prefix, ``"float32"``.
        cuts: at most one per dim and per axis; a tensor without cuts is replicated.
    """

    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[Cut, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "cuts", tuple(sorted(self.cuts, key=lambda cut: cut.dim)))
        if not all(isinstance(size, int) and size >= 0 for size in self.shape):
            raise LayoutError(f"{self.shape} is not a valid shape.")
        dims, axes = [cut.dim for cut in self.cuts], [cut.axis for cut in self.cuts]
        if len(set(dims)) < len(dims) or len(set(axes)) < len(axes):
            raise LayoutError(f"A tensor of shape {self.shape} has two cuts along one dim or axis: {self.cuts}.")
        for cut in self.cuts:
            if not 0 <= cut.dim < len(self.shape) or self.shape[cut.dim] != cut.size:
                raise LayoutError(f"{cut} does not fit a tensor of shape {self.shape}.")

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Returns the layout of a replicated tensor."""
        return cls(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold different shards."""
        return tuple(cut.axis for cut in self.cuts if cut.parts > 1)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of a shard, the same on every rank."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] = cut.local_size
        return tuple(shape)

    @cached_property
    def replicas(self) -> int:
        """Number of ranks along :attr:`axes` that hold each element: what a sum over these axes counts it. Along other
        axes, also those of a cut whose ranks all hold the same shard, every rank holds it."""
        return math.prod(cut.replicas for cut in self.cuts if cut.parts > 1)

    @cached_property
    def padded(self) -> bool:
        """Whether the shard of a rank has elements that are not in the global tensor."""
        return any(cut.local_size * cut.parts != cut.size for cut in self.cuts)

    def pieces(self, coordinates: Mapping[str, int]) -> tuple[Piece, ...]:
        """Returns the slices that the rank at ``coordinates`` (axis to index) holds."""
        per_dim: list[Sequence[Segment]] = [
            (Segment(start=0, stop=size, local_start=0),) if size else () for size in self.shape
        ]
        for cut in self.cuts:
            per_dim[cut.dim] = cut.segments(coordinates.get(cut.axis, 0))
        return tuple(
            Piece(
                global_slices=tuple(slice(segment.start, segment.stop) for segment in box),
                local_slices=tuple(slice(segment.local_start, segment.local_stop) for segment in box),
            )
            for box in itertools.product(*per_dim)
        )

    def shard(self, full: Any, coordinates: Mapping[str, int]) -> torch.Tensor:
        """Returns the shard of the rank at ``coordinates``, as a copy of slices of ``full``.

        Args:
            full: a tensor of the global shape, or another object that can be sliced, such as a safetensors slice.
            coordinates: axis to index.

        Returns:
            A contiguous tensor of :attr:`local_shape` with the dtype and device of ``full``, which is not part of an
            autograd graph. Padding is zero.
        """
        import torch

        # Copies, since a slice of a safetensors file is a view of the full mapped tensor.
        parts = [
            (piece.local_slices, torch.as_tensor(full[piece.global_slices or ...]).detach())
            for piece in self.pieces(coordinates)
        ]
        if len(parts) == 1 and not self.padded:
            return parts[0][1].clone(memory_format=torch.contiguous_format)
        like = parts[0][1] if parts else torch.as_tensor(full[...])
        local = torch.zeros(self.local_shape, dtype=like.dtype, device=like.device)
        for local_slices, part in parts:
            local[local_slices] = part
        return local

    def write(self, local: torch.Tensor, full: torch.Tensor, coordinates: Mapping[str, int]) -> None:
        """Writes the shard of the rank at ``coordinates`` to its place in ``full``, without padding and without
        recording it for autograd.
        """
        full, local = full.detach(), local.detach()
        for piece in self.pieces(coordinates):
            full[piece.global_slices] = local[piece.local_slices]

    def to_dict(self) -> dict[str, Any]:
        """Returns the layout as plain data for JSON."""
        cuts = [
            {name: getattr(cut, name) for name in Cut.__dataclass_fields__} | {"blocks": list(cut.blocks)}
            for cut in self.cuts
        ]
        return {"shape": list(self.shape), "dtype": self.dtype, "cuts": cuts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """Inverse of :meth:`to_dict`.

        Raises:
            LayoutError: if ``data`` is not a layout.
        """
        try:
            return cls(
                shape=tuple(map(operator.index, data["shape"])),  # raises for floats, also for 1.0
                dtype=data["dtype"],
                cuts=tuple(
                    Cut(
                        **cut
                        | {name: operator.index(cut[name]) for name in ("dim", "degree", "size", "unit", "replicas")}
                        | {"blocks": tuple(map(operator.index, cut["blocks"]))}
                    )
                    for cut in data["cuts"]
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"This is not a layout: {data!r}", why=str(error)) from error
