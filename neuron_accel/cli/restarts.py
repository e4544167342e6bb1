# SPDX-License-Identifier: Apache-2.0
"""Decides whether a launch continues after a rank has failed, and on how many ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from neuron_accel.engine.plan.restart import Fit, Notes

TIMES = 2
"""Number of consecutive failures of one rank after which the launch continues on fewer ranks, if it may."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the ranks.

    Args:
        number: how often they were started before.
        ranks: how many there are on this machine.
        full_size: number of data-parallel ranks of the first start, if this one has fewer; else None.
        why: the reason, for the message; empty for the first.
    """

    number: int
    ranks: int
    full_size: int | None = None
    why: str = ""


class Restarts:
    """The starts of one launch on one machine.

    Args:
        ranks: number of ranks at the first start.
        least: the smallest number of ranks.
        most_restarts: how often the ranks are started again.
    """

    def __init__(self, *, ranks: int, least: int, most_restarts: int) -> None:
        self._least, self._most = least, most_restarts
        self._start = Start(number=0, ranks=ranks)
        self._fits: tuple[Fit, ...] = ()
        self._accumulates = False
        self._culprits: list[int] = []

    @property
    def first(self) -> Start:
        return Start(number=0, ranks=self._start.ranks)

    def after(self, culprit: int, notes: Notes) -> Start | None:
        """The next start, or None if the launch ends.

        Args:
            culprit: the rank that failed first.
            notes: what the first rank has noted so far.
        """
        before = self._start
        if before.number >= self._most:
            return None
        self._fits, self._accumulates = self._fits or notes.fits, self._accumulates or notes.accumulates
        self._culprits = [*self._culprits, culprit] if self._culprits[-1:] == [culprit] else [culprit]
        again = f"restart {before.number + 1} of {self._most}"
        kept = Start(number=before.number + 1, ranks=before.ranks, full_size=before.full_size, why=again)
        self._start = self._fewer(kept, culprit) if len(self._culprits) >= TIMES else kept
        return self._start

    def _fewer(self, kept: Start, culprit: int) -> Start:
        """A start on fewer ranks, or one on as many that says why there are not fewer."""
        if kept.ranks <= self._least:
            return kept
        repeatedly = f"rank {culprit} has failed first {len(self._culprits)} times in a row"
        reason = self._reason_against()
        fit = next((fit for fit in self._fits[1:] if self._least <= fit.ranks < kept.ranks), None)
        if reason is None and fit is None:
            reason = (
                f"no mesh with the same degrees but for data parallelism fits {self._least} to {kept.ranks - 1} ranks"
            )
        if reason is not None or fit is None:
            return Start(
                number=kept.number,
                ranks=kept.ranks,
                full_size=kept.full_size,
                why=f"{kept.why}; {repeatedly}, but it continues with {kept.ranks} ranks: {reason}",
            )
        self._culprits = []
        full = self._fits[0]
        return Start(
            number=kept.number,
            ranks=fit.ranks,
            full_size=full.data_parallel,
            why=f"{kept.why}, on {fit.ranks} rank{'s' * (fit.ranks > 1)} instead of {kept.ranks}, since {repeatedly}; "
            f"mesh: {fit.mesh}; a step has {full.data_parallel // fit.data_parallel} times the micro-batches of the "
            "first start, and the same number of samples",
        )

    def _reason_against(self) -> str | None:
        if not self._fits:
            return "the script has not created a NeuronAccelerator yet, which determines the possible numbers of ranks"
        if not self._accumulates:
            return (
                "a step would have fewer samples, because the script does not train with accelerator.accumulate(model) "
                "(gradient_accumulation_steps may be 1)"
            )
        return None


# ---- several machines ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Choice:
    """The machines of a restart; empty if the run does not continue.

    Args:
        machines: their indices at the first start, ascending.
        full_size: number of data-parallel ranks of the first start, if there are fewer now; else None.
        why: the reason, for the message; empty if all machines are present.
    """

    machines: Sequence[int]
    full_size: int | None = None
    why: str = ""


def reason_to_end(here: Collection[int], *, last: Sequence[int], ended: Collection[int], leader: int) -> str | None:
    """Why machines may not continue without those that are missing; None if they may.

    The missing ones may be on the other side of a network failure, and continue too. So those that are here have to be
    more than half of the machines of the last start, or half of them with its leader, not counting machines whose
    launcher has ended for certain.

    Args:
        here: the machines that are here.
        last: those of the last start.
        ended: those whose launcher has ended for certain.
        leader: the one that has led the last start.
    """
    counted = [machine for machine in last if machine in here or machine not in ended]
    present = [machine for machine in counted if machine in here]
    if 2 * len(present) > len(counted) or (2 * len(present) == len(counted) and leader in present):
        return None
    silent = [str(machine) for machine in counted if machine not in here]
    are = f"machine {silent[0]} is" if len(silent) == 1 else f"machines {', '.join(silent)} are"
    return (
        f"{are} silent, which a network failure looks like as well, and may continue: {len(present)} of {len(counted)} "
        f"machines are here, and more than half are needed, or half with machine {leader}, which led the last start"
    )


def choose_machines(
    here: Sequence[int], *, machines: int, ranks: int, least: int, notes: Notes, last: Sequence[int] | None = None
) -> Choice:
    """Chooses the machines on which a run continues: as many of those that are present as fit a mesh with the same
    degrees, except for data parallelism.

    Args:
        here: indices of the machines that are present, ascending.
        machines: number of machines at the first start.
        ranks: on each machine.
        least: smallest number of machines.
        notes: what the first rank has noted.
        last: the machines of the last start; None: all.
    """
    if len(here) == machines:
        is_back = last is not None and len(last) < machines
        return Choice(machines=tuple(here), why=f"all {machines} machines continue" if is_back else "")
    missing = ", ".join(str(machine) for machine in range(machines) if machine not in here)
    without = f"machine {missing} is lost" if machines - len(here) == 1 else f"machines {missing} are lost"
    reason = None
    if len(here) < least:
        reason = f"{len(here)} of {machines} machines are left, fewer than --min-nnodes {least}"
    elif not notes.fits:
        reason = "the script has not created a NeuronAccelerator yet, which determines the possible numbers of ranks"
    elif not notes.accumulates:
        reason = (
            "a step would have fewer samples, because the script does not train with accelerator.accumulate(model) "
            "(gradient_accumulation_steps may be 1)"
        )
    possible = [fit for fit in notes.fits if fit.ranks % ranks == 0 and least <= fit.ranks // ranks <= len(here)]
    if reason is None and not possible:
        reason = f"no mesh with the same degrees but for data parallelism fits {least} to {len(here)} machines"
    if reason is not None:
        return Choice(machines=(), why=f"{without}, and {reason}")
    fit, full = possible[0], notes.fits[0]
    taken = tuple(here[: fit.ranks // ranks])
    return Choice(
        machines=taken,
        full_size=full.data_parallel,
        why=f"{without}; {len(taken)} of {machines} continue, with {fit.ranks} rank{'s' * (fit.ranks > 1)}; mesh: "
        f"{fit.mesh}; a step has {full.data_parallel // fit.data_parallel} times the micro-batches of the first start, "
        "and the same number of samples",
    )
