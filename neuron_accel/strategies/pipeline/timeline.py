"""When each action of a schedule happens, if computing takes this long and transfers take no time. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuron_accel.strategies.pipeline.actions import Action, Kind, Schedule, needs

UNIT_COSTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
"""A backward pass takes about twice as long as a forward pass: it makes gradients of inputs and of weights."""


@dataclass(frozen=True)
class Span:
    """An action on a rank, from ``start`` to ``end``, in the units of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a schedule looks like in time.

    Args:
        schedule: the schedule.
        spans: its computations, by rank and time.
    """

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def duration(self) -> float:
        return max(span.end for span in self.spans)

    def busy(self, rank: int) -> float:
        """How long a rank computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    @property
    def bubble(self) -> float:
        """How long the busiest rank does not compute."""
        return self.duration - max(self.busy(rank) for rank in range(self.schedule.ranks))

    @property
    def bubble_share(self) -> float:
        """The part of the time, 0 to 1, in which the busiest rank does not compute."""
        return self.bubble / self.duration


def make_timeline(schedule: Schedule, costs: Mapping[Kind, float] | None = None) -> Timeline:
    """Plays a schedule through.

    Args:
        schedule: the schedule.
        costs: duration of each kind of computation; :data:`UNIT_COSTS` by default.
    """
    costs = {**UNIT_COSTS, **(costs or {})}
    lists = [schedule.compute(rank) for rank in range(schedule.ranks)]
    ends: dict[Action, float] = {}
    free, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    spans: list[Span] = []
    while any(p < len(actions) for p, actions in zip(position, lists, strict=True)):
        before = len(spans)
        for rank, actions in enumerate(lists):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                inputs = needs(action, schedule.stages)
                if not all(needed in ends for needed in inputs):
                    break
                start = max([free[rank], *(ends[needed] for needed in inputs)])
                ends[action] = free[rank] = start + costs[action.kind]
                spans.append(Span(rank, action, start, free[rank]))
                position[rank] += 1
        if len(spans) == before:
            raise ValueError("the schedule waits for itself")
    return Timeline(schedule, tuple(sorted(spans, key=lambda span: (span.rank, span.start))))


def in_flight(schedule: Schedule, rank: int) -> int:
    """The largest number of forward passes whose activations a rank keeps at a time, over all its stages."""
    kept = most = 0
    ends = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
    for action in schedule.compute(rank):
        kept += (action.kind is Kind.FORWARD) - (action.kind in ends)
        most = max(most, kept)
    return most
