# SPDX-License-Identifier: Apache-2.0
"""This rank's shard of a bucket whose parameters are views of one flat buffer, so that weights are gathered in place.

Gradients are copied into a send buffer as they arrive, while they are in the cache, and released at once. Buckets use a
few buffers in turn, which are kept from step to step, since newly allocated memory costs a page fault for every page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.backends.group import Then
from neuron_accel.engine.optim.buckets import check_dense
from neuron_accel.engine.shards.partition import Span
from neuron_accel.engine.shards.shard import BucketShard, ParameterShard, updated
from neuron_accel.engine.shards.sharded_grad import ShardedGrad
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group
    from neuron_accel.backends.group import Pending
    from neuron_accel.engine.sharding.parameters import ParameterRecord


class Buffer:
    """Memory for the gradients of a bucket that are sent, and for those received from other ranks.

    Args:
        gradients: ``[partition.numel]`` or more.
        received: as many; None if it is allocated when gradients are sent.
    """

    def __init__(self, gradients: torch.Tensor, received: torch.Tensor | None) -> None:
        self.gradients, self.received = gradients, received
        self._slots: dict[EagerShard, list[torch.Tensor]] = {}

    def fits(self, numel: int, dtype: torch.dtype) -> bool:
        return self.gradients.dtype == dtype and numel <= self.gradients.numel() <= 4 * numel

    def slots(self, shard: EagerShard) -> list[torch.Tensor]:
        """Returns the slices for the gradients of the parameters of ``shard``."""
        if shard not in self._slots:
            self._slots[shard] = shard._split(self.gradients)
        return self._slots[shard]


class SendBuffers:
    """Buffers that buckets use in turn.

    Args:
        limit: maximum number of buckets whose reduction is pending; beyond it, the oldest is waited for.
        keeps: whether buffers are kept from step to step, and used again.
    """

    def __init__(self, limit: int = 2, *, keeps: bool = True) -> None:
        self._limit, self._keeps = limit, keeps
        self._travelling: deque[tuple[EagerShard, Buffer]] = deque()
        self._free: list[Buffer] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Buffer:
        """Returns a buffer for ``numel`` elements."""
        while len(self._travelling) >= self._limit:
            self._arrived()
        fitting = [buffer for buffer in self._free if buffer.fits(numel, dtype)]
        buffer = min(fitting, key=lambda b: b.gradients.numel(), default=None)
        if buffer is None:
            gradients = torch.empty(numel, dtype=dtype, device=device)
            return Buffer(gradients, torch.empty_like(gradients) if self._keeps else None)
        self._free.remove(buffer)
        return buffer

    def sent(self, shard: EagerShard, buffer: Buffer) -> None:
        """Must be called when the reduction of the gradients of ``shard`` in ``buffer`` was started."""
        self._travelling.append((shard, buffer))

    def wait(self, *, but: Collection[EagerShard] = ()) -> None:
        """Waits for all pending reductions, or for those that were started before the first one of ``but``."""
        while self._travelling and self._travelling[0][0] not in but:
            self._arrived()

    def _arrived(self) -> None:
        shard, buffer = self._travelling.popleft()
        shard.complete()
        if self._keeps:
            self._free.append(buffer)  # there are no more buffers of a size than were in use at the same time


class EagerShard(BucketShard):
    """The shard of a bucket whose parameters are views of one flat buffer.

    Args:
        buffers: the send buffers.
    """

    def __init__(self, *, buffers: SendBuffers, **common: Any) -> None:
        super().__init__(**common)
        self._buffers = buffers
        with torch.no_grad():
            self._flat = self._new_flat()
            self._chunk = self._masters_of(self._move_weights())
            self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self.pieces = [self._piece(span) for span in self.partition.spans(self.group.index)]
        self._memory: torch.Tensor | None = None  # memory of this rank's gradient, kept from step to step
        self._buffer: Buffer | None = None  # the buffer that is being filled
        self._slots: list[torch.Tensor] = []  # its slices
        self._filled: list[bool] = []
        self._still_there: list[bool] = []
        ends = sorted((o, o + s) for o, s in zip(self.partition.offsets, self.partition.sizes, strict=True))
        pairs = zip([(0, 0), *ends], [*ends, (self.partition.numel, 0)], strict=True)
        self._padding = [slice(end, begin) for (_, end), (begin, _) in pairs if end < begin]

    def _new_flat(self) -> torch.Tensor:
        return torch.zeros(self.partition.numel, dtype=self.bucket.dtype, device=self._device)

    def _move_weights(self) -> torch.Tensor:
        """Makes the parameters views of the flat buffer, and returns this rank's weights, ``[partition.chunk]``."""
        for parameter, view in zip(self.parameters, self._split(self._flat), strict=True):
            view.copy_(parameter)
            parameter.data = view
        return self._chunk_of(self._flat)

    def _masters_of(self, chunk: torch.Tensor) -> torch.Tensor:
        """What the optimizer updates, ``[partition.chunk]``, of which ``chunk`` are this rank's weights."""
        return chunk.to(self.optimizer_dtype, copy=True) if self.has_masters else chunk

    @property
    def has_masters(self) -> bool:
        """Whether the master weights are separate from the parameters."""
        return self.optimizer_dtype != self.bucket.dtype

    def _piece(self, span: Span) -> ParameterShard:
        parameter, view = self.parameters[span.parameter], span.of_chunk(self._chunk)
        if self._apart or parameter.dim() == 0:
            view = view.view(parameter.shape)
        return ParameterShard(parameter=parameter, span=span, master=nn.Parameter(view))

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def take_gradient(self, index: int) -> None:
        """Copies the gradient of a parameter into the buffer, or adds it to the gradient there, and releases it."""
        if self._buffer is None:
            self._buffer = self._buffers.take(self.partition.numel, self.reduce_dtype, self._device)
            self._slots = self._buffer.slots(self)
            self._filled = [False] * len(self.parameters)
            self._still_there = [False] * len(self.parameters)
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is None:
            return
        parameter.grad = None
        if isinstance(gradient, ShardedGrad):
            self._still_there[index] = gradient is self._visible[index]
            gradient = gradient.take_waiting()
            if gradient is None:
                return
        if gradient.is_sparse:
            check_dense(gradient, self.bucket.records[index])
        slot = self._slots[index]
        if self._filled[index]:
            slot.add_(gradient)
        else:
            slot.copy_(gradient)
        self._filled[index] = True

    def _take_as_buffer(self, gradient: torch.Tensor) -> None:
        """Sends the gradient of the only parameter from where it is, instead of a copy."""
        self._buffer, self._filled, self._still_there = Buffer(gradient.detach().view(-1), None), [True], [False]
        self.parameters[0].grad = None

    def send_gradients(self) -> None:
        for index, parameter in enumerate(self.parameters):
            if self._buffer is None or parameter.grad is not None:
                self.take_gradient(index)
        buffer, self._buffer, self._slots = self._buffer, None, []
        assert buffer is not None
        self.used = self._filled
        if self._gradient is not None:
            self.before_change()
            self._forget_all_but(self._still_there)
        for slot, is_filled in zip(buffer.slots(self), self._filled, strict=True):
            if not is_filled:
                slot.zero_()
        for gap in self._padding:
            buffer.gradients[gap].zero_()
        self._pending = self._start_reduction(buffer, 1.0 if self._is_partial else 1.0 / self.samples)
        self._buffers.sent(self, buffer)

    def _start_reduction(self, buffer: Buffer, scale: float) -> Pending:
        """Starts to sum this rank's chunk of the gradients over the ranks; the result is multiplied by ``scale``."""
        return self.run.backend.start_reduce_scatter_into(
            self._room(),
            buffer.gradients[: self.partition.numel],
            self.group,
            scale=scale,
            scratch=None if buffer.received is None else buffer.received[: self.partition.numel],
        )

    @property
    def _is_partial(self) -> bool:
        return self.run.group(*self.bucket.partial_axes).size > 1

    def _room(self) -> torch.Tensor:
        """Returns memory for this rank's shard of the gradients that are being reduced."""
        if self._gradient is not None:  # gradients of earlier passes, to which the new ones are added
            return torch.empty_like(self._gradient)
        if self._memory is None:
            self._memory = torch.empty(self._chunk.numel(), dtype=self.optimizer_dtype, device=self._device)
        return self._memory

    def _scaled_sum(self, scale: float, partial: Group) -> torch.Tensor:
        self._buffers.wait()
        self.complete()
        reduced, self._reduced = self._reduced, None
        assert reduced is not None
        if self._is_partial:
            reduced = self.run.backend.all_reduce(reduced, partial)
            if scale != 1.0:
                reduced.mul_(scale)
        return reduced

    def drop_gradients(self) -> None:
        super().drop_gradients()
        self._buffer, self._slots = None, []  # of a backward pass that was not completed

    def zero_gradients(self) -> None:
        super().zero_gradients()
        self._buffer, self._slots = None, []

    def _part(self, chunk: torch.Tensor, piece: ParameterShard) -> torch.Tensor:
        return piece.span.of_chunk(chunk).view(piece.master.shape)

    # ---- weights -----------------------------------------------------------------------------------------------------
    def send_weights(self) -> Callable[[], Any]:
        chunk = self._chunk.detach().to(self.bucket.dtype)
        # The parameters are views of the flat buffer.
        return self.run.backend.start_all_gather_into(self._flat, chunk, self.group).wait

    def sync_user_weights(self) -> None:
        """Copies assigned weights to the buffer, and makes the parameters views of it again. A master weight keeps its
        precision unless the weight has changed, in whatever way: values are compared."""
        with torch.no_grad():
            addresses = [parameter.data_ptr() for parameter in self.parameters]
            if addresses != self._addresses:
                self._take_assigned([i for i, address in enumerate(addresses) if address != self._addresses[i]])
            if self.has_masters:
                self._chunk.copy_(updated(self._chunk, self._chunk_of(self._flat)))

    def _take_assigned(self, assigned: list[int]) -> None:
        """Copies all weights to a new buffer: a loop may keep the memory that an assigned weight had, with the values
        of before, and assign it again."""
        for index in assigned:
            self._check_form(index)
        self._check_memory(assigned)
        self._flat = self._new_flat()
        chunk = self._move_weights()
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        if not self.has_masters:
            self._chunk = chunk
            for piece in self.pieces:
                piece.master.data = self._part(chunk, piece)

    def _check_memory(self, assigned: Sequence[int]) -> None:
        """Raises UsageError if tensors that were assigned have memory of other weights."""
        if not assigned:
            return
        wanted = {id(self.bucket.records[index]) for index in assigned}
        records = (record for records in self.run.parameter_maps for record in records)
        found = [(*_addresses(record.current), record) for record in records if record.current is not None]
        found.sort(key=itemgetter(0))
        for (_, end, one), (begin, _, other) in pairwise(found):
            if begin < end and begin and {id(one), id(other)} & wanted:  # 0: a weight without memory
                fqn, owner = (other.fqn, one.fqn) if id(other) in wanted else (one.fqn, other.fqn)
                raise UsageError(
                    f"The weight {fqn!r} was assigned memory of the weight {owner!r}.",
                    where=f"plugin {self._plugin!r}",
                    why="in one process a change of one would change the other; here each is in a buffer of its own",
                    fix="assign a copy (`other.data = weight.data.clone()`), or tie weights before `prepare`",
                )

    def reload(self) -> None:
        with torch.no_grad():
            for piece in self.pieces:
                flat = piece.parameter.reshape(-1)[piece.span.start : piece.span.stop]
                piece.master.copy_(flat.view(piece.master.shape))


class UnequalShard(EagerShard):
    """The shard of a bucket of whole parameters that would need much padding to have equal chunks: its chunks differ.

    Gradients are all-reduced, and each rank broadcasts its weights: 1.5 times as many bytes as equal chunks need, as in
    torch's ``ZeroRedundancyOptimizer``, and no padding.
    """

    def __repr__(self) -> str:
        elements, ranks = self._chunk.numel(), self.partition.degree
        return f"<{type(self).__name__} of {len(self.parameters)} parameters over {ranks} ranks: {elements} elements>"

    def _chunk_of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.partition.place(self.group.index)]

    def _gather_chunks(self, chunk: torch.Tensor) -> torch.Tensor:
        flat = chunk.new_empty(self.partition.numel)
        self._chunk_of(flat).copy_(chunk)
        self._receive_others(flat)
        return flat

    def _receive_others(self, flat: torch.Tensor) -> None:
        for rank in range(self.partition.degree):
            chunk = flat[self.partition.place(rank)]
            if chunk.numel():
                sent = self.run.backend.broadcast(chunk, self.group, rank)
                if rank != self.group.index:
                    chunk.copy_(sent)

    def _start_reduction(self, buffer: Buffer, scale: float) -> Pending:
        room, backend = self._room(), self.run.backend
        pending = backend.start_all_reduce(buffer.gradients[: self.partition.numel], self.group)
        return Then(pending, lambda total: room.copy_(self._chunk_of(total)).mul_(scale))

    def send_weights(self) -> Callable[[], Any]:
        if self.has_masters:
            self._chunk_of(self._flat).copy_(self._chunk)
        self._receive_others(self._flat)
        return lambda: None


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor, and of that after its last."""
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size() * bool(tensor.numel())


def suitable_cap(records: Sequence[ParameterRecord], cap_bytes: int) -> int:
    """Returns the size of buckets for these parameters: ``cap_bytes``, or less for a small model, so that reduction
    begins early and buffers are small compared to the model, but at least 1 MiB, so that latency does not dominate."""
    total = sum(r.current.numel() * r.current.element_size() for r in records if r.current is not None)
    return min(cap_bytes, max(total // 32, 1 << 20))
