# SPDX-License-Identifier: Apache-2.0
"""The process group: collectives and messages through shared memory where they can be, else through gloo."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from neuron_accel_host.transport import Message, Operation, SharedMemory

NAME = "host"
"""Name of the backend, as in ``dist.init_process_group(NAME)``."""

_Base: Any = dist.ProcessGroup  # untyped, since its overloads are not implemented
_Work: Any = dist.distributed_c10d.Work
_CPU = torch.device("cpu")


def connect(options: Any, _: Any = None) -> Any:
    """Makes the group of this rank, as ``torch.distributed`` asks for it: gloo's if its ranks do not share a host, or
    if it has one rank only."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", options.store), rank, size, timeout)
    ranks = options.global_ranks_in_group or range(size)
    transport = SharedMemory.connect(rank, ranks, timeout, options.store) if size > 1 else None
    return gloo if transport is None else HostGroup(gloo, transport, rank, size)


class HostWork(_Work):
    """An operation that was started.

    Args:
        operation: in shared memory.
        tensors: its results.
    """

    def __init__(self, operation: Operation | Message, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._operation, self._tensors = operation, list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Completes the operation, and those of the group that were started before it.

        Raises:
            RuntimeError: if a rank has ended, calls another collective, or does not take part in time.
        """
        self._operation.wait(timeout or None)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._operation.test()

    def is_success(self) -> bool:
        return self._operation.test()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Future:
        """Returns a future, which a thread completes."""
        return self._operation.future(self._tensors)


class _Sent(_Work):
    """A message that was copied."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    is_success = is_completed


class _FromAny(_Work):
    """A message from whichever rank sends the next one."""

    def __init__(self, transport: SharedMemory, tensor: torch.Tensor) -> None:
        super().__init__()
        self._transport, self._tensor = transport, tensor
        self._source: int | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._source is None:
            self._source = self._transport.next_source(timeout or None)
            self._transport.receive(self._tensor, self._source).wait(timeout or None)
        return True

    def is_completed(self) -> bool:
        return self._source is not None

    def _source_rank(self) -> int:
        return -1 if self._source is None else self._source


class HostGroup(_Base):
    """A process group of ranks of one host.

    Sums (and averages) of all ranks, gathers, exchanges, broadcasts, barriers and messages of dense, contiguous CPU
    tensors pass through shared memory. Everything else is what gloo's group does: other reductions, operations with a
    root other than broadcasts, tags.

    Args:
        gloo: a group of the same ranks.
        transport: of these ranks.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(self, gloo: Any, transport: SharedMemory, rank: int, size: int) -> None:
        super().__init__(rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        self._register_backend(_CPU, kind, gloo)  # to which the methods of the base class belong
        self._set_default_backend(kind)
        self._gloo, self._transport, self._rank, self._size = gloo, transport, rank, size
        self._finalizer = weakref.finalize(self, transport.close)

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        """Waits until the other ranks have read what this one sent, and frees the memory."""
        self._finalizer()

    def abort(self) -> None:
        """Frees the memory at once."""
        self._finalizer.detach()
        self._transport.close(0.0)

    # ---- sums --------------------------------------------------------------------------------------------------------
    def allreduce(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        scale = None if more or not _is_single(tensors) else self._scale(opts, tensors)
        if scale is None:
            return self._through_gloo(self._gloo.allreduce, tensors, opts, **more)
        return HostWork(self._transport.all_reduce(_flat(tensors[0]), scale), tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        scale = self._scale(opts, tensors)
        if scale is None:
            return self._through_gloo(self._gloo.allreduce_coalesced, tensors, opts)
        return HostWork([self._transport.all_reduce(_flat(tensor), scale) for tensor in tensors][-1], tensors)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        scale = self._scale(opts, [output, tensor])
        if scale is None or not self._is_one_of(output, tensor):
            return self._through_gloo(getattr(self._gloo, _REDUCE_SCATTER), output, tensor, opts)
        rows = _flat(tensor).view(self._size, -1)
        return HostWork(self._transport.reduce_scatter(_flat(output), rows, scale), [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return _Several([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _scale(self, opts: Any, tensors: Sequence[torch.Tensor]) -> float | None:
        """Returns what the sum of the ranks is multiplied by, or None if gloo reduces these tensors."""
        if any(tensor.dtype is torch.bool for tensor in tensors) or not _are_plain(tensors):
            return None
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        if op == dist.ReduceOp.SUM:
            return 1.0
        return 1 / self._size if op == dist.ReduceOp.AVG and tensors[0].is_floating_point() else None

    # ---- copies ------------------------------------------------------------------------------------------------------
    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Any:
        if _is_single(tensors) and len(outputs) == 1 and len(outputs[0]) == self._size:
            rows, tensor = outputs[0], tensors[0]
            if _are_plain([tensor, *rows]) and all(_like(row, tensor) for row in rows):
                return HostWork(self._transport.all_gather([_flat(row) for row in rows], _flat(tensor)), rows)
        return self._through_gloo(self._gloo.allgather, outputs, tensors, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        if not _are_plain([output, tensor]) or not self._is_one_of(tensor, output):
            return self._through_gloo(getattr(self._gloo, _ALL_GATHER), output, tensor, opts)
        rows = _flat(output).view(self._size, -1)
        return HostWork(self._transport.all_gather(list(rows), _flat(tensor)), [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], tensors: list[torch.Tensor], opts: Any = None
    ) -> Any:
        return _Several([self.all_gather_single(*pair, opts) for pair in zip(outputs, tensors, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        received: Sequence[int] = (),
        sent: Sequence[int] = (),
        opts: Any = None,
    ) -> Any:
        incoming, outgoing = _lengths(output, received, self._size), _lengths(tensor, sent, self._size)
        fits = _are_plain([output, tensor]) and output.dtype == tensor.dtype
        if incoming is None or outgoing is None or not fits:
            splits = list(received), list(sent)
            return self._through_gloo(getattr(self._gloo, _ALL_TO_ALL), output, tensor, *splits, opts)
        return HostWork(self._transport.all_to_all(_flat(output), _flat(tensor), incoming, outgoing), [output])

    alltoall_base = all_to_all_single

    def broadcast(self, tensors: Any, opts: Any = None, **more: Any) -> Any:
        if more or not hasattr(opts, "rootRank") or not _is_single(tensors) or not _are_plain(tensors):
            return self._through_gloo(self._gloo.broadcast, tensors, opts, **more)
        return HostWork(self._transport.broadcast(_flat(tensors[0]), opts.rootRank), tensors)

    def barrier(self, opts: Any = None) -> Any:
        return HostWork(self._transport.barrier(), [])

    # ---- messages ----------------------------------------------------------------------------------------------------
    def send(self, tensors: list[torch.Tensor], target: int, tag: int = 0) -> Any:
        if self._has_tag(tensors, target, tag):
            return self._gloo.send(tensors, target, tag)
        self._transport.send(_flat(tensors[0]), target)
        return _Sent()

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        if self._has_tag(tensors, source, tag):
            return self._gloo.recv(tensors, source, tag)
        return HostWork(self._transport.receive(_flat(tensors[0]), source), tensors)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Any:
        if self._has_tag(tensors, None, tag):
            return self._gloo.recv_anysource(tensors, tag)
        return _FromAny(self._transport, _flat(tensors[0]))

    def _has_tag(self, tensors: Sequence[torch.Tensor], other: int | None, tag: int) -> bool:
        """Whether gloo moves a message: both ends must decide alike, so that its tensor does not matter.

        Raises:
            ValueError: if shared memory has to move it and cannot.
        """
        if tag:
            return True
        if other == self._rank:
            raise ValueError(f"rank {self._rank} of the group cannot send to itself")
        if len(tensors) != 1 or not _are_plain(tensors):
            raise ValueError(f"the backend {NAME!r} sends one dense, contiguous CPU tensor at a time")
        return False

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def _through_gloo(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Calls a method of gloo, which knows all overloads, with these arguments; the last one may be None."""
        return call(*(arguments if arguments[-1] is not None else arguments[:-1]), **more)

    def _is_one_of(self, part: torch.Tensor, whole: torch.Tensor) -> bool:
        return part.dtype == whole.dtype and part.numel() * self._size == whole.numel()


class _Several(_Work):
    """Several ``Work`` objects as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


# torch 2.13 has renamed these
_ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL = (
    new if hasattr(dist.ProcessGroupGloo, new) else old
    for new, old in (
        ("all_gather_single", "_allgather_base"),
        ("reduce_scatter_single", "_reduce_scatter_base"),
        ("all_to_all_single", "alltoall_base"),
    )
)


def _is_single(tensors: Any) -> bool:
    return isinstance(tensors, list | tuple) and len(tensors) == 1


def _are_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return all(t.device.type == "cpu" and t.layout is torch.strided and t.is_contiguous() for t in tensors)


def _like(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.numel() == other.numel()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1)


def _lengths(tensor: torch.Tensor, rows: Sequence[int], size: int) -> list[int] | None:
    """Returns how many elements of a tensor belong to each rank, or None if the rows do not fit."""
    count = tensor.shape[0] if tensor.dim() else 0
    if not rows and count % size == 0:
        rows = [count // size] * size
    if len(rows) != size or sum(rows) != count:
        return None
    row = tensor.numel() // count if count else 0
    return [each * row for each in rows]
