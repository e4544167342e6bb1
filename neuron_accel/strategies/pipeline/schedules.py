"""The schedules: pure functions from numbers to lists of actions, without torch.

Sources: GPipe, Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (NeurIPS
2019). 1F1B and interleaved: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (SC 2021), section 2.2. Zero bubble: Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024), the
schedule ZB-H1, which needs no more memory than 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable

from neuron_accel.engine.errors import ConfigurationError, did_you_mean
from neuron_accel.strategies.pipeline.actions import Action, Kind, Schedule
from neuron_accel.strategies.pipeline.transfers import with_transfers

Lists = list[list[Action]]


def make_schedule(name: str, *, stages: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule of a name.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"`` or ``"zero-bubble"``; ``"forward"`` runs forward only.
        stages: number of ranks along the pipeline.
        microbatches: number of parts of a batch.
        virtual_stages: number of stages on each rank.

    Raises:
        ConfigurationError: for numbers that make no schedule, or an unknown name.
    """
    if name not in _MAKERS:
        known = [known for known in _MAKERS if known != "forward"]
        raise ConfigurationError(f"There is no schedule {name!r}.", where="schedule", fix=did_you_mean(name, known))
    for what, value in (("stages", stages), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if type(value) is not int or value < 1:
            raise ConfigurationError(f"{what} is {value!r}; it must be a whole number of at least 1.", where="schedule")
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
    """Each rank runs just enough forward passes for the first gradient to arrive, then one of each in turn."""
    lists = []
    for rank in range(ranks):
        forward = [Action(Kind.FORWARD, rank, m) for m in range(microbatches)]
        backward = [Action(Kind.BACKWARD, rank, m) for m in range(microbatches)]
        lists.append(_alternate(forward, backward, min(ranks - rank - 1, microbatches)))
    return lists


def _interleaved(ranks: int, microbatches: int, virtual: int) -> Lists:
    """1F1B over several stages a rank: micro-batches go through a rank's stages in groups of as many as ranks."""
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
    """ZB-H1: 1F1B whose backward passes come in two halves. The second half, which nobody waits for, follows as many
    micro-batches later as the rank keeps fewer activations than the first rank does, and fills the end."""
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
