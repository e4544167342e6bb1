# SPDX-License-Identifier: Apache-2.0
"""Collectives through torch.distributed: gloo on the CPU, or a library that was installed for it, and the device
libraries nccl and (native) neuron.

No package of a device is imported here: a device is given by its name, and torch provides its process group.

With gloo a reduce-scatter is an all-to-all followed by a local sum in the order of the ranks: it sends the minimum,
half of what gloo's own reduce-scatter sends, and its result is deterministic. bfloat16 and float16 are summed in
float32 and rounded once, also in an all-reduce. All-reduces of float32 and wider dtypes use gloo's ring. Other
libraries compute sums themselves; one for the CPU must round as described here. The native Neuron device sums in
float32, so integers are sent as digits.

Objects, and tensors on the host, such as those of a model that is not on its device yet, are sent in a gloo group that
exists beside the group of the device.
"""

from __future__ import annotations

import atexit
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from neuron_accel.backends import payload, process_group
from neuron_accel.backends.base import OUTSIDE_GRAPHS, Backend
from neuron_accel.backends.board import Board, StoreBoard
from neuron_accel.backends.events import UNOBSERVED, Collective, Unobserved
from neuron_accel.backends.group import Done, Group, Pending, reported
from neuron_accel.backends.movement import (
    ReduceOp,
    is_inexact,
    join_chunks,
    normalize_dim,
    reduce_rows,
    split_chunks,
    sum_rows_into,
)
from neuron_accel.errors import UsageError

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# dtypes that gloo supports; others are sent as bytes
_CARRIED = {
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
_OF_ALL_GATHERS = 1 << 30
"""Tag of their messages, which a program is not likely to use for its own. Every rank starts the all-gathers of a group
in the same order, in which messages arrive."""
# dtypes that gloo sums itself; all others are reduced locally by torch
_GLOO_SUMS = {torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128}


class TorchBackend(Backend):
    """Backend for ranks that are connected by torch.distributed, or for a single rank. Created by :meth:`connect`.

    Args:
        device: the device of the tensors.
        owns_default_group: whether :meth:`shutdown` destroys the default process group.
        timeout: timeout of collectives in groups created here; None for torch's default.
        library: torch's name of what connects ranks if the device is the CPU. It may give gloo's groups to ranks that
            it cannot connect.
    """

    name: ClassVar[str] = "torch"
    overlaps = True

    def __init__(
        self,
        device: torch.device,
        *,
        owns_default_group: bool = False,
        timeout: timedelta | None = None,
        library: str = "gloo",
    ) -> None:
        super().__init__()
        self.device, self._on_cpu = device, device.type == "cpu"
        self._owns_default_group = owns_default_group
        self._timeout = timeout
        connected = dist.is_initialized()
        self.rank = dist.get_rank() if connected else 0
        self.world_size = dist.get_world_size() if connected else 1
        self._handles: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._hosts: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._library = library
        self._closed = False
        if connected:
            atexit.register(self.shutdown)
        # The native Neuron device documents equal splits and no sums of integers, which its compiler may reject.
        known = device.type in ("cpu", "cuda")
        self.reads_are_free = self._on_cpu
        self.has_point_to_point = self.has_uneven_all_to_all = self.sums_integers_exactly = known
        self._why_no_point_to_point = None if known else "whether ranks can send to each other was not tried"

    @classmethod
    def connect(
        cls,
        device: torch.device | str | None = None,
        *,
        timeout: timedelta | None = None,
        adopts: bool = False,
        tries_sending: bool = True,
        library: str = "gloo",
    ) -> TorchBackend:
        """Returns the backend of this process.

        Uses the default process group if it is initialized. Otherwise initializes it if ``WORLD_SIZE``, as set by
        torchrun, is greater than 1, or else returns a backend for one rank.

        Args:
            device: ``"cpu"``, ``"cuda"`` or ``"neuron"``, with or without an index; the CPU by default.
            timeout: timeout of a collective; 30 minutes by default.
            adopts: whether :meth:`shutdown` destroys a default process group that was initialized before.
            tries_sending: whether to probe point-to-point messages on devices where it is not known that they work. If
                False, such a device does not have them.
            library: torch's name of what connects ranks where the device is the CPU.

        Raises:
            UsageError: if there is no such device, or the existing process group does not support it.
            CommunicationError: if the other ranks cannot be reached.
        """
        place, owns = process_group.join(device or "cpu", timeout, library)
        backend = cls(place, owns_default_group=owns or adopts, timeout=timeout, library=library)
        if not backend.has_point_to_point and backend.world_size > 1 and tries_sending:
            world = backend.new_group([range(backend.world_size)], "world")
            hosts = backend._host(world)
            backend._why_no_point_to_point = why = process_group.probe_point_to_point(place, hosts, timeout)
            backend.has_point_to_point = why is None
        return backend

    def __getstate__(self) -> dict[str, Any]:
        """Pickles a backend without its connections; in another process it is closed."""
        closed = {
            "_handles": {},
            "_hosts": {},
            "_closed": True,
            "_owns_default_group": False,
        }
        return {**self.__dict__, **closed}

    def __deepcopy__(self, memo: dict[int, Any]) -> TorchBackend:
        return self  # copies of a model communicate in the same groups

    @property
    def missing(self) -> Mapping[str, str]:
        why = self._why_no_point_to_point
        return super().missing if why is None else {"point-to-point": why}

    # ---- groups ------------------------------------------------------------------------------------------------------
    def new_group(self, partition: Sequence[Sequence[int]], name: str) -> Group:
        """See :meth:`Backend.new_group`. The groups of a partition are created once and then reused."""
        self._check_open()
        group = Group.of(self.rank, partition, name, self.world_size)
        key = group.partition
        if key not in self._handles:
            with self._reported("new_group", group):
                self._handles[key] = self._make_handle(key)
        return replace(group, handle=self._handles[key])

    def _make_handle(self, key: tuple[tuple[int, ...], ...]) -> Any:
        if not self._on_cpu:
            self._hosts[key] = self._make_groups(key, "gloo")
        library = self._library if self._on_cpu else None
        serves = library is None or library == process_group.library_of_default("cpu")
        if len(key) == 1 and self.world_size > 1 and serves:
            return dist.group.WORLD
        if self.world_size > 1 and not serves:
            dist.barrier()  # on the default group, which notices a rank that has ended; making a group waits for it
        return self._make_groups(key, library)

    def _make_groups(self, key: tuple[tuple[int, ...], ...], library: str | None = None) -> Any:
        own = None
        for ranks in key:  # dist.new_group must be called by every rank, also for groups that it is not in
            if len(ranks) > 1:
                handle = dist.new_group(list(ranks), timeout=self._timeout, backend=library)
                own = handle if self.rank in ranks else own
        return own

    def _host(self, group: Group) -> Any:
        """Returns the gloo process group for objects. If there is a device, it exists beside the device's own group, so
        that no object has to be moved to the device and back."""
        return group.handle if self._on_cpu else self._hosts[group.partition]

    def _of(self, tensor: torch.Tensor, group: Group) -> Any:
        """Returns the process group for a tensor: gloo if the tensor is on the host, else the device's."""
        return self._host(group) if _on_host(tensor) else group.handle

    def _through_gloo(self, tensor: torch.Tensor, group: Group) -> bool:
        """Whether gloo moves a tensor; a group that the CPU's library leaves to gloo does not have its name."""
        if not _on_host(tensor):
            return False
        return not self._on_cpu or self._library == "gloo" or group.handle.name() != self._library

    def _sums_in_float32(self, tensor: torch.Tensor) -> bool:
        return not self.sums_integers_exactly and not is_inexact(tensor) and not _on_host(tensor)

    # ---- collectives on tensors --------------------------------------------------------------------------------------
    def start_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp = "sum") -> Pending:
        """See :meth:`Backend.all_reduce`. On the CPU max and min propagate NaN as in torch, and the sum of booleans is
        "any". There a sum of a dtype other than float32, float64, int32, int64 and complex takes two collectives, of
        which ``wait()`` starts the second; all ranks must therefore wait for their collectives in the same order."""
        if op not in _OPS:
            raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
        if group.size == 1 or not tensor.numel():
            return Done(tensor)
        tensor = tensor.detach()
        if self._sums_in_float32(tensor):
            return self._start_exact_all_reduce(tensor, group, op)
        if _on_host(tensor) and not (op == "sum" and tensor.dtype in _GLOO_SUMS):
            return self._start_two_step_all_reduce(tensor, group, op)
        shared = tensor.contiguous()
        sent = 2 * (group.size - 1) * shared.nbytes // group.size
        summed = [shared] if op == "sum" else ()
        send = functools.partial(self._all_reduce, shared, op, group)
        return self._start("all_reduce", group, sent, shared.dtype, send, lambda: shared, summed=summed)

    def _start_two_step_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp) -> Pending:
        """An all-reduce as an all-to-all, a local reduction by torch and an all-gather. Sends as many bytes as a
        ring."""
        count = -(-tensor.numel() // group.size)
        missing = group.size * count - tensor.numel()
        flat = tensor.contiguous().view(-1)
        rows = (F.pad(flat, (0, missing)) if missing else flat).view(group.size, count)
        sent = 2 * (group.size - 1) * count * tensor.element_size()
        received = torch.empty_like(rows)

        def finish() -> torch.Tensor:
            flat = self._start_gather(reduce_rows(received, op), group, "all_reduce", None).wait()
            return flat.reshape(-1)[: tensor.numel()].view(tensor.shape)

        summed = [flat] if op == "sum" else ()
        return self._start_exchange(rows, received, group, "all_reduce", sent, finish, summed=summed)

    def start_all_gather(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """See :meth:`Backend.all_gather`. A tensor without dims is treated as one of shape ``[1]``."""
        if group.size == 1:
            return Done(tensor)
        tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        dim = normalize_dim(dim, tensor)
        sent = (group.size - 1) * tensor.nbytes
        return self._start_gather(tensor, group, "all_gather", sent, lambda rows: join_chunks(rows, dim))

    def start_all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, group: Group) -> Pending:
        """See :meth:`Backend.start_all_gather_into`. No buffer is copied."""
        if group.size == 1:
            return Done(out if out.data_ptr() == tensor.data_ptr() else out.copy_(tensor.view(out.shape)))
        send = functools.partial(self._all_gather, _flat(out.detach()), _flat(tensor.detach()), group)
        sent = (group.size - 1) * tensor.nbytes
        return self._start("all_gather", group, sent, tensor.dtype, send if out.numel() else None, lambda: out)

    def start_reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """See :meth:`Backend.reduce_scatter`."""
        if group.size == 1:
            return Done(tensor)
        rows = split_chunks(tensor.detach(), dim, group.size).contiguous()
        if self._sums_in_float32(tensor):
            return self._start_exact_reduce_scatter(tensor.detach(), group, normalize_dim(dim, tensor))
        sent = (group.size - 1) * rows.nbytes // group.size
        sums: dict[str, Any] = {"summed": [rows], "scattered": True}
        if _on_host(tensor) and (rows.dtype == torch.bool or not rows.numel() or self._through_gloo(tensor, group)):
            received = torch.empty_like(rows)
            return self._start_exchange(
                rows, received, group, "reduce_scatter", sent, lambda: reduce_rows(received, "sum"), **sums
            )
        result = torch.empty_like(rows[0])
        send = functools.partial(self._reduce_scatter, result.view(-1), rows.view(-1), group)
        return self._start("reduce_scatter", group, sent, rows.dtype, send, lambda: result, **sums)

    def start_reduce_scatter_into(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        group: Group,
        *,
        scale: float = 1.0,
        scratch: torch.Tensor | None = None,
    ) -> Pending:
        """See :meth:`Backend.start_reduce_scatter_into`."""
        is_direct = out.dtype == tensor.dtype != torch.bool and not self._sums_in_float32(tensor)
        if group.size == 1 or not tensor.numel() or not (is_direct or self._through_gloo(tensor, group)):
            return super().start_reduce_scatter_into(out, tensor, group, scale=scale, scratch=scratch)
        rows = tensor.detach().view(group.size, -1)
        sent = (group.size - 1) * rows.nbytes // group.size
        sums: dict[str, Any] = {"summed": [rows], "scattered": True, "scale": scale}
        if not self._through_gloo(tensor, group):
            averages = _on_host(tensor) and scale == 1 / group.size and is_inexact(tensor)
            op, rest = (dist.ReduceOp.AVG, 1.0) if averages else (dist.ReduceOp.SUM, scale)
            send = functools.partial(self._reduce_scatter, out, rows.view(-1), group, op)
            finish = (lambda: out) if rest == 1.0 else lambda: out.mul_(rest)
            return self._start("reduce_scatter", group, sent, rows.dtype, send, finish, **sums)
        # What the first and the last rank send is contiguous, so their own chunk need not be copied.
        first, last = int(group.index == 0), group.size - int(group.index == group.size - 1)
        received = torch.empty_like(rows[first:last]) if scratch is None else scratch.view_as(rows)[first:last]
        outgoing, incoming = _flat(rows[first:last]), _flat(received)
        counts = [outgoing.numel() // (last - first) if first <= i < last else 0 for i in range(group.size)]
        terms = [received[i - first] if first <= i < last else rows[i] for i in range(group.size)]
        send = functools.partial(self._all_to_all, incoming, outgoing, group, counts, counts)
        finish = functools.partial(sum_rows_into, out, terms, scale)
        return self._start("reduce_scatter", group, sent, rows.dtype, send, finish, **sums)

    def start_all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Pending:
        """See :meth:`Backend.start_all_to_all`."""
        if group.size == 1:
            return Done(tensor)
        concat_dim = normalize_dim(concat_dim, tensor)
        rows = split_chunks(tensor.detach(), split_dim, group.size).contiguous()
        sent, received = (group.size - 1) * rows.nbytes // group.size, torch.empty_like(rows)
        return self._start_exchange(
            rows, received, group, "all_to_all", sent, lambda: join_chunks(received, concat_dim)
        )

    def all_to_all_uneven(
        self, tensor: torch.Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """See :meth:`Backend.all_to_all_uneven`."""
        if group.size == 1 or not self.has_uneven_all_to_all:
            return super().all_to_all_uneven(tensor, group, sent, received)
        if len(sent) != group.size or len(received) != group.size or sum(sent) != tensor.shape[0]:
            raise ValueError(
                f"{list(sent)} rows sent and {list(received)} received do not fit a group of {group.size} ranks and a "
                f"tensor of {tensor.shape[0]} rows"
            )
        rows = tensor.detach().contiguous()
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        row = math.prod(rows.shape[1:])
        sent_bytes = (sum(sent) - sent[group.index]) * row * rows.element_size()
        outgoing, incoming = _flat(rows), _flat(result)
        units = row * rows.element_size() // outgoing.element_size()  # some dtypes are viewed as bytes
        splits = [count * units for count in received], [count * units for count in sent]
        send = functools.partial(self._all_to_all, incoming, outgoing, group, *splits) if row else None
        return self._start("all_to_all_uneven", group, sent_bytes, rows.dtype, send, lambda: result).wait()

    def start_permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> Pending:
        """See :meth:`Backend.start_permute`. On a device without point-to-point messages it is an all-gather."""
        if shift % group.size == 0:
            return Done(tensor)
        tensor = tensor.detach()
        source = (group.index - shift) % group.size
        if not self.has_point_to_point and not _on_host(tensor):
            sent = (group.size - 1) * tensor.nbytes
            return self._start_gather(tensor, group, "permute", sent, lambda rows: rows[source].clone())
        result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        target = (group.index + shift) % group.size
        send = functools.partial(self._permute, _flat(result), _flat(tensor), group, target, source)
        return self._start(
            "permute", group, tensor.nbytes, tensor.dtype, send if tensor.numel() else None, lambda: result
        )

    def broadcast(self, tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
        """See :meth:`Backend.broadcast`. On the source rank the result is the input."""
        if group.size == 1:
            return tensor
        tensor = tensor.detach()
        if self._sums_in_float32(tensor):
            return self._exact_broadcast(tensor, group, source)
        sends = group.index == source
        event = self.events.collective("broadcast", group, tensor.nbytes if sends else 0, tensor.dtype)
        result = tensor if sends else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        with event, self._reported("broadcast", group):
            if tensor.numel():
                dist.broadcast(_flat(result), group.ranks[source], self._of(result, group))
        return result

    def chunk(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """See :meth:`Backend.chunk`. Returns a view."""
        if group.size == 1:
            return tensor
        return split_chunks(tensor, dim, group.size)[group.index]

    # ---- point to point ----------------------------------------------------------------------------------------------
    def start_send(self, tensor: torch.Tensor, group: Group, target: int) -> Pending:
        """See :meth:`Backend.start_send`."""
        shared = tensor.detach().contiguous()
        send = functools.partial(self._send, _flat(shared), group, target) if shared.numel() else None
        return self._start("send", group, shared.nbytes, shared.dtype, send, lambda: shared)

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, group: Group, source: int) -> Pending:
        """See :meth:`Backend.start_receive`."""
        result = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        receive = functools.partial(self._receive, _flat(result), group, source) if result.numel() else None
        return self._start("receive", group, 0, dtype, receive, lambda: result)

    # ---- collectives on objects --------------------------------------------------------------------------------------
    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        if group.size == 1:
            return [value]
        with self.events.collective("all_gather_object", group), self._reported("all_gather_object", group):
            return payload.all_gather(value, self._host(group))

    def gather_object(self, value: Any, group: Group, join: Callable[[Any, Any], Any] | None = None) -> Any:
        if group.size == 1:
            return super().gather_object(value, group, join)
        with self.events.collective("gather_object", group), self._reported("gather_object", group):
            return payload.gather(value, self._host(group), join)

    def broadcast_object(self, value: Any, group: Group, source: int = 0) -> Any:
        if group.size == 1:
            return value
        with self.events.collective("broadcast_object", group), self._reported("broadcast_object", group):
            return payload.broadcast(value, source, self._host(group))

    def barrier(self) -> None:
        if self.world_size > 1:
            world = self.new_group([range(self.world_size)], "world")
            with self.events.collective("barrier", world), self._reported("barrier", world):
                dist.barrier(group=self._host(world))

    # ---- steps -------------------------------------------------------------------------------------------------------
    @property
    def timeout(self) -> timedelta:
        return self._timeout or process_group.DEFAULT_TIMEOUT

    @property
    def device_memory(self) -> tuple[int, int] | None:
        if self._on_cpu:
            return None
        try:
            used = torch.accelerator.memory_allocated(self.device)
            return used, torch.accelerator.max_memory_allocated(self.device)
        except (AttributeError, NotImplementedError, RuntimeError):  # the device's allocator does not count
            return None

    def board(self) -> Board:
        return StoreBoard.of_default_group() if self.world_size > 1 else super().board()

    def shutdown(self) -> None:
        """Destroys the process groups that this backend created, including the default one if this backend owns it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        if dist.is_initialized() and self._owns_default_group:
            dist.destroy_process_group()  # with all others
        elif dist.is_initialized():
            for handle in (*self._handles.values(), *self._hosts.values()):
                if handle is not None and handle is not dist.group.WORLD:
                    dist.destroy_process_group(handle)
        process_group.let_threads_finish()

    # ---- implementation ----------------------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("The backend was shut down.", fix="do this before the end of training")

    def _reported(self, op: str, group: Group):
        self._check_open()
        return reported(op, f"rank {self.rank} of {self.world_size}, group {group.name!r} of ranks {list(group.ranks)}")

    # In what follows tensors are flat and contiguous, and calls return when the operation was started.
    def _all_reduce(self, tensor: torch.Tensor, op: ReduceOp, group: Group) -> Any:
        return dist.all_reduce(tensor, _OPS[op], group=self._of(tensor, group), async_op=True)

    def _all_gather(self, out: torch.Tensor, tensor: torch.Tensor, group: Group) -> Any:
        if self._through_gloo(tensor, group):
            return self._all_gather_by_gloo(out.chunk(group.size), tensor, group)
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        return call(out, tensor, group=self._of(tensor, group), async_op=True)

    def _all_gather_by_gloo(self, chunks: Sequence[torch.Tensor], tensor: torch.Tensor, group: Group) -> Any:
        """Sends this rank's chunk to each other rank. gloo's own all-gather, through a buffer that it allocates, takes
        more than twice as long for large tensors."""
        own = chunks[group.index]
        if own.data_ptr() != tensor.data_ptr():
            own.copy_(tensor)
        if group.size == 2:
            other = 1 - group.index
            counts = [own.numel() if index == other else 0 for index in range(2)]
            return self._all_to_all(chunks[other], own, group, counts, counts)
        works, handle = [], self._of(tensor, group)
        for step in range(1, group.size):
            source, target = (group.index - step) % group.size, (group.index + step) % group.size
            works.append(dist.irecv(chunks[source], group.ranks[source], handle, _OF_ALL_GATHERS))
            works.append(dist.isend(own, group.ranks[target], handle, _OF_ALL_GATHERS))
        return _Several(works, [own])

    def _all_to_all(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        group: Group,
        received: list[int] | None = None,
        sent: list[int] | None = None,
    ) -> Any:
        return dist.all_to_all_single(out, tensor, received, sent, group=self._of(tensor, group), async_op=True)

    def _send(self, tensor: torch.Tensor, group: Group, target: int) -> Any:
        return dist.isend(tensor, group.ranks[target], group=self._of(tensor, group))

    def _receive(self, tensor: torch.Tensor, group: Group, source: int) -> Any:
        return dist.irecv(tensor, group.ranks[source], group=self._of(tensor, group))

    def _permute(self, out: torch.Tensor, tensor: torch.Tensor, group: Group, target: int, source: int) -> Any:
        handle = self._of(tensor, group)
        sent = dist.P2POp(dist.isend, tensor, group.ranks[target], handle)
        received = dist.P2POp(dist.irecv, out, group.ranks[source], handle)
        return _Several(dist.batch_isend_irecv([sent, received]), [tensor])

    def _reduce_scatter(
        self, out: torch.Tensor, tensor: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM
    ) -> Any:
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return call(out, tensor, op=op, group=self._of(tensor, group), async_op=True)

    def _start(
        self,
        op: str,
        group: Group,
        sent: int | None,
        dtype: torch.dtype,
        send: Callable[[], Any] | None,
        finish: Callable[[], torch.Tensor],
        *,
        scale: float = 1.0,
        **sums: Any,
    ) -> Pending:
        """Starts a collective.

        Args:
            op, group, sent, dtype: see :class:`~neuron_accel.backends.events.Collective`; no bytes for a collective
                that is half of another one.
            send: starts it and returns a ``Work``; None if tensors have no elements.
            finish: returns the result when it is complete.
            scale: factor by which ``finish`` multiplies sums.
            sums: what is summed.
        """
        event = UNOBSERVED if sent is None else self.events.collective(op, group, sent, dtype, **sums)
        with event, self._reported(op, group):
            work = None if send is None else send()
        if work is None:
            return Done(finish())
        return _Work(work, event, lambda: self._reported(op, group), finish, scale)

    def _start_exchange(
        self,
        rows: torch.Tensor,
        received: torch.Tensor,
        group: Group,
        op: str,
        sent: int,
        finish: Callable[[], torch.Tensor],
        **sums: Any,
    ) -> Pending:
        """Starts sending ``rows[i]`` to the i-th rank and receiving its row for this rank in ``received[i]``. Both
        tensors must be contiguous."""
        send = functools.partial(self._all_to_all, _flat(received), _flat(rows), group) if rows.numel() else None
        return self._start(op, group, sent, rows.dtype, send, finish, **sums)

    def _start_gather(
        self,
        tensor: torch.Tensor,
        group: Group,
        op: str,
        sent: int | None,
        finish: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> Pending:
        """Starts gathering the ranks' tensors as rows ``[group.size, *tensor.shape]``; ``finish`` maps them to the
        result."""
        rows = tensor.new_empty((group.size, *tensor.shape))
        send = functools.partial(self._all_gather, _flat(rows), _flat(tensor), group) if tensor.numel() else None
        return self._start(op, group, sent, tensor.dtype, send, lambda: finish(rows))


class _Work(Pending):
    """A ``Work`` of torch.distributed with its event, and a function that makes the result from the received
    buffers."""

    def __init__(
        self,
        work: Any,
        event: Collective | Unobserved,
        reporting: Callable[[], Any],
        finish: Callable[[], torch.Tensor],
        scale: float,
    ) -> None:
        self._work, self._event, self._reporting, self._finish, self._scale = work, event, reporting, finish, scale
        self._result: torch.Tensor | None = None

    @torch.compiler.disable(reason=OUTSIDE_GRAPHS)
    def wait(self) -> torch.Tensor:
        if self._result is None:
            with self._event.waiting():
                with self._reporting():
                    self._work.wait()
                self._result = self._finish()
                self._event.received([self._result], self._scale)
            del self._work, self._finish  # and the buffers they hold
        return self._result


class _Several:
    """Several ``Work`` objects as one.

    Args:
        works: the operations.
        buffers: the tensors that they send, kept alive until they are complete.
    """

    def __init__(self, works: Sequence[Any], buffers: Sequence[torch.Tensor]) -> None:
        self._works, self._buffers = works, buffers

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat buffer of a tensor's elements, in bytes if gloo does not have their dtype. It is a copy if the
    tensor is not contiguous, so what receives must be."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if _on_host(tensor) and flat.dtype not in _CARRIED else flat
