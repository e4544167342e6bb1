"""Tied weights on several stages: one parameter of the model, a copy on each of these stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.contract import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from neuron_accel.contract import Group, ParameterMap, ParameterRecord, Run


@dataclass
class Tie:
    """A parameter that is on several stages.

    Args:
        record: the parameter; its ``current`` is None on a stage without a copy.
        group: the ranks of this pipeline that hold it; on other ranks, another group.
        stages: the positions in the pipeline of those that hold it.
        first: the position of the stage that holds it under its FQN, its name in one process.
        trains: whether it requires a gradient, on every stage.
    """

    record: ParameterRecord
    group: Group
    stages: tuple[int, ...]
    first: int
    trains: bool


class Ties:
    """Keeps copies of tied weights equal. They train together: gradients are summed, and after a step one copy's
    weights are sent to all. What may differ is decided by the stage that holds the parameter under its FQN: a loop that
    selects parameters by name finds it there, to freeze it, to give it to an optimizer, or to set its gradient to zero.

    A micro-batch's backward pass adds a partial gradient to each copy. Earlier gradients are set aside meanwhile,
    because they are sums already.

    Args:
        ties: of the full model, in the same order on every rank.
        run: the run.
        group: the pipeline.
    """

    def __init__(self, ties: list[Tie], run: Run, group: Group) -> None:
        self._ties, self._run, self._group = ties, run, group
        self._before: list[torch.Tensor | None] = []

    def _held(self) -> list[tuple[Tie, nn.Parameter]]:
        pairs = [(tie, tie.record.current) for tie in self._ties]
        return [(tie, parameter) for tie, parameter in pairs if parameter is not None]

    def _learning(self) -> list[tuple[Tie, nn.Parameter]]:
        return [(tie, parameter) for tie, parameter in self._held() if tie.trains]

    def follow(self) -> None:
        """Freezes or unfreezes every copy of a weight that was frozen or unfrozen under its FQN: a loop that selects by
        name finds that name on one stage only. Collective over the pipeline; one small exchange if there are ties.

        Raises:
            UsageError: on every stage, if only a copy with another name was.
        """
        if not self._ties:
            return
        changed = [
            tie.record.current is not None and tie.record.current.requires_grad != tie.trains for tie in self._ties
        ]
        everyone = self._exchange(changed)
        for index, tie in enumerate(self._ties):
            stages = [stage for stage in tie.stages if everyone[stage][index]]
            if stages and tie.first not in stages:
                raise _renamed(tie, stages)
            tie.trains ^= bool(stages)
        for tie, parameter in self._held():
            parameter.requires_grad_(tie.trains)

    def _exchange(self, changed: list[bool]) -> list[list[bool]]:
        """The values of every stage, by its position."""
        if not self._run.backend.reads_are_free:
            return self._run.backend.all_gather_object(changed, self._group)
        told = torch.zeros((self._group.size, len(changed)), device=self._run.device)
        told[self._group.index] = torch.tensor(changed, dtype=told.dtype)
        return self._run.backend.all_reduce(told, self._group).bool().tolist()

    def begin(self) -> None:
        """A step's backward passes begin."""
        self._before = []
        for _, parameter in self._learning():
            self._before.append(parameter.grad)
            parameter.grad = None

    def finish(self) -> None:
        """All backward passes of this rank are over. Collective over each tie's ranks."""
        work = []
        for (tie, parameter), before in zip(self._learning(), self._before, strict=True):
            part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if before is not None and tie.first == self._group.index:
                part = before + part
            work.append((parameter, self._run.backend.start_all_reduce(part, tie.group)))
        for parameter, pending in work:
            parameter.grad = pending.wait()

    def agree(self) -> None:
        """Makes the copies equal after the optimizer has updated each from the same gradient. Rounding may depend on
        the neighbours of a copy in an optimizer's buffer, and an optimizer may hold the parameter on one stage only."""
        for tie, parameter in self._learning():
            with torch.no_grad():
                source = tie.stages.index(tie.first)
                parameter.copy_(self._run.backend.broadcast(parameter.detach(), tie.group, source))


def _renamed(tie: Tie, stages: list[int]) -> UsageError:
    """A copy was frozen or unfrozen under a name that one process does not list."""
    name, *others = tie.record.names
    done = "frozen" if tie.trains else "unfrozen"
    return UsageError(
        f"{name!r} and {' and '.join(map(repr, others))} are tied, but only the copy on "
        f"stage {' and '.join(map(str, stages))} of the pipeline was {done}, not the one of {name!r} on stage "
        f"{tie.first}.",
        where=f"parameter {name!r}",
        why=f"they are one parameter, named {name!r} in one process; its copies train together",
        fix=f"freeze or unfreeze {name!r}: the other stages follow",
    )


def find_ties(parameters: ParameterMap, run: Run, axis: str, first: dict[str, int], trained: set[str]) -> list[Tie]:
    """The ties of a model; creates their groups, which is collective over all ranks.

    Args:
        parameters: of the model.
        run: the run.
        axis: the mesh axis of the pipeline.
        first: the position along it of the stage that holds a parameter under its FQN, for each FQN.
        trained: the FQNs of parameters that require a gradient.
    """
    ties = []
    for record in parameters:
        holders = record.holders.get(axis, ())
        if len(holders) < 2:
            continue
        partition = []
        for ranks in run.mesh.groups(axis):
            partition.append(tuple(ranks[index] for index in holders))
            others = [rank for index, rank in enumerate(ranks) if index not in holders]
            partition += _others(others, len(holders), run, record, axis)
        group = run.backend.new_group(partition, f"tied over {axis}")
        ties.append(Tie(record, group, holders, first[record.fqn], trains=record.fqn in trained))
    return ties


def _others(ranks: list[int], size: int, run: Run, record: ParameterRecord, axis: str) -> list[tuple[int, ...]]:
    """Groups of the ranks that do not hold a tied weight. They do not use them, but where groups are part of a graph,
    all have one size.

    Raises:
        UnsupportedModelError: if that is not possible.
    """
    if not run.backend.is_lazy:
        return [(rank,) for rank in ranks]
    if len(ranks) % size:
        raise UnsupportedModelError(
            f"{' and '.join(repr(name) for name in record.names)} are tied and are on {size} of {size + len(ranks)} "
            "stages.",
            where=f"axis {axis!r} on the {run.backend.name} backend",
            why="the groups of a collective have one size, and the others cannot form such groups",
            fix=f"use a number of stages that {size} divides, or untie the weights (tie_word_embeddings=False)",
        )
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def check_shared_memory(model: nn.Module, stage_of: dict[str, int]) -> None:
    """Refuses parameters that are tied by sharing memory instead of being one object, if they are on different stages.

    Args:
        model: the full model.
        stage_of: the stage of each parameter's FQN.

    Raises:
        UnsupportedModelError: naming both.
    """
    seen: dict[tuple[torch.device, int], tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.device.type == "meta" or not parameter.numel():
            continue
        memory = (parameter.device, parameter.untyped_storage().data_ptr())
        other_name, other = seen.setdefault(memory, (name, parameter))
        if other is not parameter and stage_of[other_name] != stage_of[name]:
            raise UnsupportedModelError(
                f"{other_name!r} and {name!r} share memory but are two parameters, on different stages.",
                why="each stage would train a copy of its own, and the copies would diverge",
                fix="tie them by assigning the parameter itself (b.weight = a.weight), or choose other stage_cuts",
            )
