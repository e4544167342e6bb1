# SPDX-License-Identifier: Apache-2.0
"""Raises an error if ranks issue different collectives, which would otherwise hang."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from neuron_accel.contract import Group, Phase, PluginSpec, StrategyPlugin
from neuron_accel.contract.events import Collective, Event, Observer
from neuron_accel.errors import ConfigurationError, DesyncError

if TYPE_CHECKING:
    import torch

    from neuron_accel.contract import Run


@dataclass(frozen=True, kw_only=True)
class DesyncGuard(StrategyPlugin):
    """Detects ranks that issue different collectives and raises a :class:`~neuron_accel.errors.DesyncError` on all of
    them, with the rank, the step and the operation.

    Before each collective the ranks of its group compare it through a key-value store, without the device's network; on
    a lazy device they compare all collectives of a graph before each execution. A rank that does not arrive is reported
    after the timeout, or at once if its process has ended. The comparison includes operation, group, step, and the
    number of bytes if all ranks send the same number.

    For debugging: each collective waits for all ranks of its group and takes about a millisecond longer.

    Args:
        timeout_s: time in seconds that a rank may be behind the others. It must be longer than it takes to load,
            compile or write a checkpoint on one rank while others wait.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="desync_guard",
        api_version=4,
        phase=Phase.OPTIMIZER,
        provides=frozenset({"looks-at-values", "weights-in-passes"}),
    )

    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigurationError(f"timeout_s is {self.timeout_s}; it must be positive.")

    def setup(self, run: Run) -> None:
        """Observes collectives, to compare them between ranks."""
        if run.world.size > 1:
            meetings = Meetings(run, self.timeout_s)
            run.state(self)["meetings"] = meetings
            run.undo(meetings.close)
            run.undo(run.events.observe(meetings))

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Counts steps, for messages."""
        yield
        if "meetings" in run.state(self):
            run.state(self)["meetings"].step += 1


# ---- Comparing collectives -------------------------------------------------------------------------------------------
# The ranks of a group write notes to a board; the first of them reads all notes and writes the result. Reading a board
# does not block, so a reader can time out, and can still read the last note of a rank that did not arrive.
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.01
_VERDICT_S = 5.0  # additional time for the result, since the first rank may wait for the full timeout
_BETWEEN_TWO = ("send", "receive")
_UNEQUAL = ("broadcast", "all_to_all_uneven")  # ranks send different numbers of bytes
_FIX = (
    "look for code that only some ranks run: a collective (gather, save, wait_for_everyone) inside "
    "`if accelerator.is_main_process`, a loop that ends earlier on one rank, a branch on a value that differs"
)


@dataclass(frozen=True)
class Doing:
    """The operation that a rank is about to perform.

    Args:
        step: number of the optimizer step, from 1; 0 inside ``join_uneven_inputs``, where ranks without data have ended
            a step before those with data have.
        text: description of the operation.
    """

    step: int
    text: str

    def __str__(self) -> str:
        return f"{self.text} {self.when}"

    @property
    def when(self) -> str:
        return f"in step {self.step}" if self.step else "inside `join_uneven_inputs`"


class Meetings(Observer):
    """Compares the collectives of this rank with those of others.

    Args:
        run: the run.
        timeout_s: time in seconds to wait for other ranks.
    """

    categories: ClassVar[frozenset[str]] = frozenset({"collective", "deferred", "graph"})

    def __init__(self, run: Run, timeout_s: float) -> None:
        self.step = 1
        self._world, self._rank, self._timeout = run.world, run.backend.rank, timeout_s
        self._join = run.join
        self._board = run.backend.board()
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._deferred: list[Doing] = []
        atexit.register(self.close)

    # ---- observing ---------------------------------------------------------------------------------------------------
    def begin(self, event: Event) -> None:
        if not isinstance(event, Collective):
            self._execute(event.arguments["ranks"])
            return
        op, sent = event.name, event.sent
        if op in _BETWEEN_TWO:
            return
        size = f" ({sent:,} bytes)" if sent and op not in _UNEQUAL else ""
        text = f"{op} over {event.group.name!r}{size}"
        if event.category == "deferred":
            self._deferred.append(Doing(self._step, text))
        else:
            self._meet(event.group, Doing(self._step, text))

    @property
    def _step(self) -> int:
        return 0 if self._join.is_uneven or self._join.is_through else self.step

    def _execute(self, ranks: tuple[int, ...]) -> None:
        deferred, self._deferred = self._deferred, []
        if len(ranks) == 1:  # this is the only rank of its stage
            return
        index = ranks.index(self._rank)
        group = Group(ranks=ranks, index=index, partition=(ranks,), name="those that compute the same")
        step = deferred[-1].step if deferred else self._step  # the step that issued them may have ended
        listing = "\n".join(doing.text for doing in deferred)
        digest = hashlib.blake2b(listing.encode(), digest_size=8).hexdigest()
        self._put(f"list/{self._rank}/{self._counts[ranks] % 2}", zlib.compress(listing.encode()))
        self._meet(group, Doing(step, f"execution of {len(deferred)} collectives [{digest}]"))

    def close(self) -> None:
        """Notifies other ranks that this rank has ended."""
        atexit.unregister(self.close)
        try:
            self._board.put(f"desync/gone/{self._rank}", b"gone")
        except Exception:  # the store no longer exists, so there is no rank to notify
            return

    # ---- meeting -----------------------------------------------------------------------------------------------------
    def _meet(self, group: Group, mine: Doing) -> None:
        number = self._counts[group.ranks]
        self._counts[group.ranks] += 1
        place = f"{group.ranks[0]}.{zlib.crc32(repr(group.ranks).encode()):x}/{number % 2}"
        note = json.dumps([number, mine.step, mine.text]).encode()
        self._put(f"last/{self._rank}", note)
        self._put(f"{place}/{group.index}", note)
        deadline = time.monotonic() + self._timeout
        if group.index:
            found = self._await(f"{place}/verdict", number, group.ranks[0], deadline + _VERDICT_S)
            verdict = self._absent(group, mine, [group.ranks[0]]) if found is None else found[1]
        else:
            verdict = self._judge(group, place, number, mine, deadline)
            self._put(f"{place}/verdict", json.dumps([number, verdict]).encode())
        if verdict is not None:
            raise DesyncError(verdict["what"], where=verdict["where"], why=verdict["why"], fix=_FIX)

    def _judge(self, group: Group, place: str, number: int, mine: Doing, deadline: float) -> dict[str, str] | None:
        """Compares the notes on the group's first rank. Returns a description of the difference, or None."""
        doing: dict[int, Doing] = {group.ranks[0]: mine}
        for index, rank in itertools.islice(enumerate(group.ranks), 1, None):
            found = self._await(f"{place}/{index}", number, rank, deadline)
            if found is not None:
                doing[rank] = Doing(found[1], found[2])
        if len(set(doing.values())) > 1:
            return self._different(group, doing, number)
        missing = [rank for rank in group.ranks if rank not in doing]
        return self._absent(group, mine, missing) if missing else None

    def _await(self, key: str, number: int, rank: int, deadline: float) -> list[Any] | None:
        """Waits for the note with that number. Returns None after the deadline, or if ``rank`` has ended."""
        pause = _SHORTEST_PAUSE_S
        while True:
            note = self._get(key)
            if note is not None and (content := json.loads(note))[0] == number:
                return content
            if pause >= _LONGEST_PAUSE_S and self._get(f"gone/{rank}") is not None:
                note = self._get(key)  # the last note of the rank
                content = json.loads(note) if note is not None else [None]
                return content if content[0] == number else None
            if time.monotonic() > deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    # ---- messages ----------------------------------------------------------------------------------------------------
    def _different(self, group: Group, doing: dict[int, Doing], number: int) -> dict[str, str]:
        usual, _ = Counter(doing.values()).most_common(1)[0]
        detail = self._first_difference(group, doing, number)
        others = {d: [r for r in doing if doing[r] == d] for d in doing.values() if d != usual}
        rest = [rank for rank in doing if doing[rank] == usual]
        where = [f"{_ranks(ranks)}: {detail.get(ranks[0]) or d}" for d, ranks in others.items()]
        where.append(f"{_ranks(rest)}: {detail.get(rest[0]) or usual}")
        when = min(doing.values(), key=lambda d: d.step).when
        astray = _ranks(sorted(rank for ranks in others.values() for rank in ranks))
        return {
            "what": f"{astray} of {self._world.size} issued other collectives {when}.",
            "where": "; ".join(where),
            "why": "a collective needs every rank of its group: they would wait for each other, or mix up data",
        }

    def _first_difference(self, group: Group, doing: dict[int, Doing], number: int) -> dict[int, str]:
        """For graphs, returns the first collective in which ranks differ, by rank."""
        if not all(d.text.startswith("execution of") for d in doing.values()):
            return {}
        lists = {}
        for rank in doing:
            note = self._get(f"list/{rank}/{number % 2}")
            lists[rank] = zlib.decompress(note).decode().splitlines() if note else []
        for position, row in enumerate(itertools.zip_longest(*lists.values())):
            if len(set(row)) > 1:
                total = {rank: len(texts) for rank, texts in lists.items()}
                return {
                    rank: f"{text or 'nothing more'} as collective {position + 1} of {total[rank]} {doing[rank].when}"
                    for rank, text in zip(lists, row, strict=True)
                }
        return {}

    def _absent(self, group: Group, mine: Doing, missing: list[int]) -> dict[str, str]:
        last = []
        for rank in missing:
            note = self._get(f"last/{rank}")
            did = str(Doing(*json.loads(note)[1:])) if note is not None else "nothing yet"
            ended = ", and has ended" if self._get(f"gone/{rank}") is not None else ""
            last.append(f"the last operation of rank {rank} was {did}{ended}")
        return {
            "what": f"{_ranks(missing)} of {self._world.size} did not arrive at {mine}.",
            "where": f"group {group.name!r} of ranks {list(group.ranks)}; {'; '.join(last)}",
            "why": f"the others have waited for {self._timeout:g} s, or its process has ended",
        }

    # ---- the board ---------------------------------------------------------------------------------------------------
    def _put(self, key: str, note: bytes) -> None:
        self._board.put(f"desync/{key}", note)

    def _get(self, key: str) -> bytes | None:
        return self._board.get(f"desync/{key}")


def _ranks(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in ranks]
    return f"Rank {listed[0]}" if len(listed) == 1 else f"Ranks {', '.join(listed)}"
