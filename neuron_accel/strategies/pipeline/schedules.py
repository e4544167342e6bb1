# SPDX-License-Identifier: Apache-2.0
"""Schedules as data: lists of actions and transfers, computed by pure functions. Without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from neuron_accel.errors import ConfigurationError, did_you_mean


# ---- The elements of a schedule: pure data, without torch ------------------------------------------------------------
class Kind(str, Enum):
    """Kinds of actions."""

    FORWARD = "F"
    """One stage's forward pass of one micro-batch."""
    BACKWARD = "B"
    """The full backward pass."""
    BACKWARD_INPUT = "I"
    """The first half of the backward pass: gradients of activations, for which the previous stage waits."""
    BACKWARD_WEIGHT = "W"
    """The second half of the backward pass: gradients of weights."""
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
        kind: kind of the action.
        stage: the stage that performs it, 0 to stages x virtual stages - 1.
        microbatch: index of the micro-batch.
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
        virtual_stages: number of stages on each rank. Stage s is on rank ``s % ranks``.
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
        """Returns the other rank of a transfer."""
        step = 1 if action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT) else -1
        return self.rank_of(action.stage + step)

    def compute(self, rank: int) -> tuple[Action, ...]:
        """Returns a rank's actions without transfers."""
        return tuple(action for action in self.actions[rank] if action.kind.is_compute)


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """Returns the compute actions whose results a compute action uses."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.FORWARD:
        return (Action(Kind.FORWARD, stage - 1, microbatch),) if stage else ()
    if kind is Kind.BACKWARD_WEIGHT:
        return (Action(Kind.BACKWARD_INPUT, stage, microbatch),)
    before = (Action(Kind.FORWARD, stage, microbatch),)
    return before if stage == stages - 1 else (*before, Action(kind, stage + 1, microbatch))


# ---- Transfers between ranks -----------------------------------------------------------------------------------------
def with_transfers(compute: Sequence[Sequence[Action]], stages: int) -> tuple[tuple[Action, ...], ...]:
    """Returns each rank's computations with the sends and receives that they need.

    The computations are simulated. After a computation whose result another rank needs, a send is appended to the list
    of its rank and a receive to that of the other rank at the same time. Any two ranks therefore list the messages
    between them in the same order, and there is no deadlock even if sends block until they are received. A receive
    precedes the next action of its rank, so that messages overlap with computation.

    Raises:
        ValueError: if the computations wait for each other.
    """
    ranks = len(compute)
    result: list[list[Action]] = [[] for _ in compute]
    for actions in in_rounds(compute, stages):
        for rank, action in actions.items():
            result[rank].append(action)
            for send, receive in transfers_after(action, stages):
                target = receive.stage % ranks
                if target != rank:
                    result[rank].append(send)
                    result[target].append(receive)
    return tuple(tuple(actions) for actions in result)


def in_rounds(compute: Sequence[Sequence[Action]], stages: int) -> Iterator[dict[int, Action]]:
    """Simulates computations in rounds. In a round each rank performs its next action if the actions that it needs were
    performed in earlier rounds.

    Yields:
        The actions of each round, by rank.

    Raises:
        ValueError: if the computations wait for each other.
    """
    done: set[Action] = set()
    position = [0] * len(compute)
    while any(p < len(actions) for p, actions in zip(position, compute, strict=True)):
        able = {
            rank: actions[position[rank]]
            for rank, actions in enumerate(compute)
            if position[rank] < len(actions) and done.issuperset(needs(actions[position[rank]], stages))
        }
        if not able:
            waiting = [str(c[p]) for c, p in zip(compute, position, strict=True) if p < len(c)]
            raise ValueError(f"these computations wait for each other: {', '.join(waiting)}")
        for rank, action in able.items():
            position[rank] += 1
            done.add(action)
        yield able


def transfers_after(action: Action, stages: int) -> list[tuple[Action, Action]]:
    """Returns the send and the receive for the result of a computation, as a list of at most one pair."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and stage < stages - 1:
        return [
            (Action(Kind.SEND_ACTIVATION, stage, microbatch), Action(Kind.RECEIVE_ACTIVATION, stage + 1, microbatch))
        ]
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage > 0:
        return [(Action(Kind.SEND_GRADIENT, stage, microbatch), Action(Kind.RECEIVE_GRADIENT, stage - 1, microbatch))]
    return []


# ---- The schedules ---------------------------------------------------------------------------------------------------
# Sources: GPipe, Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
# (NeurIPS 2019). 1F1B and interleaved: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
# Clusters Using Megatron-LM" (SC 2021), section 2.2. Zero bubble: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR
# 2024), the schedule ZB-H1, which needs no more memory than 1F1B.
Lists = list[list[Action]]


def make_schedule(name: str, *, stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """Returns the schedule of that name.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zero-bubble"``; ``"forward"`` runs forward only.
        stages: number of ranks along the pipeline.
        microbatches: number of micro-batches in a batch.
        virtual_stages: number of stages on each rank.

    Raises:
        ConfigurationError: for numbers without a valid schedule, or an unknown name.
    """
    if name not in _MAKERS:
        known = [known for known in _MAKERS if known != "forward"]
        raise ConfigurationError(f"There is no schedule {name!r}.", where="schedule", fix=did_you_mean(name, known))
    for what, value in (("stages", stages), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if type(value) is not int or value < 1:
            raise ConfigurationError(f"{what} is {value!r}; it must be an integer of at least 1.", where="schedule")
    _check_virtual(name, stages, microbatches, virtual_stages)
    compute = _MAKERS[name](stages, microbatches, virtual_stages)
    return Schedule(
        name=name,
        ranks=stages,
        microbatches=microbatches,
        virtual_stages=virtual_stages,
        actions=with_transfers(compute, stages * virtual_stages),
    )


def _check_virtual(name: str, stages: int, microbatches: int, virtual_stages: int) -> None:
    if name == "interleaved":
        if virtual_stages < 2:
            raise ConfigurationError(
                f"The interleaved schedule with virtual_stages={virtual_stages} is 1F1B.",
                where="virtual_stages",
                fix='give each rank two stages or more, or use schedule="1f1b"',
            )
        if stages < 2:
            raise ConfigurationError("Interleaving needs at least 2 ranks.", where="virtual_stages")
        if microbatches % stages:
            below = microbatches // stages * stages
            legal = " or ".join(str(n) for n in (below, below + stages) if n)
            raise ConfigurationError(
                f"The interleaved schedule cannot run {microbatches} micro-batches on {stages} ranks.",
                where="num_microbatches",
                why="ranks take micro-batches in groups of as many as there are ranks",
                fix=f"use {legal} micro-batches",
            )
    elif virtual_stages != 1 and name != "forward":
        raise ConfigurationError(
            f"The schedule {name!r} runs one stage on each rank, not {virtual_stages}.",
            where="virtual_stages",
            fix='leave virtual_stages at 1, or use schedule="interleaved"',
        )


def _gpipe(ranks: int, microbatches: int, _virtual: int) -> Lists:
    """All forward, then all backward."""
    return [
        [Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(microbatches)]
        for rank in range(ranks)
    ]


def _forward(ranks: int, microbatches: int, virtual: int) -> Lists:
    """Forward only, for evaluation."""
    return [
        [Action(Kind.FORWARD, chunk * ranks + rank, m) for m in range(microbatches) for chunk in range(virtual)]
        for rank in range(ranks)
    ]


def _one_forward_one_backward(ranks: int, microbatches: int, _virtual: int) -> Lists:
    """Each rank runs forward passes until the first gradient arrives, then alternates forward and backward passes."""
    lists = []
    for rank in range(ranks):
        forward = [Action(Kind.FORWARD, rank, m) for m in range(microbatches)]
        backward = [Action(Kind.BACKWARD, rank, m) for m in range(microbatches)]
        lists.append(_alternate(forward, backward, min(ranks - rank - 1, microbatches)))
    return lists


def _interleaved(ranks: int, microbatches: int, virtual: int) -> Lists:
    """1F1B with several stages on each rank, which process micro-batches in groups of as many as there are ranks."""
    total, group = microbatches * virtual, ranks * virtual

    def at(position: int, kind: Kind, rank: int) -> Action:
        chunk = position % group // ranks
        if kind is Kind.BACKWARD:
            chunk = virtual - 1 - chunk
        return Action(kind, chunk * ranks + rank, position // group * ranks + position % ranks)

    lists = []
    for rank in range(ranks):
        forward = [at(i, Kind.FORWARD, rank) for i in range(total)]
        backward = [at(i, Kind.BACKWARD, rank) for i in range(total)]
        lists.append(_alternate(forward, backward, min(2 * (ranks - rank - 1) + (virtual - 1) * ranks, total)))
    return lists


def _alternate(forward: list[Action], backward: list[Action], warm_up: int) -> list[Action]:
    steady = [action for pair in zip(forward[warm_up:], backward, strict=False) for action in pair]
    return [*forward[:warm_up], *steady, *backward[len(forward) - warm_up :]]


def _zero_bubble(ranks: int, microbatches: int, _virtual: int) -> Lists:
    """ZB-H1: 1F1B with backward passes in two halves. The second half, for which no other rank waits, is delayed by as
    many micro-batches as the index of the rank, which keeps that many fewer activations than the first rank, and fills
    the bubble at the end."""
    lists = []
    for rank in range(ranks):
        forward = [Action(Kind.FORWARD, rank, m) for m in range(microbatches)]
        inputs = [Action(Kind.BACKWARD_INPUT, rank, m) for m in range(microbatches)]
        order = []
        for action in _alternate(forward, inputs, min(ranks - rank - 1, microbatches)):
            order.append(action)
            if action.kind is Kind.BACKWARD_INPUT and action.microbatch >= rank:
                order.append(Action(Kind.BACKWARD_WEIGHT, rank, action.microbatch - rank))
        late = range(max(0, microbatches - rank), microbatches)
        lists.append([*order, *(Action(Kind.BACKWARD_WEIGHT, rank, m) for m in late)])
    return lists


_MAKERS: dict[str, Callable[[int, int, int], Lists]] = {
    "1f1b": _one_forward_one_backward,
    "gpipe": _gpipe,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
    "forward": _forward,
}

SCHEDULES = tuple(name for name in _MAKERS if name != "forward")
"""Names of the schedules that train."""
