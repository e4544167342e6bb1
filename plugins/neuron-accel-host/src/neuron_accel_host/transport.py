# SPDX-License-Identifier: Apache-2.0
"""Collectives and messages between processes of one host through shared memory, without sockets.

Every rank copies what it sends into memory that the others map, and records that in its ledger. A rank completes an
operation once all ranks of the group have done so, by reading what they sent; a sum reads the other ranks' memory
directly. An operation makes progress when it is waited for and when a later one is started, so that a rank that
computes is not interrupted; a thread helps only where a future was asked for, or where other ranks need a rank that
does not wait. For messages every two ranks have a ledger each: what one sends is copied at once, and read
when the other one waits for it.

Memory is anonymous (``memfd_create``): it has no name that could be left behind in ``/dev/shm``, and is freed with the
last process that maps it. Ranks find it through ``/proc``, so they must see each other's processes. A rank that waits
notices at once that another one has ended, and raises the error that a closed connection raises with gloo.

As in a native library, copies made here are not visible to dispatch modes, such as those that count memory.

Stores of a rank must become visible in their order, which x86-64 guarantees; on other processors there is no transport.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import select
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch.futures import Future
from torch.utils._python_dispatch import _disable_current_modes

from neuron_accel_host.attendant import Attendant
from neuron_accel_host.sums import sum_rows_into

_SYS_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE = 202, 0, 1  # of x86-64
_EVERYONE = 2**31 - 1
_CHECKS = 0.02  # seconds after which a waiting rank checks that the others are alive
_LINE = 64  # bytes of a cache line, and of an entry of a ledger
ENTRIES = 2048  # operations whose entries are kept; more cannot be under way
_FIRST = 64 << 20  # bytes of the first arena, of which memory is taken as it is used
_ENDED = "connection closed by peer: its process has ended"
_NO_MORE = 1 << 62  # number of a message that is never sent
_DIRECT = 1 << 15  # bytes up to which every rank sums everything itself, which saves one exchange

Consume = Callable[[list[torch.Tensor]], None]
"""Receives the bytes that each rank of the group has sent, in their order."""
Part = tuple[int, torch.Tensor]
"""What other ranks read of a rank's bytes: a contiguous tensor, and where it begins, a multiple of its element size."""


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Memory:
    """Anonymous memory that other processes can map.

    Args:
        size: in bytes.
        source: file of the memory that another process has made; None: it is made here.

    Raises:
        OSError: if it cannot be made or mapped.
    """

    def __init__(self, size: int, source: str | None = None) -> None:
        if source is None:
            self.file = os.memfd_create("neuron_accel", os.MFD_CLOEXEC)
            os.ftruncate(self.file, size)
        else:
            self.file = os.open(source, os.O_RDWR | os.O_CLOEXEC)
        self.size, self.map = size, mmap.mmap(self.file, size)
        if source is not None:
            os.close(self.file)
            self.file = -1

    def bytes(self, start: int, size: int) -> torch.Tensor:
        """Returns a view of ``size`` bytes."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.map, dtype=torch.uint8, count=size, offset=start)

    def close(self) -> None:
        """Closes the file; the memory stays mapped as long as something refers to it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


class Entry(NamedTuple):
    """An operation in a ledger, see :class:`Ledger`."""

    kind: int
    arena: int
    start: int
    size: int
    file: int
    arena_size: int


class Ledger:
    """What a rank has sent and read, in memory that the others map.

    The first line has a counter on which others wait, the second the number of operations that this rank has completed.
    Each operation has an entry: its number plus one, a number that is equal on all ranks if they call the same
    collective, and where what was sent is: arena, position, bytes, and the file and the size of the arena.

    Args:
        memory: of the rank.
        place: which of the ledgers in that memory it is, see :func:`_size_of_ledgers`.
    """

    SIZE = (3 + ENTRIES) * _LINE

    def __init__(self, memory: Memory, place: int = 0) -> None:
        self.memory, begin = memory, place * self.SIZE
        self._changes = ctypes.c_uint32.from_buffer(memory.map, begin)
        self._completed = ctypes.c_int64.from_buffer(memory.map, begin + _LINE)
        self._token = (ctypes.c_char * _LINE).from_buffer(memory.map, begin + 2 * _LINE)
        self._entries = (ctypes.c_int64 * (ENTRIES * _LINE // 8)).from_buffer(memory.map, begin + 3 * _LINE)
        self._address = ctypes.addressof(self._changes)

    @property
    def token(self) -> bytes:
        return self._token.value

    @token.setter
    def token(self, token: bytes) -> None:
        self._token.value = token

    @property
    def changes(self) -> int:
        return self._changes.value

    @property
    def completed(self) -> int:
        return self._completed.value

    def complete(self, number: int) -> None:
        """Records that this rank has completed operation ``number``."""
        self._completed.value = number + 1
        self._changed()

    def post(self, number: int, entry: Entry) -> None:
        """Records that the data of operation ``number`` can be read."""
        place = number % ENTRIES * (_LINE // 8)
        self._entries[place + 1 : place + 7] = list(entry)
        self._entries[place] = number + 1
        self._changed()

    def posted(self, number: int) -> bool:
        """Whether the data of operation ``number`` can be read."""
        return self._entries[number % ENTRIES * (_LINE // 8)] > number  # later operations have the same entry

    def entry(self, number: int) -> Entry:
        """Returns the entry of an operation that is posted."""
        place = number % ENTRIES * (_LINE // 8)
        return Entry(*self._entries[place + 1 : place + 7])

    def _changed(self) -> None:
        self._changes.value += 1  # wraps around; waiting compares for equality
        _futex(self._address, _FUTEX_WAKE, _EVERYONE)

    def wait(self, seen: int, seconds: float) -> None:
        """Returns when ``changes`` differs from ``seen``, after ``seconds`` at the latest."""
        _futex(self._address, _FUTEX_WAIT, seen, _TimeSpec(int(seconds), int(seconds % 1 * 1e9)))


def _futex(address: int, operation: int, value: int, timeout: _TimeSpec | None = None) -> None:
    limit = None if timeout is None else ctypes.byref(timeout)
    _c_library().syscall(_SYS_FUTEX, ctypes.c_void_p(address), operation, ctypes.c_uint32(value), limit, None, 0)


@cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _size_of_ledgers(ranks: int) -> int:
    """Bytes of a rank's memory: a ledger for collectives, and one for the messages to and from each rank."""
    return (1 + ranks) * Ledger.SIZE


class Arenas:
    """Memory of this rank for what it sends: in collectives, or in messages to one rank."""

    def __init__(self) -> None:
        self.memories = [Memory(_FIRST)]
        self._used: list[list[tuple[int, int, int]]] = [[]]  # of each arena: begin, end, and number of the operation

    def take(self, size: int, number: int, completed: Callable[[], int]) -> tuple[int, int]:
        """Returns arena and position of ``size`` bytes for operation ``number``. They are used again when all ranks
        have completed it; ``completed`` returns how many operations these are."""
        size = max(_LINE, -(-size // _LINE) * _LINE)
        done = completed()
        for arena, used in enumerate(self._used):
            used[:] = [each for each in used if each[2] >= done]
            begin = 0
            for start, end, _ in used:
                if start - begin >= size:
                    break
                begin = end
            if self.memories[arena].size - begin >= size:
                used.append((begin, begin + size, number))
                used.sort()
                return arena, begin
        self.memories.append(Memory(max(_FIRST, 1 << (size - 1).bit_length())))
        self._used.append([(0, size, number)])
        return len(self.memories) - 1, 0

    def close(self) -> None:
        for memory in self.memories:
            memory.close()


class Operation:
    """A collective that was started.

    Args:
        transport: of the group.
        name: of the collective, for messages.
        kind: a number that is equal on all ranks.
        consume: receives what the ranks have sent; None from then on.
    """

    def __init__(self, transport: SharedMemory, name: str, kind: int, consume: Consume) -> None:
        self.number, self.name, self.kind = transport.next_number(), name, kind
        self.consume: Consume | None = consume
        self._transport = transport

    def wait(self, timeout: timedelta | None = None) -> None:
        """Completes this operation, and all that were started before it.

        Raises:
            RuntimeError: if a rank has ended, calls another collective, or does not take part in time.
        """
        self._transport.complete(self, timeout)

    def test(self) -> bool:
        """Whether it is complete; makes progress without waiting. Raises errors as :meth:`wait` does."""
        return self._transport.test(self)

    def future(self, value: list[torch.Tensor]) -> Future:
        """Returns a future that has ``value`` once this operation is complete."""
        return self._transport.attendant.promise(self, value)


class Message:
    """A message that this rank receives.

    Args:
        transport: of the group.
        source: position of the rank that sends it.
        number: counts the messages of that rank to this one.
        tensor: receives it; flat and contiguous.
    """

    def __init__(self, transport: SharedMemory, source: int, number: int, tensor: torch.Tensor) -> None:
        self.source, self.number, self.is_complete = source, number, False
        self.tensor, self._transport = tensor, transport

    def wait(self, timeout: timedelta | None = None) -> None:
        """Receives this message, and those from the same rank that were started before it.

        Raises:
            RuntimeError: if the rank has ended, sends another shape or dtype, or does not send in time.
        """
        self._transport.complete_message(self, timeout)

    def test(self) -> bool:
        """Whether it is complete; makes progress without waiting. Raises errors as :meth:`wait` does."""
        return self._transport.test_message(self)

    def future(self, value: list[torch.Tensor]) -> Future:
        raise NotImplementedError("messages have no futures; call wait()")


class _Pair:
    """The messages between this rank and one other.

    Args:
        mine: ledger of what this rank sends and has received.
        theirs: that of the other rank.
    """

    def __init__(self, mine: Ledger, theirs: Ledger) -> None:
        self.mine, self.theirs = mine, theirs
        self.sending, self.receiving = threading.Lock(), threading.Lock()
        self.sent = self.received = 0
        self.under_way: deque[Message] = deque()
        self.arenas: Arenas | None = None
        self.arenas_of_other: dict[int, Memory] = {}


class SharedMemory:
    """Collectives and messages of a group whose ranks are processes of this host. Made by :meth:`connect`.

    Args:
        index: position of this rank in the group.
        ranks: global ranks of the group, for messages.
        ledgers: of all ranks of the group, for collectives; this rank's own is written.
        processes: numbers of the processes.
        watches: file descriptors that become readable when a process ends; -1 for this process.
        arenas: of this rank.
        first_arenas: the first arena of each rank; what they hold is there also after their rank has ended.
        timeout: of an operation.
    """

    def __init__(
        self,
        *,
        index: int,
        ranks: Sequence[int],
        ledgers: Sequence[Ledger],
        processes: Sequence[int],
        watches: Sequence[int],
        arenas: Arenas,
        first_arenas: Sequence[Memory],
        timeout: timedelta,
    ) -> None:
        self._index, self._ranks, self._ledgers, self._timeout = index, tuple(ranks), list(ledgers), timeout
        self._processes, self._watches = list(processes), list(watches)
        self._others = [place for place in range(len(self._ranks)) if place != index]
        self._arenas = arenas
        self._arenas_of: list[dict[int, Memory]] = [{0: first} for first in first_arenas]
        self._under_way: deque[Operation] = deque()
        self._started = 0
        self._lock = threading.RLock()
        self._failure: str | None = None
        self._process = os.getpid()
        self.attendant = Attendant()
        self._pairs = {
            place: _Pair(Ledger(ledgers[index].memory, 1 + place), Ledger(ledgers[place].memory, 1 + index))
            for place in self._others
        }

    # ---- connecting --------------------------------------------------------------------------------------------------
    @classmethod
    def connect(cls, index: int, ranks: Sequence[int], timeout: timedelta, store: Any) -> SharedMemory | None:
        """Returns the transport of a group, or None on every rank of it if one of them cannot take part.

        Args:
            index: position of this rank in the group.
            ranks: global ranks of the group.
            timeout: of an operation.
            store: of the group, a ``torch.distributed.Store``.
        """

        def gather(name: str, value: Any) -> list[Any]:
            store.set(f"{name}/{index}", json.dumps(value))
            return [json.loads(store.get(f"{name}/{place}")) for place in range(len(ranks))]

        ledger: Ledger | None = None
        arenas: Arenas | None = None
        here: list[str] = []
        if why_not_here() is None:
            with suppress(OSError):
                here = host_of_this_process()
                arenas = Arenas()
                ledger = Ledger(Memory(_size_of_ledgers(len(ranks))))
                token = secrets.token_hex(16)
                ledger.token = token.encode()
        mine = None
        if ledger is not None and arenas is not None:
            files = ledger.memory.file, arenas.memories[0].file
            mine = here, os.getpid(), files, token
        known = gather("memory", mine)
        ledgers, watches, first_arenas = [], [], []
        try:
            if ledger is None or arenas is None or any(other is None or other[0] != here for other in known):
                raise OSError("the ranks of the group do not share a host")
            for place, (_, process, files, token) in enumerate(known):
                if place == index:
                    ledgers.append(ledger)
                    watches.append(-1)
                    first_arenas.append(arenas.memories[0])
                    continue
                watches.append(os.pidfd_open(process))
                ledgers.append(Ledger(Memory(_size_of_ledgers(len(ranks)), f"/proc/{process}/fd/{files[0]}")))
                first_arenas.append(Memory(_FIRST, f"/proc/{process}/fd/{files[1]}"))
                if ledgers[-1].token != token.encode():
                    raise OSError(f"the memory of process {process} is not the expected one")
            agrees = True
        except (OSError, ValueError):
            agrees = False
        if not all(gather("agrees", agrees)):
            for watch in watches:
                if watch >= 0:
                    os.close(watch)
            if ledger is not None:
                ledger.memory.close()
            if arenas is not None:
                arenas.close()
            return None
        assert arenas is not None
        processes = [process for _, process, _, _ in known]
        return cls(
            index=index,
            ranks=ranks,
            ledgers=ledgers,
            processes=processes,
            watches=watches,
            arenas=arenas,
            first_arenas=first_arenas,
            timeout=timeout,
        )

    def close(self, seconds: float = 10.0) -> None:
        """Waits until all other ranks that still run have read what this one has sent, and frees the memory."""
        if os.getpid() != self._process:  # a process that a rank has forked ends
            return
        deadline = time.monotonic() + seconds
        with self._lock:
            if self._failure is None:
                with suppress(OSError, RuntimeError):
                    self._progress()
                mine = self._ledgers[self._index].completed
                for pair in self._pairs.values():  # others need not wait until this rank reads more messages
                    pair.mine.complete(_NO_MORE)
                for place, pair in self._pairs.items():
                    self._linger(place, self._ledgers[place], mine, deadline)
                    self._linger(place, pair.theirs, pair.sent, deadline)
            self._failure = "it was shut down"
        self.attendant.close()
        for watch in self._watches:
            if watch >= 0:
                with suppress(OSError):
                    os.close(watch)
        for arenas in (self._arenas, *(pair.arenas for pair in self._pairs.values())):
            if arenas is not None:
                arenas.close()
        self._ledgers[self._index].memory.close()

    def _linger(self, place: int, ledger: Ledger, completed: int, deadline: float) -> None:
        """Waits until the rank at ``place`` has completed as many operations, or has ended."""
        while not self._has_ended(place) and time.monotonic() < deadline:
            seen = ledger.changes
            if ledger.completed >= completed:
                return
            ledger.wait(seen, _CHECKS)

    # ---- collectives -------------------------------------------------------------------------------------------------
    def all_reduce(self, tensor: torch.Tensor, scale: float = 1.0) -> Operation:
        """Starts to sum ``tensor``, flat and contiguous, over the group, in place, and to multiply it by ``scale``. The
        result has the same bits on every rank."""
        size = len(self._ranks)
        if size == 2 or tensor.numel() * tensor.element_size() <= _DIRECT:

            def add(sent: list[torch.Tensor]) -> None:
                sum_rows_into(tensor, [row.view(tensor.dtype) for row in sent], scale)

            return self._start("all_reduce", tensor, add)
        bounds = [tensor.numel() * place // size for place in range(size + 1)]
        parts = [slice(bounds[place], bounds[place + 1]) for place in range(size)]
        mine = tensor[parts[self._index]]

        def add_part(sent: list[torch.Tensor]) -> None:
            sum_rows_into(mine, [row.view(tensor.dtype)[parts[self._index]] for row in sent], scale)
            self._post(gathering, [(0, mine)])

        def gather(sent: list[torch.Tensor]) -> None:
            for place in self._others:
                tensor[parts[place]].copy_(sent[place].view(tensor.dtype))

        with self._lock:
            summing = Operation(self, "all_reduce", _kind("all_reduce", tensor.dtype, tensor.numel()), add_part)
            gathering = Operation(self, "all_reduce", _kind("second exchange", tensor.dtype, tensor.numel()), gather)
            self._under_way.append(summing)
            self._under_way.append(gathering)
            self._post(summing, [(0, tensor)])
            self._progress()
            if summing.consume is not None:
                self.attendant.look_after(summing)
        return gathering

    def barrier(self) -> Operation:
        """Starts an operation that is complete when all ranks have started it."""
        return self._start("barrier", torch.empty(0), lambda sent: None)

    def all_gather(self, rows: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
        """Starts to gather ``tensor`` of all ranks in ``rows``, all flat and contiguous. ``tensor`` may be the row of
        this rank."""

        def gather(sent: list[torch.Tensor]) -> None:
            for place in self._others:
                rows[place].copy_(sent[place].view(tensor.dtype))

        if rows[self._index].data_ptr() != tensor.data_ptr():
            rows[self._index].copy_(tensor)
        return self._start("all_gather", tensor, gather)

    def all_to_all(
        self, out: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Operation:
        """Starts to send consecutive parts of ``tensor`` to the ranks, and to receive theirs in ``out``, both flat and
        contiguous. ``received`` and ``sent`` are numbers of elements for each rank."""
        parts = list(out.split(list(received)))
        bounds = [0, *accumulate(sent)]
        own = tensor[bounds[self._index] : bounds[self._index + 1]]
        head = torch.tensor(bounds, dtype=torch.int64).view(torch.uint8)
        width = out.element_size()

        def read(posted: list[torch.Tensor]) -> None:
            for place in self._others:
                begin, end = posted[place][: head.numel()].view(torch.int64)[self._index : self._index + 2].tolist()
                if end - begin != received[place]:
                    raise RuntimeError(
                        f"connection of rank {self._ranks[self._index]}: rank {self._ranks[place]} sends {end - begin} "
                        f"elements in all_to_all, expected {received[place]}"
                    )
                there = posted[place][_above(head.numel()) :]
                parts[place].copy_(there[begin * width : end * width].view(out.dtype))

        if parts[self._index].data_ptr() != own.data_ptr():
            parts[self._index].copy_(own)
        return self._start("all_to_all", tensor, read, [(0, head), (_above(head.numel()), tensor)], uneven=True)

    def reduce_scatter(self, out: torch.Tensor, rows: torch.Tensor, scale: float = 1.0) -> Operation:
        """Starts to sum ``rows``, ``[size of the group, n]`` and contiguous, over the group. ``out``, ``[n]``, receives
        the row of this rank, see :func:`sum_rows_into`. ``rows`` must not be changed before the operation is complete:
        this rank's own row is not copied."""
        own, width = self._index, rows[0].nbytes

        def add(sent: list[torch.Tensor]) -> None:
            terms = [each.view(rows.dtype).view(rows.shape)[own] for each in sent]
            terms[own] = rows[own]
            sum_rows_into(out, terms, scale)

        others = [(0, rows[:own].flatten()), ((own + 1) * width, rows[own + 1 :].flatten())]
        return self._start("reduce_scatter", rows.view(-1), add, parts=others)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Operation:
        """Starts to send ``tensor``, flat and contiguous, from the rank at position ``source`` to all others."""

        def read(sent: list[torch.Tensor]) -> None:
            if source != self._index:
                tensor.copy_(sent[source].view(tensor.dtype))

        return self._start("broadcast", tensor if source == self._index else tensor[:0], read, uneven=True)

    # ---- messages ----------------------------------------------------------------------------------------------------
    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Sends ``tensor``, flat and contiguous, to the rank at position ``target``, which receives as many elements of
        the same dtype. It is copied. Waits only if :data:`ENTRIES` messages to that rank have not been read.

        Raises:
            RuntimeError: if that rank has ended, or does not read in time.
        """
        pair = self._pairs[target]
        with pair.sending:
            self._check()
            if self._has_ended(target):
                self._fail(_ENDED, target, "send")
            number, pair.sent = pair.sent, pair.sent + 1
            self._wait_for(target, pair.theirs, lambda ledger: ledger.completed > number - ENTRIES, "send")
            pair.arenas = pair.arenas or Arenas()
            kind = _kind("message", tensor.dtype, tensor.numel())
            pair.mine.post(number, _copied(pair.arenas, kind, number, [(0, tensor)], lambda: pair.theirs.completed))

    def receive(self, tensor: torch.Tensor, source: int) -> Message:
        """Starts to receive in ``tensor``, flat and contiguous, what the rank at position ``source`` sends to this
        one."""
        pair = self._pairs[source]
        with pair.receiving:
            message = Message(self, source, pair.received, tensor)
            pair.received += 1
            pair.under_way.append(message)
        return message

    def next_source(self, timeout: timedelta | None = None) -> int:
        """Returns the position of a rank from which a message can be received that no receive has been started for.

        Raises:
            RuntimeError: if all others have ended, or none sends in time.
        """
        deadline = time.monotonic() + (timeout or self._timeout).total_seconds()
        while True:
            self._check()
            ended = [self._has_ended(place) for place in self._others]
            for place, pair in self._pairs.items():
                if not pair.under_way and pair.theirs.posted(pair.received):
                    return place
            if all(ended) or time.monotonic() > deadline:
                self._fail(_ENDED if all(ended) else "timed out", self._others[-1], "receive")
            time.sleep(0.0005)

    def complete_message(self, message: Message, timeout: timedelta | None = None) -> None:
        """Receives a message and those from the same rank before it; see :meth:`Message.wait` for errors."""
        pair = self._pairs[message.source]
        with pair.receiving:
            while not message.is_complete:
                self._read_message(pair, pair.under_way[0], timeout)

    def test_message(self, message: Message) -> bool:
        """Whether a message was received; receives what has arrived."""
        pair = self._pairs[message.source]
        if not message.is_complete and pair.receiving.acquire(blocking=False):  # else another thread receives
            try:
                while pair.under_way and pair.theirs.posted(pair.under_way[0].number):
                    self._read_message(pair, pair.under_way[0])
            finally:
                pair.receiving.release()
        return message.is_complete

    def _read_message(self, pair: _Pair, message: Message, timeout: timedelta | None = None) -> None:
        self._check()
        source, number, tensor = message.source, message.number, message.tensor
        self._wait_for(source, pair.theirs, lambda ledger: ledger.posted(number), "receive", timeout)
        entry = pair.theirs.entry(number)
        if entry.kind != _kind("message", tensor.dtype, tensor.numel()):
            self._failure = (
                f"connection of rank {self._ranks[self._index]}: rank {self._ranks[source]} sends another shape or "
                f"dtype than {tensor.numel()} elements of {tensor.dtype}"
            )
            raise RuntimeError(self._failure)
        with _disable_current_modes():
            tensor.copy_(self._find(entry, pair.arenas_of_other, source, "receive").view(tensor.dtype))
        pair.under_way.popleft()
        message.is_complete = True
        pair.mine.complete(number)

    # ---- implementation ----------------------------------------------------------------------------------------------
    def next_number(self) -> int:
        """Returns the number of the next operation."""
        self._started += 1
        return self._started - 1

    def _start(
        self,
        name: str,
        tensor: torch.Tensor,
        consume: Consume,
        parts: Sequence[Part] | None = None,
        uneven: bool = False,
    ) -> Operation:
        """Starts an operation on ``tensor``, of which the other ranks read ``parts``; all of it by default."""
        with self._lock:
            kind = _kind(name, tensor.dtype, None if uneven else tensor.numel())
            operation = Operation(self, name, kind, consume)
            self._under_way.append(operation)
            self._post(operation, [(0, tensor)] if parts is None else parts)
            self._progress()
        return operation

    def _post(self, operation: Operation, parts: Sequence[Part]) -> None:
        """Copies what this rank sends into its memory."""
        self._check()
        last = operation.number - ENTRIES  # had the same entry
        while self._under_way[0].number <= last:
            self.complete(self._under_way[0])
        self._wait_until(lambda ledger: ledger.completed > last, operation)
        entry = _copied(self._arenas, operation.kind, operation.number, parts, self._completed_by_all)
        self._arenas_of[self._index][entry.arena] = self._arenas.memories[entry.arena]
        self._ledgers[self._index].post(operation.number, entry)

    def _completed_by_all(self) -> int:
        return min(ledger.completed for ledger in self._ledgers)

    def _progress(self) -> None:
        """Completes the operations that all ranks have posted, in their order."""
        while self._under_way and all(ledger.posted(self._under_way[0].number) for ledger in self._ledgers):
            self._read(self._under_way[0])

    def complete(self, operation: Operation, timeout: timedelta | None = None) -> None:
        """Completes an operation and those before it; see :meth:`Operation.wait` for errors. Other threads can start
        operations meanwhile."""
        while operation.consume is not None:
            with self._lock:
                self._check()
                self._progress()
                if operation.consume is None:
                    return
                first = self._under_way[0]
                place = next((i for i in self._others if not self._ledgers[i].posted(first.number)), None)
            if place is None:  # it has been posted in this moment
                continue
            self._wait_for(place, self._ledgers[place], partial(_posted, first.number), first.name, timeout)

    def test(self, operation: Operation) -> bool:
        """Whether an operation is complete; makes progress without waiting."""
        if operation.consume is not None:
            with self._lock:
                self._check()
                self._progress()
        return operation.consume is None

    def _read(self, operation: Operation) -> None:
        consume = operation.consume
        self._under_way.popleft()
        assert consume is not None
        try:
            with _disable_current_modes():
                consume([self._sent_by(place, operation) for place in range(len(self._ranks))])
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise
        self._ledgers[self._index].complete(operation.number)
        operation.consume = None  # at last: threads that wait look at it without the lock

    def _sent_by(self, place: int, operation: Operation) -> torch.Tensor:
        entry = self._ledgers[place].entry(operation.number)
        if entry.kind != operation.kind:
            raise RuntimeError(
                f"connection of rank {self._ranks[self._index]}: rank {self._ranks[place]} calls another collective, "
                f"or with another shape or dtype, while this rank calls {operation.name}"
            )
        return self._find(entry, self._arenas_of[place], place, operation.name)

    def _find(self, entry: Entry, arenas: dict[int, Memory], place: int, what: str) -> torch.Tensor:
        """Returns the bytes of an entry of the rank at ``place``; ``arenas`` are those of it that are mapped."""
        if entry.arena not in arenas:
            try:
                arenas[entry.arena] = Memory(entry.arena_size, f"/proc/{self._processes[place]}/fd/{entry.file}")
            except OSError:  # it has ended, and its files are closed
                self._fail(_ENDED, place, what)
        return arenas[entry.arena].bytes(entry.start, entry.size)

    def _wait_until(self, holds: Callable[[Ledger], bool], operation: Operation) -> None:
        """Waits until ``holds`` is true of the ledger of every rank."""
        for place in self._others:
            self._wait_for(place, self._ledgers[place], holds, operation.name)

    def _wait_for(
        self,
        place: int,
        ledger: Ledger,
        holds: Callable[[Ledger], bool],
        what: str,
        timeout: timedelta | None = None,
    ) -> None:
        """Waits until ``holds`` is true of a ledger of the rank at ``place``."""
        deadline = None
        while True:
            seen = ledger.changes
            if holds(ledger):
                return
            self._check()
            now, seconds = time.monotonic(), (timeout or self._timeout).total_seconds()
            deadline = now + seconds if deadline is None else deadline
            if now > deadline:
                self._fail(f"timed out after {seconds:g} s", place, what)
            ledger.wait(seen, _CHECKS)
            if ledger.changes == seen and not holds(ledger) and self._has_ended(place):
                self._fail(_ENDED, place, what)

    def _has_ended(self, place: int) -> bool:
        poll = select.poll()
        poll.register(self._watches[place], select.POLLIN)
        return bool(poll.poll(0))

    def _fail(self, what: str, place: int, operation: str) -> NoReturn:
        self._failure = f"{what} (rank {self._ranks[place]}, in {operation})"
        raise RuntimeError(self._failure)

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"connection of the group is closed: {self._failure}")


def _copied(arenas: Arenas, kind: int, number: int, parts: Sequence[Part], completed: Callable[[], int]) -> Entry:
    """Copies what operation ``number`` sends into ``arenas``, see :meth:`Arenas.take`; returns its entry."""
    total = max(place + tensor.nbytes for place, tensor in parts)
    arena, begin = arenas.take(total, number, completed)
    memory = arenas.memories[arena]
    for place, tensor in parts:
        if tensor.numel():
            with _disable_current_modes():
                memory.bytes(begin + place, tensor.nbytes).view(tensor.dtype).copy_(tensor.view(-1))
    return Entry(kind, arena, begin, total, memory.file, memory.size)


def _posted(number: int, ledger: Ledger) -> bool:
    return ledger.posted(number)


def _above(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _kind(name: str, dtype: torch.dtype, size: int | None = None) -> int:
    """Returns a number for a collective on tensors of this size, or of any size."""
    return zlib.crc32(f"{name} {dtype} {size}".encode())


def why_not_here() -> str | None:
    """Returns why this machine cannot communicate through shared memory, or None if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "it needs Linux on x86-64"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this Python has no memfd_create or no pidfd_open"
    return None


def host_of_this_process() -> list[str]:
    """Returns what is equal for processes that see each other: the boot of the host, and the namespace of processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.readlink("/proc/self/ns/pid")]
