"""Puts the transfers between ranks into lists of computations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from neuron_accel.strategies.pipeline.actions import Action, Kind, needs


def with_transfers(compute: Sequence[Sequence[Action]], stages: int) -> tuple[tuple[Action, ...], ...]:
    """Each rank's computations with the sends and receives that they need.

    The computations are played through. Whenever one ends whose result another rank needs, a send is appended to the
    list of the one and a receive to that of the other at the same moment. Any two ranks therefore name the messages
    between them in the same order, and the moments form an order in which every message could be handed over at once:
    even with sends that wait for their receiver nobody waits for ever. A receive stands in front of whatever its rank
    does next, so that messages travel while the rank computes.

    Raises:
        ValueError: if the computations wait for each other in a circle.
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
    """Plays computations through. In a round every rank that can go on does so by one action; which ones can is decided
    before any of them does: ranks keep pace as in reality.

    Yields:
        each round's actions, by rank.

    Raises:
        ValueError: if the computations wait for each other in a circle.
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
    """Who sends and who receives the result of a computation: none or one pair."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and stage < stages - 1:
        return [
            (Action(Kind.SEND_ACTIVATION, stage, microbatch), Action(Kind.RECEIVE_ACTIVATION, stage + 1, microbatch))
        ]
    if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage > 0:
        return [(Action(Kind.SEND_GRADIENT, stage, microbatch), Action(Kind.RECEIVE_GRADIENT, stage - 1, microbatch))]
    return []
