# SPDX-License-Identifier: Apache-2.0
"""When each computation of a pipeline schedule happens, with transfers that take no time, and how many micro-batches a
rank keeps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import neuron_accel
from neuron_accel.errors import ConfigurationError


class Kind(str, Enum):
    """Kinds of computations, by the letters of :meth:`~neuron_accel.PipelineParallelPlugin.computations`."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"


@dataclass(frozen=True, order=True)
class Action:
    """One computation: of which kind, of which stage, of which micro-batch."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """The computations of each rank of a pipeline, in their order. Stage s is on rank ``s % ranks``."""

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)

    @property
    def stages(self) -> int:
        """Number of stages in all."""
        return self.ranks * self.virtual_stages


def schedule_of(plugin: neuron_accel.PipelineParallelPlugin) -> Schedule:
    """Returns the schedule of a pipeline.

    Raises:
        ConfigurationError: if there is none for its numbers of stages and micro-batches.
    """
    actions = tuple(
        tuple(Action(Kind(kind), stage, microbatch) for kind, stage, microbatch in rank)
        for rank in plugin.computations()
    )
    ranks, microbatches = plugin.pipeline_parallel_size, plugin.num_microbatches
    return Schedule(plugin.schedule, ranks, microbatches, plugin.virtual_stages, actions)


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """Returns the computations whose results a computation uses."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage else ()
    if kind is Kind.BACKWARD_WEIGHT:
        return (Action(Kind.BACKWARD_INPUT, stage, microbatch),)
    before = (Action(Kind.FORWARD, stage, microbatch),)
    return before if stage == stages - 1 else (*before, Action(kind, stage + 1, microbatch))


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
    lists = schedule.actions
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
    for action in schedule.actions[rank]:
        kept += (action.kind is Kind.FORWARD) - (action.kind in ends)
        most = max(most, kept)
    return most
