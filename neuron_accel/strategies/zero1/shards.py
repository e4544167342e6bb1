"""The flat buffers of ZeRO-1: parameters are views of them, gradients scattered and weights gathered through them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.engine.errors import UsageError
from neuron_accel.engine.gradients import Bucket
from neuron_accel.strategies.zero1.alike import AlikePartition
from neuron_accel.strategies.zero1.partition import Partition, Piece

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group, Pending
    from neuron_accel.engine.run import Run


@dataclass
class ShardPiece:
    """What this rank optimizes of one parameter.

    Args:
        parameter: the model's parameter.
        place: which of its elements.
        master: what the optimizer updates, a view into the rank's chunk, in the optimizer's dtype; ``[stop - start]``,
            or the parameter's shape where it has no dims, or pieces are whole parameters.
    """

    parameter: nn.Parameter
    place: Piece
    master: nn.Parameter


class SendBuffers:
    """Memory for gradients on their way: a few buffers that buckets take in turn, pass after pass.

    Without a limit the gradients of a whole model would be on their way at once, beside the gradients themselves; and
    memory that is new in every step costs a page fault for every page.

    Args:
        limit: number of buckets on their way at a time; the oldest is waited for before another sets out.
    """

    def __init__(self, limit: int = 3) -> None:
        self._limit = limit
        self._travelling: deque[tuple[BucketShard, torch.Tensor]] = deque()
        self._free: list[torch.Tensor] = []

    def take(self, shard: BucketShard, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of ``numel`` elements for the gradients of ``shard``, to be sent at once."""
        while len(self._travelling) >= self._limit:
            self._arrived()
        fitting = [b for b in self._free if b.dtype == dtype and numel <= b.numel() <= 2 * numel]
        buffer = min(fitting, key=torch.Tensor.numel, default=None)
        if buffer is None:
            buffer = torch.empty(numel, dtype=dtype, device=device)
        else:
            self._free = [b for b in self._free if b is not buffer]
        self._travelling.append((shard, buffer))
        return buffer[:numel]

    def _arrived(self) -> None:
        shard, buffer = self._travelling.popleft()
        shard.complete()
        self._free = [*self._free, buffer][-self._limit :]

    def settle(self) -> None:
        """Waits for all that is on its way."""
        while self._travelling:
            self._arrived()


@dataclass
class BucketShard:
    """This rank's share of one bucket.

    Args:
        bucket: the parameters.
        partition: how they lie in the buffer.
        run: the run.
        group: the ranks that share the optimizer's state.
        optimizer_dtype: dtype of the masters.
        reduce_dtype: dtype in which gradients travel and are summed.
        keep_shapes: whether pieces that are whole parameters keep their shape.
        buffers: where gradients on their way are held.
    """

    bucket: Bucket
    partition: Partition
    run: Run
    group: Group
    optimizer_dtype: torch.dtype
    reduce_dtype: torch.dtype
    keep_shapes: bool
    buffers: SendBuffers
    pieces: list[ShardPiece] = field(init=False)
    used: list[bool] = field(init=False)
    """For each parameter, whether this rank had a gradient in the last backward pass."""
    used_anywhere: list[bool] = field(init=False)
    """For each parameter, whether some rank had one since gradients were last dropped."""
    _flat: torch.Tensor | None = field(init=False, default=None)
    _chunk: torch.Tensor = field(init=False)
    _gradient: torch.Tensor | None = field(init=False, default=None)
    _pending: Pending | None = field(init=False, default=None)
    _reduced: torch.Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        backend, parameters = self.run.backend, self.bucket.parameters
        with torch.no_grad():
            flat = self._new_flat()
            chunk = backend.chunk(flat, self.group)
            if not isinstance(self.partition, AlikePartition):
                # Parameters live in the buffer: what is gathered into it after a step needs no copy.
                self._flat = flat
                for parameter, view in zip(parameters, self._views(flat), strict=True):
                    parameter.data = view
            same = self.optimizer_dtype == self.bucket.dtype and self._flat is not None
            self._chunk = chunk if same else chunk.to(self.optimizer_dtype, copy=True)
        self.used = [False] * len(parameters)
        self.used_anywhere = [False] * len(parameters)
        self.pieces = [self._piece(place) for place in self.partition.pieces(self.group.index)]

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.bucket.parameters

    @property
    def has_masters(self) -> bool:
        """Whether the masters are memory of their own, beside the parameters."""
        return self._flat is None or self.optimizer_dtype != self.bucket.dtype

    def _new_flat(self) -> torch.Tensor:
        parameters = self.bucket.parameters
        if isinstance(self.partition, AlikePartition):
            return self.partition.join(parameters, self.bucket.dtype, parameters[0].device)
        flat = torch.zeros(self.partition.numel, dtype=self.bucket.dtype, device=parameters[0].device)
        for parameter, view in zip(parameters, self._views(flat), strict=True):
            view.copy_(parameter)
        return flat

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if isinstance(self.partition, AlikePartition):
            parts = self.partition.split(flat)
            return [part.view(p.shape) for part, p in zip(parts, self.bucket.parameters, strict=True)]
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.partition.offsets, self.bucket.parameters, strict=True)
        ]

    def _piece(self, place: Piece) -> ShardPiece:
        parameter = self.bucket.parameters[place.parameter]
        view = self._chunk[place.offset : place.offset + place.length]
        if isinstance(self.partition, AlikePartition):
            view = view.clone()  # updates of a view would rewrite the whole chunk, each by itself, on a lazy device
        elif self.keep_shapes or parameter.dim() == 0:
            view = view.view(parameter.shape)
        return ShardPiece(parameter=parameter, place=place, master=nn.Parameter(view))

    # ---- gradients -------------------------------------------------------------------------------------------------
    def send_gradients(self) -> None:
        """Starts the reduce-scatter of the bucket's gradients and lets go of them."""
        parameters = self.bucket.parameters
        self.used = [p.grad is not None for p in parameters]
        if isinstance(self.partition, AlikePartition):
            self._send_joined(self.partition)
            return
        flat = self.buffers.take(self, self.partition.numel, self.reduce_dtype, parameters[0].device)
        covered = 0
        targets, sources = [], []
        for parameter, view in zip(parameters, self._views(flat), strict=True):
            covered += parameter.numel()
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.is_sparse:
                raise self._sparse(parameter)
            else:
                targets.append(view)
                sources.append(parameter.grad)
        if covered < flat.numel():
            self._zero_padding(flat)
        if targets:
            torch._foreach_copy_(targets, sources)
        for parameter in parameters:
            parameter.grad = None
        self._pending = self.run.backend.start_reduce_scatter(flat, self.group)

    def _send_joined(self, partition: AlikePartition) -> None:
        parameters = self.bucket.parameters
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise self._sparse(parameter)
        flat = partition.join([p.grad for p in parameters], self.reduce_dtype, parameters[0].device)
        for parameter in parameters:
            parameter.grad = None
        self._pending = self.run.backend.start_reduce_scatter(flat, self.group)

    def complete(self) -> None:
        """Waits for the reduce-scatter that is under way, if any."""
        if self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None

    def _sparse(self, parameter: nn.Parameter) -> UsageError:
        name = next(r.fqn for r, p in zip(self.bucket.records, self.parameters, strict=True) if p is parameter)
        return UsageError(
            f"The gradient of {name!r} is sparse.",
            where="plugin 'zero1'",
            why="gradients travel in dense buckets",
            fix="build the embedding with sparse=False",
        )

    def _zero_padding(self, flat: torch.Tensor) -> None:
        ends = sorted((o, o + s) for o, s in zip(self.partition.offsets, self.partition.sizes, strict=True))
        for (_, end), (begin, _) in zip([(0, 0), *ends], [*ends, (flat.numel(), 0)], strict=True):
            if end < begin:
                flat[end:begin].zero_()

    def receive_gradients(self, used: Sequence[bool], scale: float, partial: Group) -> None:
        """Waits for the reduced gradients and hands each piece its own, added to what it has already.

        Args:
            used: for each parameter of the bucket, whether any rank had a gradient.
            scale: what the sum is multiplied by.
            partial: the group over which they still are partial sums.
        """
        self.buffers.settle()
        self.complete()
        assert self._reduced is not None
        gradient, self._reduced = self._reduced, None
        if partial.size > 1:
            gradient = self.run.backend.all_reduce(gradient, partial)
        gradient = gradient.to(self.optimizer_dtype)
        if scale != 1.0:
            gradient = gradient * scale if "lazy" in self.run.backend.capabilities else gradient.mul_(scale)
        if self._gradient is not None:
            gradient = self._gradient + gradient
            used = [a or b for a, b in zip(used, self.used_anywhere, strict=True)]
        self._gradient, self.used_anywhere = gradient, list(used)
        for piece in self.pieces:
            piece.master.grad = self._part(gradient, piece) if used[piece.place.parameter] else None

    def _part(self, chunk: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
        place = piece.place
        part = chunk[place.offset : place.offset + place.length].view(piece.master.shape)
        return part.clone() if isinstance(self.partition, AlikePartition) else part  # is clipped in place

    def drop_gradients(self) -> None:
        self._gradient = None
        self.used_anywhere = [False] * len(self.bucket.parameters)
        for piece in self.pieces:
            piece.master.grad = None

    def gather_gradients(self) -> list[torch.Tensor | None]:
        """The reduced gradients of the bucket's parameters, whole; collective."""
        if self._gradient is None:
            return [None] * len(self.bucket.parameters)
        flat = self.run.backend.all_gather(self._gradient, self.group)
        views = self._views(flat)
        return [view if used else None for view, used in zip(views, self.used_anywhere, strict=True)]

    # ---- weights ---------------------------------------------------------------------------------------------------
    def send_weights(self) -> Callable[[], None]:
        """Starts to gather the updated weights; what it returns finishes that."""
        backend = self.run.backend
        if isinstance(self.partition, AlikePartition):
            self._chunk = torch.cat([piece.master.detach() for piece in self.pieces])
        chunk = self._chunk.detach().to(self.bucket.dtype)
        if self._flat is not None:  # the parameters are views of it
            pending = backend.start_all_gather_into(self._flat, chunk, self.group)
            return lambda: (pending.wait(), None)[1]
        pending = backend.start_all_gather(chunk, self.group)

        def finish() -> None:
            with torch.no_grad():
                for parameter, view in zip(self.bucket.parameters, self._views(pending.wait()), strict=True):
                    parameter.copy_(view)

        return finish

    def reload(self) -> None:
        """Takes the model's weights as the new masters, after somebody else has changed them."""
        with torch.no_grad():
            for piece in self.pieces:
                if isinstance(self.partition, AlikePartition):
                    continue
                flat = piece.parameter.reshape(-1)[piece.place.start : piece.place.stop]
                piece.master.copy_(flat.view(piece.master.shape))
            if isinstance(self.partition, AlikePartition):
                self._chunk = self.run.backend.chunk(self._new_flat(), self.group).to(self.optimizer_dtype, copy=True)
                for piece in self.pieces:
                    piece.master.copy_(self._part(self._chunk, piece))
