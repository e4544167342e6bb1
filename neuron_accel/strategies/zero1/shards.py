"""This rank's share of a bucket: gradients are scattered to it, it is updated, and weights are gathered from it.

There are two kinds. :class:`BufferShard` keeps parameters as views of one flat buffer, so that nothing is copied;
:class:`AlikeShard` is for devices that run one compiled graph on all ranks, where every rank's pieces look the same and
tensors are made anew rather than written into.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.errors import DesyncError, UsageError
from neuron_accel.engine.gradients import Bucket
from neuron_accel.strategies.zero1.alike import AlikePartition
from neuron_accel.strategies.zero1.partition import Partition, Piece
from neuron_accel.strategies.zero1.visible import DividedGradient

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
        self._travelling: deque[tuple[BufferShard, torch.Tensor]] = deque()
        self._free: list[torch.Tensor] = []

    def take(self, shard: BufferShard, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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


class BucketShard(ABC):
    """This rank's share of one bucket.

    Args:
        bucket: the parameters.
        partition: how they lie in the buffer.
        run: the run.
        group: the ranks that share the optimizer's state.
        optimizer_dtype: dtype of the masters.
        reduce_dtype: dtype in which gradients travel and are summed.

    Attributes:
        pieces: what this rank optimizes.
        used: for each parameter, whether this rank had a gradient in the last backward pass.
        used_anywhere: for each parameter, whether some rank had one since gradients were last dropped.
    """

    pieces: list[ShardPiece]

    def __init__(
        self,
        *,
        bucket: Bucket,
        partition: Partition,
        run: Run,
        group: Group,
        optimizer_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        self.bucket, self.partition, self.run, self.group = bucket, partition, run, group
        self.optimizer_dtype, self.reduce_dtype = optimizer_dtype, reduce_dtype
        self.used = [False] * len(bucket.parameters)
        self.used_anywhere = [False] * len(bucket.parameters)
        self._gradient: torch.Tensor | None = None
        self._visible: tuple[DividedGradient, ...] = ()
        self._whole = _Whole()
        self._pending: Pending | None = None
        self._reduced: torch.Tensor | None = None

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self.bucket.parameters

    @property
    @abstractmethod
    def has_masters(self) -> bool:
        """Whether the masters are memory of their own, beside the parameters."""

    @abstractmethod
    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The parameters' values as they lie in the buffer, ``[partition.numel]``; None counts as zeros."""

    def _join_to_send(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """The same in the dtype in which gradients travel."""
        return self._join(gradients)

    @abstractmethod
    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' values in a buffer, in their shapes."""

    @abstractmethod
    def _part(self, chunk: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
        """A piece's own part of a chunk, which may be changed in place."""

    @abstractmethod
    def send_weights(self) -> Callable[[], None]:
        """Starts to gather the updated weights; what it returns finishes that."""

    @abstractmethod
    def reload(self) -> None:
        """Takes the model's weights as the new masters, after somebody else has changed them."""

    # ---- gradients -------------------------------------------------------------------------------------------------
    def send_gradients(self) -> None:
        """Starts the reduce-scatter of the bucket's gradients and lets go of them."""
        gradients, kept = [], []
        for parameter, record in zip(self.parameters, self.bucket.records, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                raise UsageError(
                    f"The gradient of {record.fqn!r} is sparse.",
                    where="plugin 'zero1'",
                    why="gradients travel in dense buckets",
                    fix="build the embedding with sparse=False",
                )
            kept.append(self._is_visible(gradient))
            gradients.append(gradient.take_waiting() if isinstance(gradient, DividedGradient) else gradient)
            parameter.grad = None
        self.before_change()
        self._forget_all_but(kept)
        self.used = [gradient is not None for gradient in gradients]
        self._pending = self.run.backend.start_reduce_scatter(self._join_to_send(gradients), self.group)

    def complete(self) -> None:
        """Waits for the reduce-scatter that is under way, if any."""
        if self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None

    def receive_gradients(self, used: Sequence[bool], scale: float, partial: Group) -> None:
        """Waits for the reduced gradients and hands each piece its own, added to what it has already.

        Args:
            used: for each parameter of the bucket, whether any rank had a gradient.
            scale: what the sum is multiplied by.
            partial: the group over which they still are partial sums.
        """
        self.complete()
        assert self._reduced is not None
        gradient, self._reduced = self._reduced, None
        if partial.size > 1:
            gradient = self.run.backend.all_reduce(gradient, partial)
        gradient = self._scaled(gradient.to(self.optimizer_dtype), scale)
        if self._gradient is not None:
            gradient = self._own_gradient() + gradient
            used = [a or b for a, b in zip(used, self.used_anywhere, strict=True)]
        self.used_anywhere = list(used)
        self._hand_out(gradient)
        self._show([index for index, is_used in enumerate(used) if is_used])

    def _show(self, indices: Sequence[int]) -> None:
        """Lets these gradients be read at their parameters."""
        if not self._visible:
            self._visible = tuple(DividedGradient(p, self, i) for i, p in enumerate(self.parameters))
        for index in indices:
            self.parameters[index].grad = self._visible[index]

    def _hand_out(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient
        self._whole.forget()
        for piece in self.pieces:
            piece.master.grad = self._part(gradient, piece) if self.used_anywhere[piece.place.parameter] else None

    @staticmethod
    def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
        return gradient.mul_(scale) if scale != 1.0 else gradient

    def drop_gradients(self) -> None:
        """Also those that can be read at the parameters."""
        self._gradient = None
        self._whole.forget()
        self.used_anywhere = [False] * len(self.parameters)
        for piece in self.pieces:
            piece.master.grad = None
        for parameter in self.parameters:
            if isinstance(parameter.grad, DividedGradient):
                parameter.grad = None

    # ---- gradients as a loop sees them -------------------------------------------------------------------------------
    def heed_the_loop(self) -> None:
        """Takes over what a loop has done to the gradients that it sees: changed them, dropped or replaced some. What
        it puts in their place counts as reduced, as it does beside plain data parallelism."""
        self._take_edits()
        self._forget_all_but([p.grad is not None for p in self.parameters])
        given = [None if p.grad is None or self._is_visible(p.grad) else p.grad.detach() for p in self.parameters]
        indices = [index for index, gradient in enumerate(given) if gradient is not None]
        if not indices:
            return
        chunk = self.run.backend.chunk(self._join(given), self.group).to(self.optimizer_dtype)
        if self._gradient is None:
            own = torch.zeros_like(chunk)
        else:
            own = self._own_gradient()
        self.used_anywhere = [used or index in indices for index, used in enumerate(self.used_anywhere)]
        self._hand_out(own)
        for piece in self.pieces:
            if piece.master.grad is not None and piece.place.parameter in indices:
                piece.master.grad.copy_(self._part(chunk, piece))
        self._show(indices)

    def before_change(self) -> None:
        """The share is going to be changed in place, on every rank: what was gathered is out of date then."""
        self._take_edits()
        self._whole.forget()

    @property
    def has_unreduced(self) -> bool:
        """Whether some parameter has a gradient of this rank alone."""
        return any(p.grad is not None and not self._is_visible(p.grad) for p in self.parameters)

    def whole_gradient(self, index: int) -> torch.Tensor:
        """The reduced gradient of one parameter, in its shape and dtype; changing it changes the share. Collective.

        Raises:
            UsageError: if gradients have been dropped.
            DesyncError: if other ranks read another gradient.
        """
        if self._gradient is None or not self.used_anywhere[index]:
            raise UsageError(
                f"The gradient of {self.bucket.records[index].fqn!r} has been dropped.",
                where="`parameter.grad` under ZeRO-1, kept beyond `zero_grad`",
                why="it is gathered from all ranks when it is read",
                fix="read it before `zero_grad`, or keep a clone of it",
            )
        if not self._whole.parts:
            self._check_all_read(index)
            own = self._own_gradient().to(self.bucket.dtype)
            self._whole.hold(self._split(self.run.backend.all_gather(own, self.group)), own)
        return self._whole.parts[index]

    def zero_gradient(self, index: int) -> None:
        """Sets the share of one parameter's gradient to zero."""
        self.before_change()
        for piece in self.pieces:
            if piece.place.parameter == index and piece.master.grad is not None:
                piece.master.grad.zero_()

    def gather_gradients(self) -> list[torch.Tensor | None]:
        """The reduced gradients of the bucket's parameters, whole, in the optimizer's dtype; collective."""
        if self._gradient is None:
            return [None] * len(self.parameters)
        self.heed_the_loop()
        values = self._split(self.run.backend.all_gather(self._own_gradient(), self.group))
        return [value if used else None for value, used in zip(values, self.used_anywhere, strict=True)]

    def _is_visible(self, gradient: torch.Tensor | None) -> bool:
        return isinstance(gradient, DividedGradient) and gradient.belongs_to(self)

    def _check_all_read(self, index: int) -> None:
        """Of another length than gradients, so that a rank that does something else cannot take it for one."""
        name = self.bucket.records[index].fqn
        everyone = self.run.backend.all_gather_object(name, self.group)
        if set(everyone) != {name}:
            raise DesyncError(
                f"Ranks read different gradients: {sorted(set(everyone))}.",
                where="`parameter.grad` under ZeRO-1",
                why="each rank has a share of them, and all of them gather a gradient that is read",
                fix="read the same gradients in the same order on every rank",
            )

    def _own_gradient(self) -> torch.Tensor:
        """The share as it is now, ``[partition.chunk]``."""
        assert self._gradient is not None
        return self._gradient

    def _take_edits(self) -> None:
        if not self._whole.is_edited():
            return
        own = self._own_gradient()
        edited, before = self.run.backend.chunk(self._join(self._whole.parts), self.group), self._whole.before
        assert before is not None
        # Where nothing was changed the share keeps the digits that the parameters' dtype does not have.
        merged = torch.where(edited == before, own, edited.to(own.dtype))
        self._hand_out(merged)

    def _forget_all_but(self, kept: Sequence[bool]) -> None:
        """Drops the gradients that the loop has dropped by setting ``parameter.grad``."""
        if self._gradient is None or all(k or not u for k, u in zip(kept, self.used_anywhere, strict=True)):
            return
        self._take_edits()
        self.used_anywhere = [u and k for u, k in zip(self.used_anywhere, kept, strict=True)]
        if not any(self.used_anywhere):
            self._gradient = None
            self._whole.forget()
        for piece in self.pieces:
            if piece.master.grad is not None and not self.used_anywhere[piece.place.parameter]:
                piece.master.grad.zero_()  # the memory may be a part of the share's
                piece.master.grad = None


class _Whole:
    """Gathered gradients of a bucket, while somebody may look at them or change them.

    Attributes:
        parts: of each parameter; empty if nothing was gathered.
        before: this rank's share as it was gathered.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.before: torch.Tensor | None = None
        self._versions: list[int] = []

    def hold(self, parts: list[torch.Tensor], before: torch.Tensor) -> None:
        self.parts, self.before = parts, before
        self._versions = [part._version for part in parts]

    def is_edited(self) -> bool:
        return any(p._version != v for p, v in zip(self.parts, self._versions, strict=True))


class BufferShard(BucketShard):
    """The share of a bucket whose parameters are views of one flat buffer.

    Args:
        buffers: where gradients on their way are held.
        keep_shapes: whether pieces, which then are whole parameters, keep their shape.
    """

    def __init__(self, *, buffers: SendBuffers, keep_shapes: bool = False, **common: Any) -> None:
        super().__init__(**common)
        self._buffers, self._keep_shapes = buffers, keep_shapes
        with torch.no_grad():
            self._flat = torch.zeros(self.partition.numel, dtype=self.bucket.dtype, device=self.parameters[0].device)
            for parameter, view in zip(self.parameters, self._split(self._flat), strict=True):
                view.copy_(parameter)
                parameter.data = view
            chunk = self.run.backend.chunk(self._flat, self.group)
            self._chunk = chunk.to(self.optimizer_dtype, copy=True) if self.has_masters else chunk
        self.pieces = [self._piece(place) for place in self.partition.pieces(self.group.index)]

    @property
    def has_masters(self) -> bool:
        return self.optimizer_dtype != self.bucket.dtype

    def _piece(self, place: Piece) -> ShardPiece:
        parameter = self.parameters[place.parameter]
        view = self._chunk[place.offset : place.offset + place.length]
        if self._keep_shapes or parameter.dim() == 0:
            view = view.view(parameter.shape)
        return ShardPiece(parameter=parameter, place=place, master=nn.Parameter(view))

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[offset : offset + parameter.numel()].view(parameter.shape)
            for offset, parameter in zip(self.partition.offsets, self.parameters, strict=True)
        ]

    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        dtype = next((value.dtype for value in values if value is not None), self.bucket.dtype)
        return self._fill(torch.empty(self.partition.numel, dtype=dtype, device=self.parameters[0].device), values)

    def _join_to_send(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        numel, dtype, device = self.partition.numel, self.reduce_dtype, self.parameters[0].device
        if self.group.size == 1:  # what comes back is what was sent, and the next bucket would overwrite it
            return self._fill(torch.empty(numel, dtype=dtype, device=device), gradients)
        return self._fill(self._buffers.take(self, numel, dtype, device), gradients)

    def _fill(self, flat: torch.Tensor, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        targets, sources = [], []
        for value, view in zip(values, self._split(flat), strict=True):
            if value is None:
                view.zero_()
            else:
                targets.append(view)
                sources.append(value)
        self._zero_padding(flat)
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat

    def _zero_padding(self, flat: torch.Tensor) -> None:
        ends = sorted((o, o + s) for o, s in zip(self.partition.offsets, self.partition.sizes, strict=True))
        for (_, end), (begin, _) in zip([(0, 0), *ends], [*ends, (flat.numel(), 0)], strict=True):
            if end < begin:
                flat[end:begin].zero_()

    def receive_gradients(self, used: Sequence[bool], scale: float, partial: Group) -> None:
        self._buffers.settle()
        super().receive_gradients(used, scale, partial)

    def _part(self, chunk: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
        return chunk[piece.place.offset : piece.place.offset + piece.place.length].view(piece.master.shape)

    def send_weights(self) -> Callable[[], None]:
        chunk = self._chunk.detach().to(self.bucket.dtype)
        pending = self.run.backend.start_all_gather_into(
            self._flat, chunk, self.group
        )  # the parameters are views of it

        def finish() -> None:
            pending.wait()

        return finish

    def reload(self) -> None:
        with torch.no_grad():
            for piece in self.pieces:
                flat = piece.parameter.reshape(-1)[piece.place.start : piece.place.stop]
                piece.master.copy_(flat.view(piece.master.shape))


class AlikeShard(BucketShard):
    """The share of a bucket on a device that runs one graph on all ranks."""

    partition: AlikePartition

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        with torch.no_grad():
            chunk = self._own_weights()
        # Of their own: an update of a view would rewrite the whole chunk, each by itself.
        self.pieces = [
            ShardPiece(
                parameter=self.parameters[place.parameter],
                place=place,
                master=nn.Parameter(
                    chunk[place.offset : place.offset + place.length].clone().to(self.parameters[0].device)
                ),
            )
            for place in self.partition.pieces(self.group.index)
        ]

    @property
    def has_masters(self) -> bool:
        return True

    def _own_weights(self) -> torch.Tensor:
        """This rank's chunk, on the host: cut on the device, it would make another graph of the first step."""
        values = [self.run.backend.to_host(parameter) for parameter in self.parameters]
        flat = self.partition.join(values, self.bucket.dtype, torch.device("cpu"))
        return flat.chunk(self.partition.degree)[self.group.index].to(self.optimizer_dtype)

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = self.partition.split(flat)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return self.partition.join(values, self.reduce_dtype, self.parameters[0].device)

    def _own_gradient(self) -> torch.Tensor:
        lengths = [piece.place.length for piece in self.pieces]
        return torch.cat(
            [
                torch.zeros(length, dtype=self.optimizer_dtype, device=piece.master.device)
                if piece.master.grad is None
                else piece.master.grad
                for piece, length in zip(self.pieces, lengths, strict=True)
            ]
        )

    @staticmethod
    def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
        return gradient * scale if scale != 1.0 else gradient

    def _part(self, chunk: torch.Tensor, piece: ShardPiece) -> torch.Tensor:
        return chunk[piece.place.offset : piece.place.offset + piece.place.length].clone()  # is clipped in place

    def send_weights(self) -> Callable[[], None]:
        chunk = torch.cat([piece.master.detach() for piece in self.pieces]).to(self.bucket.dtype)
        pending = self.run.backend.start_all_gather(chunk, self.group)

        def finish() -> None:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, self._split(pending.wait()), strict=True):
                    parameter.copy_(value)

        return finish

    def reload(self) -> None:
        with torch.no_grad():
            chunk = self._own_weights()
            for piece in self.pieces:
                piece.master.copy_(self._part(chunk, piece))
