# SPDX-License-Identifier: Apache-2.0
"""Ends the ranks of this machine when another machine is lost, however silently, or has ended the start.

torch's agents do not notice a machine that disappears, and a collective on a device may wait for it for ever. So each
launcher writes a stamp into the store that the agents have anyway, and reads that of its neighbour, once a second: the
work of a launcher does not grow with the number of machines. The one whose neighbour's stamp stops changing writes the
end of this start, which all of them read. The loss of the store is the end too. A stamp is a counter, and silence is
counted in turns of a thread, so no clocks are compared, and a suspended launcher reports no other one as lost.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import TCPStore

from neuron_accel.launch.rendezvous import Start

TURN_S = 1.0
CAUSE_S = 5.0
"""Time in seconds for another machine, where a rank was killed, to say so before a machine whose ranks raised an error:
they may have noticed only that a connection closed."""
LEAVE_S = 10.0
"""Time in seconds for the launcher to leave after its ranks have ended; it may be stuck in a store that is lost."""
CONNECT = timedelta(seconds=2)
READ_S = 3.0
"""Time in seconds for the launchers to read why a start ends."""
LOST_CODE = 75
"""Exit code of all launchers if a machine is lost: EX_TEMPFAIL of sysexits.h, by which a scheduler can try again."""
_LEFT = "left"


@dataclass(frozen=True, kw_only=True)
class End:
    """Why a start ends on all machines.

    Args:
        code: the exit code of the launchers, if the run ends with it.
        what: which machine, and what happened there.
        is_final: whether the run ends as well; else the machines that are left meet again.
    """

    code: int
    what: str
    is_final: bool


class Watch:
    """Watches the other machines during one start.

    Args:
        start: the start, whose store is used over a connection of its own.
        lost_after: seconds of silence after which a machine is lost.
        is_elastic: whether the run continues without a lost machine.
        end_ranks: ends the ranks of this machine, and returns when they have ended.
    """

    def __init__(self, start: Start, *, lost_after: float, is_elastic: bool, end_ranks: Callable[[], None]) -> None:
        assert start.store is not None
        self._start, self._lost_after, self._is_elastic = start, lost_after, is_elastic
        self._end_ranks, self._address = end_ranks, (start.store.host, start.store.port)
        self._name = f"machine {start.machine} ({socket.gethostname()})"
        self._said: End | None = None
        self._end: End | None = None
        self._silence = 0.0  # seconds since the store has answered
        self._over, self._awake, self._told = threading.Event(), threading.Event(), threading.Event()
        self._talker = threading.Thread(target=self._talk, daemon=True, name="neuron_accel_stamps")
        self._looker = threading.Thread(target=self._look, daemon=True, name="neuron_accel_lost")
        self._talker.start()
        self._looker.start()

    # ---- for the launcher --------------------------------------------------------------------------------------------
    @property
    def end(self) -> End | None:
        """Why this start ends, unless this launcher has said it."""
        return self._end if self._end != self._said else None

    def wait_for_cause(self) -> None:
        """Waits for :data:`CAUSE_S` seconds, or until another machine has ended this start."""
        deadline = time.monotonic() + CAUSE_S
        while self.end is None and time.monotonic() < deadline:
            time.sleep(TURN_S / 10)

    @property
    def has_store(self) -> bool:
        """Whether the store answers."""
        return self._silence <= self._lost_after

    def say(self, *, code: int, what: str, is_final: bool) -> None:
        """Ends this start on all machines, unless it has ended already: see :attr:`end`."""
        self._said = End(code=code, what=f"{self._name}: {what}", is_final=is_final)
        self._awake.set()
        self._told.wait(LEAVE_S / 2)

    def close(self) -> None:
        """Leaves this start, whose ranks have ended, so that the stamps of this machine are not missed."""
        self._over.set()
        self._awake.set()
        self._talker.join(READ_S)
        self._looker.join(READ_S)

    # ---- threads -----------------------------------------------------------------------------------------------------
    def _talk(self) -> None:
        """Writes and reads stamps, until there is an end. A broken connection is made anew."""
        store, turn, quiet, seen, neighbour = None, 0, 0, "", self._start.machine
        while self._end is None:
            try:
                if store is None:
                    store = TCPStore(*self._address, is_master=False, timeout=CONNECT, wait_for_workers=False)
                if self._over.is_set():
                    store.set(self._key(self._start.machine), _LEFT)
                    return
                turn += 1
                store.set(self._key(self._start.machine), f"{turn} {self._name}")
                stamp = _get(store, self._key(neighbour))
                if stamp == _LEFT or turn == 1:
                    neighbour, quiet, seen = (neighbour + 1) % self._start.machines, 0, ""
                else:
                    quiet, seen = (0, stamp) if stamp != seen else (quiet + 1, seen)
                end = self._said
                if end is None and quiet * TURN_S >= self._lost_after:
                    end = self._lost(seen.partition(" ")[2] or f"machine {neighbour}", "sent no sign")
                if end is not None:
                    store.compare_set(self._key("end"), "", json.dumps(asdict(end)))
                if found := _get(store, self._key("end")):
                    self._end = End(**json.loads(found))
                    self._told.set()
                    self._wait_for_readers(store)
                self._silence = 0.0
            except (RuntimeError, ValueError, OSError):
                if self._over.is_set():
                    return
                store = None
            self._awake.wait(TURN_S)

    def _wait_for_readers(self, store: TCPStore) -> None:
        """Waits until the others have read the end: the store may end with this launcher."""
        readers = store.add(self._key("readers"), 1)
        deadline = time.monotonic() + READ_S
        while readers < self._start.machines and time.monotonic() < deadline:
            time.sleep(TURN_S / 4)
            readers = store.add(self._key("readers"), 0)

    def _key(self, what: object) -> str:
        return f"neuron_accel {self._start.run} {self._start.number} {what}"

    def _lost(self, who: str, how: str, *, is_final: bool = False) -> End:
        what = f"{who} is lost: it {how} for {self._lost_after:g} s"
        return End(code=LOST_CODE, what=what, is_final=is_final or not self._is_elastic)

    def _look(self) -> None:
        """Ends the ranks once there is a reason, and then the launcher if it does not leave by itself."""
        while self._end is None and not self._over.wait(TURN_S / 4):
            self._silence += TURN_S / 4
            if self._silence > self._lost_after and self._end is None:
                host, port = self._address
                self._end = self._lost(f"the machine with the store, {host}:{port},", "did not answer", is_final=True)
        if self.end is None:
            return
        print(f"neuron-accel: {self.end.what}; ending the ranks of this machine", file=sys.stderr, flush=True)
        if not self._over.is_set():
            self._end_ranks()
        if not self._over.wait(LEAVE_S):
            os._exit(self.end.code)


def _get(store: TCPStore, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
