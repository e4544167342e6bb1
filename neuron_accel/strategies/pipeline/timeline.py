# SPDX-License-Identifier: Apache-2.0
"""When each action of a schedule happens, with transfers that take no time, and how many micro-batches a rank keeps.
Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from neuron_accel.errors import ConfigurationError
from neuron_accel.strategies.pipeline.schedules import Action, Kind, Schedule, needs

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, activations",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
"""Names of kinds of computations."""

UNIT_COSTS = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
"""Relative durations. A backward pass takes about twice as long as a forward pass, as it computes the gradients of
inputs and of weights."""


@dataclass(frozen=True)
class TimedAction:
    """A computation on a rank from ``start`` to ``end``, in units of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with the time of each computation.

    Args:
        schedule: the schedule.
        spans: its computations, sorted by rank and time.
    """

    schedule: Schedule
    spans: tuple[TimedAction, ...]

    @property
    def duration(self) -> float:
        """When the last computation ends."""
        return max(span.end for span in self.spans)

    def busy(self, rank: int) -> float:
        """For how long a rank computes."""
        return sum(span.end - span.start for span in self.spans if span.rank == rank)

    @property
    def bubble(self) -> float:
        """For how long the rank that computes longest is idle."""
        return self.duration - max(self.busy(rank) for rank in range(self.schedule.ranks))

    @property
    def bubble_share(self) -> float:
        """The fraction of time, from 0 to 1, in which the rank that computes longest is idle."""
        return self.bubble / self.duration


def make_timeline(schedule: Schedule, costs: Mapping[Kind, float] | None = None) -> Timeline:
    """Simulates a schedule: each rank computes its actions in order, each as soon as its inputs are available.

    Args:
        schedule: the schedule.
        costs: duration of each kind of computation; :data:`UNIT_COSTS` by default.

    Raises:
        ConfigurationError: if a cost is not a finite number above 0.
        ValueError: if the schedule deadlocks.
    """
    costs = {**UNIT_COSTS, **(costs or {})}
    for kind, cost in costs.items():
        if not 0 < cost < math.inf:
            raise ConfigurationError(
                f"A {NAMES[kind]} pass cannot take {cost:g} forward passes.",
                where="costs",
                fix="pass a number above 0; 2 is usual for a backward pass",
            )
    lists = [schedule.compute(rank) for rank in range(schedule.ranks)]
    ends: dict[Action, float] = {}
    free, position = [0.0] * schedule.ranks, [0] * schedule.ranks
    spans: list[TimedAction] = []
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
                spans.append(TimedAction(rank, action, start, free[rank]))
                position[rank] += 1
        if len(spans) == before:
            raise ValueError("the schedule deadlocks: an action waits for a later one")
    return Timeline(schedule, tuple(sorted(spans, key=lambda span: (span.rank, span.start))))


def in_flight(schedule: Schedule, rank: int) -> int:
    """The largest number of forward passes whose activations a rank keeps at the same time, over all its stages."""
    kept = most = 0
    ends = {Kind.BACKWARD, Kind.BACKWARD_WEIGHT}
    for action in schedule.compute(rank):
        kept += (action.kind is Kind.FORWARD) - (action.kind in ends)
        most = max(most, kept)
    return most
