# SPDX-License-Identifier: Apache-2.0
"""Communication of XLA ranks without the device: objects, tensors on the host, and the time of execution.

Objects such as plans and file names are not sent through the device, which compiles a graph for every shape. Ranks that
are processes exchange them through torch.distributed on the host. Ranks that are threads of one process, which is how
torch_xla uses several devices from one process, exchange them in memory.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

from neuron_accel.backends import payload
from neuron_accel.backends.board import Board, LocalBoard, StoreBoard
from neuron_accel.backends.group import Group, reported
from neuron_accel.errors import CommunicationError

COMPILE_TIMEOUT_S = 300.0
DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Timeout of an exchange between processes."""


class HostChannel(ABC):
    """Interface of communication between ranks without the device."""

    @abstractmethod
    def new_group(self, partition: Sequence[Sequence[int]]) -> Any:
        """Creates the groups of ``partition`` and returns the value for ``group.handle``. Collective over all ranks."""

    @abstractmethod
    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        """Returns the picklable ``value`` of every rank, in the order of the group."""

    @abstractmethod
    def broadcast_object(self, value: Any, group: Group, source: int) -> Any:
        """Returns the ``value`` of the rank at position ``source``."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    def board(self) -> Board:
        """Returns the :class:`Board` that all ranks share."""
        return LocalBoard()

    def execute(self, ranks: tuple[int, ...], compiling: AbstractContextManager[None] | None = None) -> None:
        """Executes the pending graph of the device, asynchronously if possible. Collective over ``ranks``.

        Args:
            ranks: the ranks that execute the same graph, this one included.
            compiling: a context that is entered by the rank that compiles, while it compiles.
        """
        import torch_xla

        with compiling or nullcontext():
            torch_xla.sync()

    def scanning(self) -> AbstractContextManager[Any]:
        """Returns a context that one rank of a process can be in at a time."""
        return nullcontext()

    def exchange_graphs(self) -> Callable[[str, tuple[int, ...]], list[str]] | None:
        """Returns an all-gather of strings over given ranks, or None if ranks with different graphs do not deadlock."""
        return None

    def close(self) -> None:  # noqa: B027  most channels have nothing to release
        """Releases connections. Idempotent."""


class Alone(HostChannel):
    """Channel of a single rank."""

    def new_group(self, partition: Sequence[Sequence[int]]) -> Any:
        return None

    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, group: Group, source: int) -> Any:
        return value

    def barrier(self) -> None:
        return


class ProcessChannel(HostChannel):
    """Channel of ranks that are processes: gloo groups of torch.distributed beside the device's own process group.

    Args:
        timeout: timeout of an exchange; None for torch's default.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        self._timeout = timeout
        self._owns_default = not dist.is_initialized()
        if self._owns_default:
            dist.init_process_group("gloo", timeout=timeout)
        self._world = dist.new_group(backend="gloo", timeout=timeout)
        self._everyone = _HostGroup(self._world)
        store = _get_default_store()
        number = store.add(
            f"neuron_accel_host/rank{dist.get_rank()}", 1
        )  # distinguishes keys from an earlier channel's
        self._store = dist.PrefixStore(f"neuron_accel_host/{number}", store)
        self._groups = 0

    def new_group(self, partition: Sequence[Sequence[int]]) -> _HostGroup:
        """See :meth:`HostChannel.new_group`. All ranks must create the same partitions in the same order, but only the
        members of a group connect, at its first use. (:func:`torch.distributed.new_group` involves all ranks.)"""
        import torch.distributed as dist

        if len(partition) == 1:
            return self._everyone
        self._groups += 1
        rank = dist.get_rank()
        ranks = next(list(ranks) for ranks in partition if rank in ranks)
        store = dist.PrefixStore(f"{self._groups}/{ranks[0]}", self._store)
        timeout = self._timeout or DEFAULT_TIMEOUT
        return _HostGroup(lambda: dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), timeout))

    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        with reported("all_gather_object", f"group {group.name!r} of ranks {list(group.ranks)}"):
            return group.handle.all_gather_object(value)

    def gather_object(self, value: Any, group: Group, join: Callable[[Any, Any], Any] | None) -> Any:
        """See :meth:`Backend.gather_object`."""
        with reported("gather_object", f"group {group.name!r} of ranks {list(group.ranks)}"):
            return group.handle.gather_object(value, join)

    def broadcast_object(self, value: Any, group: Group, source: int) -> Any:
        with reported("broadcast_object", f"group {group.name!r} of ranks {list(group.ranks)}"):
            return group.handle.broadcast_object(value, source)

    def barrier(self) -> None:
        import torch.distributed as dist

        with reported("barrier", "all ranks"):
            dist.barrier(group=self._world)

    def board(self) -> Board:
        return StoreBoard.of_default_group()

    def close(self) -> None:
        import torch.distributed as dist

        if self._owns_default and dist.is_initialized():
            self._owns_default = False
            dist.destroy_process_group()


class _HostGroup:
    """Collectives on objects between some processes, over gloo.

    Args:
        group: the process group, or a function that creates it, which is called at the first use.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_gather_object(self, value: Any) -> list[Any]:
        return payload.all_gather(value, self._connected())

    def gather_object(self, value: Any, join: Callable[[Any, Any], Any] | None) -> Any:
        return payload.gather(value, self._connected(), join)

    def broadcast_object(self, value: Any, source: int) -> Any:
        return payload.broadcast(value, source, self._connected())

    def _connected(self) -> Any:
        if callable(self._group):
            self._group = self._group()
        return self._group


class Meeting:
    """Synchronizes the ranks that are threads of one process.

    Args:
        size: number of ranks.
        timeout: seconds that a rank waits for the others.
    """

    def __init__(self, size: int, timeout: float = COMPILE_TIMEOUT_S) -> None:
        self.size, self.timeout = size, timeout
        self.one_at_a_time = threading.Lock()
        self.scanning = threading.Lock()
        self.board = LocalBoard()
        self._lock = threading.Lock()
        self._rooms: dict[tuple[int, ...], _Room] = {}
        self._leader_done = threading.Event()
        self._executing = threading.Lock()
        self._gone = False

    def exchange(self, value: Any, ranks: tuple[int, ...], index: int) -> list[Any]:
        """Returns copies of the ``value`` of every rank, as between processes. Collective over ``ranks``.

        Raises:
            CommunicationError: if a rank does not arrive within the timeout.
        """
        with self._lock:
            room = self._rooms.setdefault(ranks, _Room(len(ranks)))
            if self._gone:
                room.abort()
        room.slots[index] = payload.dump(value)
        self._wait(room, ranks)
        values = [payload.load(slot) for slot in room.slots]
        self._wait(room, ranks)
        return values

    def abort(self) -> None:
        """Makes all current and future waits fail, because a rank has failed."""
        with self._lock:
            self._gone = True
            for room in self._rooms.values():
                room.abort()

    def _wait(self, room: _Room, ranks: tuple[int, ...]) -> None:
        if not room.wait(self.timeout):
            raise CommunicationError(
                f"The ranks {list(ranks)} did not all arrive.",
                why="one of them has failed, waits for something else, or was too slow",
                fix="look for the first error of another rank",
            )

    def execute(
        self, ranks: tuple[int, ...], index: int, compiling: AbstractContextManager[None] | None = None
    ) -> None:
        """Executes the pending graph of each of ``ranks``, which is compiled once.

        The CPU client of PJRT matches the participants of a collective by the compiled module, so a collective would
        not complete if each rank compiled the graph itself. The first rank compiles, and the others start when the
        result is in the cache, which all threads of a process share. Other ranks than ``ranks`` wait meanwhile, because
        a graph that they add to the cache would be mistaken for the result. No rank releases its collective token
        before all have executed, because releasing takes the GIL, which another rank may need to execute.
        """
        import torch_xla

        self.exchange(None, ranks, index)
        with self._executing if index == 0 else nullcontext():
            if index == 0:
                self._leader_done.clear()
            before = self.exchange(_graphs() if index == 0 else 0, ranks, index)[0]
            with (compiling if index == 0 else None) or nullcontext():
                self._run(before, leads=index == 0)
            self.exchange(None, ranks, index)
        torch_xla.sync()

    def _run(self, before: int, *, leads: bool) -> None:
        import torch_xla

        if not leads:
            self._await_leader(before)
        device = torch_xla._XLAC._xla_get_default_device()
        torch_xla._XLAC._xla_step_marker(device, [], wait=True, reset_scope=True)
        if leads:
            self._leader_done.set()

    def _await_leader(self, before: int) -> None:
        deadline = time.monotonic() + self.timeout
        while _graphs() == before and not self._leader_done.is_set():
            if self._gone or time.monotonic() > deadline:
                raise CommunicationError(
                    "The first rank neither compiled nor found its graph.",
                    why="it has failed, or compiling takes longer than " + f"{self.timeout:g} s",
                )
            time.sleep(0.001)


class ThreadChannel(HostChannel):
    """Channel of ranks that are threads of one process.

    Args:
        meeting: synchronizes the threads; the same object for all.
        rank: this rank.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank

    def new_group(self, partition: Sequence[Sequence[int]]) -> Any:
        return None

    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        return self._meeting.exchange(value, group.ranks, group.index)

    def broadcast_object(self, value: Any, group: Group, source: int) -> Any:
        return self.all_gather_object(value if group.index == source else None, group)[source]

    def barrier(self) -> None:
        self._meeting.exchange(None, tuple(range(self._meeting.size)), self._rank)

    def board(self) -> Board:
        return self._meeting.board

    def execute(self, ranks: tuple[int, ...], compiling: AbstractContextManager[None] | None = None) -> None:
        self._meeting.execute(ranks, ranks.index(self._rank), compiling)

    def scanning(self) -> AbstractContextManager[Any]:
        return self._meeting.scanning

    def exchange_graphs(self) -> Callable[[str, tuple[int, ...]], list[str]]:
        return lambda value, ranks: self._meeting.exchange(value, ranks, ranks.index(self._rank))


MEETING: ContextVar[Meeting | None] = ContextVar("neuron_accel.meeting", default=None)
"""The :class:`Meeting` of the current thread, set by the code that starts a thread for each rank."""


def one_at_a_time() -> AbstractContextManager[Any]:
    """Returns a context that one rank at a time enters if ranks are threads of one process; else it does nothing."""
    meeting = MEETING.get()
    return meeting.one_at_a_time if meeting else nullcontext()


def run_in_threads(rank: Callable[[int], None], meeting: Meeting) -> None:
    """Calls ``rank(index)`` in one thread per device of this process and returns when all have returned."""
    import torch
    import torch_xla.runtime as xr
    from torch_xla._internal import pjrt

    def initialize(local_rank: int, local_world_size: int) -> None:
        pjrt.initialize_multiprocess(local_rank, local_world_size)
        # torch_xla counts calls of operators that run on the CPU, item() among them, in a map without a lock. Two
        # threads that call one for the first time at once can crash the process; later calls only read the map. (0
        # and 1 would be constants, which are compiled.)
        torch.full((1,), 0.5).to("xla").item()
        # After a fork the first backward pass creates autograd's engine anew and starts its threads. Two threads that
        # both do it do it twice, without a lock, and one can wait for ever.
        torch.ones((), requires_grad=True).backward()

    def begin() -> None:
        MEETING.set(meeting)
        rank(xr.global_ordinal())

    # What torch_xla.launch does in each process that it starts.
    pjrt._run_thread_per_device(0, 1, begin, initialize)


class _Room:
    """Where some of the ranks exchange values.

    Its barrier differs from :class:`threading.Barrier` in one thing: ranks that all arrived get through it, even if one
    of them aborts it before the others have woken up.
    """

    def __init__(self, size: int) -> None:
        self.slots: list[bytes] = [b""] * size
        self._changed = threading.Condition()
        self._arrived = self._passed = 0
        self._aborted = False

    def wait(self, timeout: float) -> bool:
        """Returns True once all ranks have called it, False if one of them did not within ``timeout`` seconds, or the
        room was aborted before."""
        with self._changed:
            self._arrived += 1
            if self._aborted:
                return False
            passed = self._passed
            if self._arrived == len(self.slots):
                self._arrived = 0
                self._passed += 1
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: self._passed != passed or self._aborted, timeout)
            if self._passed != passed:
                return True
            self._aborted = True
            self._changed.notify_all()
            return False

    def abort(self) -> None:
        """No rank waits here any more, now or later."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


def _graphs() -> int:
    """Returns a number that changes when a rank of this process adds a graph to the cache or finds one there."""
    import torch_xla
    import torch_xla.debug.metrics as metrics

    # The counter of compilations cannot be used: it is increased before the result is in the cache.
    return torch_xla._XLAC._xla_get_num_cached_compilation_graph() + (metrics.counter_value("CachedCompile") or 0)
