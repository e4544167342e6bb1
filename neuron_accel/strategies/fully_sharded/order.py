# SPDX-License-Identifier: Apache-2.0
"""Ranks that call different modules would gather each other's weights; they get an error instead.

A gather does not say which unit it is of, and blocks have the same size. Asking the other ranks before each gather
would take longer than a small gather does. So each rank records which unit follows which; a method of the accelerator
that every rank calls, such as ``gather``, counts as one. One that keeps to this record sends nothing: the others, whose
records are equal, do the same. One that departs from it says so on the board (:meth:`Backend.board`), and goes on when
the rank before it, in a ring, has departed to the same unit: then all have, since no gather completes without every
rank. A thread of each rank looks on the board whether another one has departed where this one has not, and answers.
"""

from __future__ import annotations

import json
import secrets
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from neuron_accel.contract.events import Observer
from neuron_accel.errors import DesyncError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from neuron_accel.contract import Board, Run
    from neuron_accel.contract.events import Event

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, _LOOK_S = 0.0001, 0.01, 1.0


class UnitOrder:
    """The order in which the units of all models of a run are called. Creating it is collective.

    Args:
        run: the run.
        plugin: name of the plugin, for messages.
    """

    def __init__(self, run: Run, plugin: str) -> None:
        self._group, self._plugin = run.group(*run.mesh.gradient_axes), plugin
        self._before: dict[Hashable, str] = {}  # the last call, by chain
        self._recorded: dict[tuple[Hashable, str], str] = {}  # the call after it
        self._latest: deque[tuple[int, str]] = deque(maxlen=64)
        self._calls = self._asked = 0
        self._is_asking = False
        self._backend, self._join, self._events = run.backend, run.join, run.events
        self.is_on = self._group.size > 1 and run.backend.has_values and not run.backend.is_lazy
        if self.is_on:
            token = secrets.token_hex(4)  # notes of an earlier run may still be on the board
            self._name = f"order/{run.backend.broadcast_object(token, self._group)}"
            self._board = run.backend.board()
            key = f"{self._name}/gone/{self._group.index}"
            watch = _Watch(self)
            run.regularly.append(watch.look)
            self._end = weakref.finalize(
                self, _end, self._board, key, [partial(run.regularly.remove, watch.look), run.events.observe(watch)]
            )

    def call(self, unit: str, *chains: Hashable) -> None:
        """A unit is about to be called, and gathered if it is not. Ranks without data follow what is announced instead.

        Args:
            unit: what is called, for messages; equal on all ranks that call the same.
            chains: calls of different chains may alternate in another way each time; none: it is a call of all chains.

        Raises:
            DesyncError: if another rank calls something else.
        """
        if not self.is_on or self._join.is_uneven or self._is_asking:
            return
        self._latest.append((self._calls, unit))
        is_recorded = True
        for chain in chains or tuple(self._before) or (None,):
            place = chain, self._before.get(chain, "")
            self._before[chain] = unit
            is_recorded &= self._recorded.get(place) == unit
            self._recorded[place] = unit
        if not is_recorded:
            self._is_asking = True
            try:
                with self._events.open(unit.strip("`"), "call"):  # the watchdog says which rank does not come
                    self._agree(unit)
            finally:
                self._is_asking = False
        self._calls += 1  # last: from now on the thread answers that this rank has called this unit

    def close(self) -> None:
        """This rank calls nothing more."""
        if self.is_on:
            self._end()
            self.is_on = False

    # ---- the board ---------------------------------------------------------------------------------------------------
    def _agree(self, unit: str) -> None:
        number, mine = self._asked, self._group.ranks[self._group.index]
        self._asked += 1
        self._put(self._note(self._group.index, number), [number, self._calls, unit])
        self._put("asks", [number, self._calls])
        before = (self._group.index - 1) % self._group.size
        calls, theirs = self._await(self._note(before, number), number, self._group.ranks[before])
        if (calls, theirs) != (self._calls, unit):
            self._refuse({self._group.ranks[before]: theirs, mine: unit})

    def _note(self, index: int, number: int) -> str:
        """Key of a rank's note. In the ring no rank is more notes ahead of the next one than there are ranks."""
        return f"call/{index}/{number % (self._group.size + 2)}"

    def _await(self, key: str, number: int, rank: int) -> tuple[int, str]:
        pause, begin = _SHORTEST_PAUSE_S, time.monotonic()
        while True:
            note = self._get(key)
            if note is not None and note[0] == number:
                return note[1], note[2]
            waited = time.monotonic() - begin
            if waited > _LOOK_S:
                refused = self._get("refused")
                if refused is not None:
                    self._raise(dict(refused))
                if self._get(f"gone/{self._group.ranks.index(rank)}") is not None and self._get(key) == note:
                    self._refuse({rank: "nothing more"})
            if waited > self._backend.timeout.total_seconds():
                self._refuse({rank: "nothing within the time that a collective may take"})
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def look(self) -> None:
        """Answers a rank that has departed where this one has not: it would wait until this one does."""
        note = self._get("asks")
        if note is None or note[0] != self._asked or note[1] >= self._calls:
            return
        number, calls = note
        unit = next((unit for call, unit in tuple(self._latest) if call == calls), "other modules")
        self._put(self._note(self._group.index, number), [number, calls, unit])

    def _refuse(self, calls: dict[int, str]) -> NoReturn:
        calls.setdefault(self._group.ranks[self._group.index], self._latest[-1][1])
        self._put("refused", sorted(calls.items()))
        self._raise(calls)

    def _raise(self, calls: dict[int, str]) -> NoReturn:
        method = next((unit for unit in calls.values() if unit.startswith("`")), None)  # of the accelerator
        raise DesyncError(
            "Data-parallel ranks do not make the same calls, and parameters of the model are sharded over them.",
            where=f"plugin {self._plugin!r}; "
            + "; ".join(f"rank {rank} calls {unit}" for rank, unit in sorted(calls.items())),
            why="a call of a module gathers its parameters, in which every rank has to take part",
            fix=f"call {method} on every rank; where its result is used, ask `accelerator.is_main_process`"
            if method is not None
            else "let all ranks call the same modules in the same order and equally often (loaders with "
            "even_batches=True, `generate` with synced_gpus=True), and multiply the output by 0 where one is not "
            "needed, or use ZeRO-1 (Zero1Plugin), whose ranks may leave out modules",
        )

    def _put(self, key: str, note: Any) -> None:
        self._board.put(f"{self._name}/{key}", json.dumps(note).encode())

    def _get(self, key: str) -> Any:
        note = self._board.get(f"{self._name}/{key}")
        return None if note is None else json.loads(note)


class _Watch(Observer):
    """Looks on the board for an order, and tells it what else every rank calls, as long as there is one.

    Args:
        order: the order.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"call"})

    def __init__(self, order: UnitOrder) -> None:
        self._order = weakref.ref(order)

    def look(self) -> None:
        order = self._order()
        if order is not None:
            order.look()

    def begin(self, event: Event) -> None:
        order = self._order()
        if order is not None:
            order.call(f"`{event.name}`")


def _end(board: Board, key: str, remove: list[Callable[[], None]]) -> None:
    for each in remove:
        each()
    with suppress(Exception):  # the store no longer exists, so there is no rank to tell
        board.put(key, b"1")
