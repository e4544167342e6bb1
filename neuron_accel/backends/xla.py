# SPDX-License-Identifier: Apache-2.0
"""Collectives through torch_xla: lazy tensors and one graph per step, on any PJRT device.

Operations are not executed at once. They are recorded in a graph, which :meth:`XlaBackend.step_boundary` compiles,
unless the same graph was compiled before, and executes. Therefore nothing here reads a tensor's value, and nothing that
differs between ranks is a Python number: that would be a constant of the graph and cost one compilation per rank.

The device sums in float32: integers are sent as float32 digits, 64-bit integers are gathered, and booleans are
converted to float32. ``pin_layout`` is always False: torch_xla turns an all-gather with pinned layout into an
all-reduce of zero-padded tensors, which sends twice as much, and cannot pin the layout of a coalesced reduce-scatter.
Tensors on the host are exchanged through :mod:`neuron_accel.backends.xla_channel`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.library import Library

from neuron_accel.backends.base import Backend
from neuron_accel.backends.board import Board
from neuron_accel.backends.events import Collective, Unobserved
from neuron_accel.backends.graph_recorder import GraphRecorder
from neuron_accel.backends.group import Done, Group, Pending
from neuron_accel.backends.movement import ReduceOp, is_inexact, normalize_dim, reduce_rows, split_chunks
from neuron_accel.backends.randomness import XlaGenerator
from neuron_accel.backends.xla_channel import MEETING, Alone, HostChannel, ProcessChannel, ThreadChannel
from neuron_accel.errors import UsageError

_OPS = ("sum", "max", "min")


def _autocast_attention() -> Library:
    """Lets autocast on XLA devices convert what attention receives, as it does on CPUs and GPUs: torch_xla's list of
    operations lacks it. Without this, queries and keys that were multiplied by positions in float32 meet values in
    bfloat16, which raises an error. Returns what has to be kept for as long as this should hold."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *rest: Any, **named: Any
    ) -> Any:
        def converted(x: Any) -> Any:
            return x.to(dtype) if x is not None and x.is_floating_point() else x

        dtype = torch.get_autocast_dtype("xla")
        with torch.autocast("xla", enabled=False):
            return torch.nn.functional.scaled_dot_product_attention(
                converted(query), converted(key), converted(value), converted(mask), *rest, **named
            )

    library = Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", attention, "AutocastXLA")
    return library


_AUTOCAST = _autocast_attention()  # once in a process, whose threads may be ranks


class XlaBackend(Backend):
    """Backend for ranks of PJRT. Created by :meth:`connect`.

    Args:
        channel: exchanges objects between ranks without the device.
    """

    name: ClassVar[str] = "xla"
    is_lazy = True
    sums_integers_exactly = False  # the CPU does, but graphs must be those of the device

    def __init__(self, channel: HostChannel) -> None:
        import torch_xla
        import torch_xla.runtime as xr

        super().__init__()
        self._channel = channel
        self.device = torch_xla.device()
        self.rank, self.world_size = xr.global_ordinal(), xr.world_size()
        self._handles: dict[tuple[tuple[int, ...], ...], Any] = {}
        self._indices: dict[tuple[tuple[tuple[int, ...], ...], int], torch.Tensor] = {}
        self._ring_problem: Callable[[Sequence[tuple[int, int]]], str | None] | None = None
        self._later: list[Callable[[], object]] = []
        self._alike = tuple(range(self.world_size))  # the ranks that execute the same graphs as this one
        self._recorder = GraphRecorder.of_environment(
            self.rank, self.device, channel.exchange_graphs(), channel.scanning()
        )

    @classmethod
    def connect(cls, *, timeout: timedelta | None = None) -> XlaBackend:
        """Returns the backend of this process, or of this thread if threads are ranks.

        ``dist.init_process_group("xla")`` creates a process group but does not set torch_xla's replication devices;
        only ``init_method="xla://"`` and Accelerate do. If they are not set, this method sets them.

        Raises:
            UsageError: if this process has several devices and its threads were not started by :func:`run_in_threads`,
                or if torch_xla knows fewer ranks than were launched.
            CommunicationError: if the other ranks cannot be reached.
        """
        import torch_xla.runtime as xr

        meeting = MEETING.get()
        if meeting is not None or xr.addressable_device_count() == 1:
            _set_replicas()
        if xr.world_size() == 1:
            _check_alone()
            return cls(Alone())
        if meeting is not None:
            return cls(ThreadChannel(meeting, xr.global_ordinal()))
        if xr.local_process_count() * xr.addressable_device_count() > 1 and xr.addressable_device_count() > 1:
            raise UsageError(
                f"This process has {xr.addressable_device_count()} XLA devices, one for each of its threads.",
                where="backend 'xla'",
                why="one process trains on one device",
                fix="start one process per device (neuron-accel launch, torchrun); in tests use "
                "neuron_accel.testing.run_ranks(..., backend='xla')",
            )
        return cls(ProcessChannel(timeout))

    @property
    def generator(self) -> XlaGenerator:
        return XlaGenerator(self.device)

    # ---- groups ------------------------------------------------------------------------------------------------------
    def new_group(self, partition: Sequence[Sequence[int]], name: str) -> Group:
        """See :meth:`Backend.new_group`.

        Raises:
            ValueError: if ``partition`` does not name every rank exactly once, or its groups differ in size.
        """
        group = Group.of(self.rank, partition, name, self.world_size)
        key = group.partition
        if len({len(ranks) for ranks in key}) > 1:
            raise ValueError(f"{key}: the replica groups of a collective must have equal size")
        if key not in self._handles:
            self._handles[key] = self._channel.new_group(key) if group.size > 1 else None
        return replace(group, handle=self._handles[key])

    def _index(self, group: Group, before: int = 0) -> torch.Tensor:
        """Returns the position in the group of this rank, or of the rank ``before`` positions before it, as an int64
        tensor of shape ``[1]`` on the device. Each partition has a tensor of its own, even if positions are equal:
        otherwise graphs of some ranks would have fewer inputs."""
        key = (group.partition, before % group.size)
        if key not in self._indices:
            self._indices[key] = torch.tensor([(group.index - before) % group.size]).to(self.device)
        return self._indices[key]

    def limit_rings(self, problem: Callable[[Sequence[tuple[int, int]]], str | None]) -> None:
        self._ring_problem = problem

    def number(self, value: float) -> torch.Tensor:
        """See :meth:`Backend.number`. With ``Tensor.to``, 0 and 1 would become constants of the graph."""
        import torch_xla.core.xla_model as xm

        return xm.send_cpu_data_to_device([torch.tensor(value, dtype=torch.float32)], self.device)[0]

    # ---- collectives on tensors --------------------------------------------------------------------------------------
    def start_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp = "sum") -> Pending:
        """See :meth:`Backend.all_reduce`. The sum of booleans is "any". The input is not changed."""
        if op not in _OPS:
            raise ValueError(f"op must be one of {', '.join(_OPS)}, got {op!r}")
        if group.size == 1 or not tensor.numel():
            return Done(tensor)
        tensor = tensor.detach()
        if self._on_host(tensor):
            return Done(reduce_rows(torch.stack(self.all_gather_object(tensor, group)), op))
        if not is_inexact(tensor):
            return self._start_exact_all_reduce(tensor, group, op)
        sent, summed = 2 * (group.size - 1) * tensor.nbytes // group.size, op == "sum"
        with self._between(tensor, group) as tensor:
            with self._added("all_reduce", group, sent, tensor, summed=[tensor] if summed else ()) as event:
                result = self._all_reduce(tensor, group, op)
                event.received([result])
            return Done(result)

    def _all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp) -> torch.Tensor:
        xm = self._collectives(tensor)
        return xm.all_reduce(op, tensor, groups=_replicas(group), pin_layout=False)

    def all_reduce_together(
        self, tensors: Sequence[torch.Tensor], group: Group, scale: float = 1.0
    ) -> list[torch.Tensor]:
        """See :meth:`Backend.all_reduce_together`. This is one collective with many operands, so the tensors are not
        concatenated. The results are the inputs."""
        if self._are_apart(group.ranks) or any(self._on_host(t) or not is_inexact(t) for t in tensors):
            return super().all_reduce_together(tensors, group, scale)
        tensors = [tensor.detach() for tensor in tensors]
        sent = 2 * (group.size - 1) * sum(tensor.nbytes for tensor in tensors) // group.size
        with self._added("all_reduce", group, sent, tensors[0], summed=tensors) as event:
            # torch_xla changes what it is given past functionalization: where a gradient was zeroed in place, an alias
            # that is made later would have the value before the reduction. A compiler removes the copies.
            summed = [tensor.clone() for tensor in tensors]
            xm = self._collectives(tensors[0])
            xm.all_reduce("sum", summed, scale, groups=_replicas(group), pin_layout=False)
            for tensor, value in zip(tensors, summed, strict=True):
                tensor.copy_(value)
            event.received(tensors, scale)
        return tensors

    def start_all_gather(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """See :meth:`Backend.all_gather`. A tensor without dims is treated as one of shape ``[1]``."""
        if group.size == 1:
            return Done(tensor)
        tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        dim = normalize_dim(dim, tensor)
        if self._on_host(tensor):
            return Done(torch.cat(self.all_gather_object(tensor, group), dim))
        sent = (group.size - 1) * tensor.nbytes
        with self._between(tensor, group) as tensor, self._added("all_gather", group, sent, tensor):
            xm = self._collectives(tensor)
            return Done(xm.all_gather(tensor, dim, groups=_replicas(group), pin_layout=False))

    def start_reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """See :meth:`Backend.reduce_scatter`."""
        if group.size == 1:
            return Done(tensor)
        tensor = tensor.detach()
        split_chunks(tensor, dim, group.size)  # raises an error for sizes that are not divisible
        self._refuse_host(tensor, "reduce_scatter")
        dim, replicas = normalize_dim(dim, tensor), _replicas(group)
        if not is_inexact(tensor):
            return self._start_exact_reduce_scatter(tensor, group, dim)
        sent = (group.size - 1) * tensor.nbytes // group.size
        with self._between(tensor, group) as tensor:
            rows = split_chunks(tensor, dim, group.size)
            with self._added("reduce_scatter", group, sent, tensor, summed=[rows], scattered=True) as event:
                xm = self._collectives(tensor)
                ranks = group.size
                result = xm.reduce_scatter(xm.REDUCE_SUM, tensor, 1.0, dim, ranks, groups=replicas, pin_layout=False)
                event.received([result])
            return Done(result)

    def start_all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Pending:
        """See :meth:`Backend.start_all_to_all`."""
        if group.size == 1:
            return Done(tensor)
        tensor = tensor.detach()
        split_chunks(tensor, split_dim, group.size)
        self._refuse_host(tensor, "all_to_all")
        split_dim, concat_dim = normalize_dim(split_dim, tensor), normalize_dim(concat_dim, tensor)
        sent = (group.size - 1) * tensor.nbytes // group.size
        with self._between(tensor, group) as tensor, self._added("all_to_all", group, sent, tensor):
            xm = self._collectives(tensor)
            groups = _replicas(group)
            return Done(xm.all_to_all(tensor, split_dim, concat_dim, group.size, groups=groups, pin_layout=False))

    def start_permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> Pending:
        """See :meth:`Backend.start_permute`. All groups of the partition are shifted by the same number of positions,
        in one collective of all ranks. If the machine cannot make this permutation (:meth:`Backend.limit_rings`), it is
        an all-gather, which sends and stores ``group.size - 1`` times as much.

        Raises:
            UsageError: if all ranks of the group run the same computation while other ranks run another
                (:meth:`run_apart`).
        """
        if shift % group.size == 0:
            return Done(tensor)
        tensor = tensor.detach()
        self._refuse_host(tensor, "permute")
        pairs = [(ranks[i], ranks[(i + shift) % group.size]) for ranks in group.partition for i in range(group.size)]
        if self._ring_problem is not None and self._ring_problem(pairs):
            rows = self.all_gather(tensor.unsqueeze(0), group)
            return Done(rows.index_select(0, self._index(group, before=shift)).squeeze(0))
        if len(self._alike) < self.world_size and set(self._alike).issuperset(group.ranks):
            raise UsageError(
                f"A permutation within {group.name!r} is not possible while other ranks run another computation.",
                where="backend 'xla', on one stage of a pipeline",
                why="it is one collective of all ranks, and ranks of other stages do not take part in it",
                fix="use a collective of the group (all_to_all, all_gather), or no pipeline",
            )
        everyone = tuple(range(self.world_size))
        with self._between(tensor, group, everyone) as tensor, self._added("permute", group, tensor.nbytes, tensor):
            return Done(self._collectives(tensor).collective_permute(tensor, [list(pair) for pair in pairs]))

    def broadcast(self, tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
        """See :meth:`Backend.broadcast`. On the device it is an all-reduce of the source's values and zeros."""
        if group.size == 1:
            return tensor
        tensor = tensor.detach()
        if self._on_host(tensor):
            return self.broadcast_object(tensor if group.index == source else None, group, source)
        if not tensor.numel():
            return tensor
        if not is_inexact(tensor):
            return self._exact_broadcast(tensor, group, source)
        index = self._index(group)
        sent = 2 * (group.size - 1) * tensor.nbytes // group.size
        with self._between(tensor, group) as tensor, self._added("broadcast", group, sent, tensor):
            mine = torch.where(index == source, tensor, torch.zeros_like(tensor))
            return self._all_reduce(mine.reshape(tensor.shape), group, "sum")

    def chunk(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """See :meth:`Backend.chunk`. The position is an input of the graph, so that all ranks trace the same graph."""
        if group.size == 1:
            return tensor
        rows = split_chunks(tensor.detach(), dim, group.size)
        if self._on_host(tensor):
            return rows[group.index].clone()
        return rows.index_select(0, self._index(group)).squeeze(0)

    # ---- activation checkpointing ------------------------------------------------------------------------------------
    def recompute(self, function: Callable[..., Any], *inputs: Any, **keywords: Any) -> Any:
        """See :meth:`Backend.recompute`. An optimization barrier prevents the compiler from merging the two calls."""
        from neuron_accel.backends.recompute import checkpoint_lazily

        return checkpoint_lazily(function, inputs, keywords, barrier=self.fence, generator=self.generator)

    # ---- the order of a compiled graph, and tensors without memory in it ---------------------------------------------
    def fence(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See :meth:`Backend.fence`. The copies exist in the graph only."""
        copies = [tensor.detach().clone() for tensor in tensors]
        if copies:
            self._collectives(copies[0]).optimization_barrier_(copies)
        return copies

    def placeholder(self, like: torch.Tensor) -> torch.Tensor:
        """See :meth:`Backend.placeholder`. It has a handle of data that never arrive, so no graph computes it."""
        from torch_xla.core.xla_builder import create_placeholder_tensor

        self._collectives(like if like.device.type == "xla" else torch.empty(0, device=self.device))
        return create_placeholder_tensor(tuple(like.shape), like.dtype)  # on the default device

    def is_placeholder(self, tensor: torch.Tensor) -> bool:
        import torch_xla

        lib = torch_xla._XLAC
        ask = getattr(lib, "_is_placeholder", None) or lib._is_placecholder  # so spelled up to 2.9
        return ask(tensor.detach())

    # ---- collectives on objects --------------------------------------------------------------------------------------
    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        if group.size == 1:
            return [value]
        with self.events.collective("all_gather_object", group):
            return self._channel.all_gather_object(value, group)

    def gather_object(self, value: Any, group: Group, join: Callable[[Any, Any], Any] | None = None) -> Any:
        if group.size == 1 or not isinstance(self._channel, ProcessChannel):
            return super().gather_object(value, group, join)
        with self.events.collective("gather_object", group):
            return self._channel.gather_object(value, group, join)

    def broadcast_object(self, value: Any, group: Group, source: int = 0) -> Any:
        if group.size == 1:
            return value
        with self.events.collective("broadcast_object", group):
            return self._channel.broadcast_object(value, group, source)

    def barrier(self) -> None:
        self._channel.barrier()

    # ---- steps and values --------------------------------------------------------------------------------------------
    def step_boundary(self) -> None:
        """Compiles the pending graph, unless the same graph was compiled before, and executes it. Collective over the
        ranks that run the same computation. Then calls the actions that :meth:`after_step` deferred."""
        self._execute(self._alike)
        later, self._later = self._later, []
        for action in later:
            action()

    def run_apart(self, group: Group) -> None:
        position = {rank: ranks.index(rank) for ranks in group.partition for rank in ranks}
        self._alike = tuple(rank for rank in sorted(position) if position[rank] == group.index)

    def _added(self, op: str, group: Group, sent: int, tensor: torch.Tensor, **options: Any) -> Collective | Unobserved:
        """Returns the event of a collective that is added to the graph."""
        return self.events.collective(op, group, sent, tensor.dtype, deferred=True, **options)

    @contextmanager
    def _between(
        self, tensor: torch.Tensor, group: Group, ranks: tuple[int, ...] | None = None
    ) -> Iterator[torch.Tensor]:
        """Context that makes the operations on the yielded tensor a graph of its own, if ranks of ``group`` run
        different computations. The pending graph is executed first, so that on all of these ranks the new graph has the
        tensor as its input and the result as its output.

        Args:
            ranks: all participating ranks, if they are more than the group.
        """
        ranks = ranks or group.ranks
        apart = self._are_apart(ranks)
        if apart:
            tensor = tensor.clone()  # an updated view would be computed again when it is read
            self.step_boundary()
        yield tensor
        if apart:
            self._execute(ranks)

    def _are_apart(self, ranks: tuple[int, ...]) -> bool:
        """Returns whether some of ``ranks`` run another computation than this rank."""
        return not set(self._alike).issuperset(ranks)

    def _execute(self, ranks: tuple[int, ...]) -> None:
        with self.events.open("execute the graph", "graph", part="device", ranks=ranks):
            if self._recorder is None:
                self._channel.execute(ranks)
            else:
                self._channel.execute(ranks, self._recorder.compiling(self._recorder.before(ranks)))

    def collects(self, tensors: Sequence[torch.Tensor]) -> bool:
        import torch_xla

        mine = [tensor for tensor in tensors if not self._on_host(tensor)]
        return bool(mine) and any(torch_xla._XLAC._check_tensor_need_materialization(mine))

    def after_step(self, action: Callable[[], object], *, reads_graph: bool) -> None:
        if reads_graph or self._later:
            self._later.append(action)
        else:
            action()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._on_host(tensor):
            self.step_boundary()
        return super().to_host(tensor)

    @property
    def device_memory(self) -> tuple[int, int] | None:
        import torch_xla.core.xla_model as xm

        try:
            found = xm.get_memory_info(self.device)
            return int(found["bytes_used"]), int(found["peak_bytes_used"])
        except (KeyError, RuntimeError):  # such as the CPU
            return None

    @property
    def compilations(self) -> int:
        import torch_xla.debug.metrics as metrics

        return metrics.counter_value("UncachedCompile") or 0

    @property
    def compile_seconds(self) -> float:
        import torch_xla.debug.metrics as metrics

        return (metrics.metric_data("CompileTime") or (0, 0.0))[1] / 1e9

    def graph_of(self, tensors: Sequence[torch.Tensor]) -> str:
        import torch_xla

        return torch_xla._XLAC._get_graph_hash(list(tensors)).hex()

    def board(self) -> Board:
        return self._channel.board()

    def shutdown(self) -> None:
        self._channel.close()

    # ---- implementation ----------------------------------------------------------------------------------------------
    def _collectives(self, tensor: torch.Tensor) -> Any:
        """Returns torch_xla's module of collectives. They are ordered by the default device of the calling thread,
        which is set here since autograd calls them from threads of its own."""
        import torch_xla
        import torch_xla.core.xla_model as xm

        device = str(tensor.device)
        if torch_xla._XLAC._xla_get_default_device() != device:
            torch_xla._XLAC._xla_set_default_device(device)
        return xm

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "xla"

    def _refuse_host(self, tensor: torch.Tensor, op: str) -> None:
        if self._on_host(tensor):
            raise UsageError(
                f"{op} of a tensor on {tensor.device} is not possible on the xla backend.",
                fix="move it to the device first: tensor.to(accelerator.device)",
            )


def _set_replicas() -> None:
    """Sets torch_xla's replication devices to those of all ranks, unless they are set."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    known = torch_xla._XLAC._xla_get_replication_devices_count()
    if not known and xr.global_device_count() > 1 and not xr.is_spmd():
        xm.set_replication(torch_xla.device(), xm.get_xla_supported_devices())


def _check_alone() -> None:
    """Raises :class:`UsageError` if this process is one of several ranks and torch_xla treats it as the only one."""
    import torch_xla.runtime as xr

    launched, devices = int(os.environ.get("WORLD_SIZE", "1")), xr.global_device_count()
    if xr.is_spmd() or launched == 1:
        return
    if devices > 1:
        raise UsageError(
            f"torch_xla treats this process as the only rank, but {launched} were launched.",
            where="backend 'xla'",
            why="the number of ranks was read before torch_xla was connected to the others, and it caches that value",
            fix='call dist.init_process_group("xla", init_method="xla://") before any other function of torch_xla, or '
            "connect (NeuronAccelerator, ZeroRedundancyOptimizer) before xr.world_size() and xr.global_ordinal()",
        )
    raise UsageError(
        f"{launched} ranks were launched, but torch_xla finds {devices} device in total.",
        where=f"backend 'xla' on {xr.device_type()}",
        why="each rank would train alone: PJRT connects processes on Neuron devices, on the CPU only threads",
        fix="leave the backend to be chosen (unset NEURON_ACCEL_BACKEND), or launch one rank; in tests use "
        "neuron_accel.testing.run_ranks(..., backend='xla')",
    )


def _replicas(group: Group) -> list[list[int]]:
    return [list(ranks) for ranks in group.partition]
