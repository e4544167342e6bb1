"""What a schedule consists of: pure data, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(str, Enum):
    """What a rank does."""

    FORWARD = "F"
    """One stage's forward pass of one micro-batch."""
    BACKWARD = "B"
    """The whole backward pass."""
    BACKWARD_INPUT = "I"
    """The part of the backward pass that the previous stage waits for: gradients of activations."""
    BACKWARD_WEIGHT = "W"
    """The rest of the backward pass: gradients of weights."""
    SEND_ACTIVATION = "send activation"
    """To the next stage."""
    RECEIVE_ACTIVATION = "receive activation"
    """From the previous stage."""
    SEND_GRADIENT = "send gradient"
    """To the previous stage."""
    RECEIVE_GRADIENT = "receive gradient"
    """From the next stage."""

    @property
    def is_compute(self) -> bool:
        return len(self.value) == 1

    @property
    def is_send(self) -> bool:
        return self.value.startswith("send")

    @property
    def is_receive(self) -> bool:
        return self.value.startswith("receive")


@dataclass(frozen=True, order=True)
class Action:
    """One entry of a rank's list.

    Args:
        kind: what is done.
        stage: the stage that does it, 0 to stages x virtual stages - 1.
        microbatch: for which micro-batch.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}@{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """Each rank's list of actions.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zero-bubble"`` or ``"forward"``.
        ranks: number of ranks along the pipeline.
        microbatches: number of micro-batches.
        virtual_stages: number of stages on each rank. Stage s lies on rank ``s % ranks``.
        actions: by rank, in the order in which the rank starts them.
    """

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int
    actions: tuple[tuple[Action, ...], ...] = field(repr=False)

    @property
    def stages(self) -> int:
        """Number of stages in all."""
        return self.ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def peer(self, action: Action) -> int:
        """The rank at the other end of a transfer."""
        step = 1 if action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT) else -1
        return self.rank_of(action.stage + step)

    def compute(self, rank: int) -> tuple[Action, ...]:
        """A rank's actions without transfers."""
        return tuple(action for action in self.actions[rank] if action.kind.is_compute)


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """The compute actions whose results a compute action uses."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage else ()
    if kind is Kind.BACKWARD_WEIGHT:
        return (Action(Kind.BACKWARD_INPUT, stage, microbatch),)
    before = (Action(Kind.FORWARD, stage, microbatch),)
    return before if stage == stages - 1 else (*before, Action(kind, stage + 1, microbatch))
