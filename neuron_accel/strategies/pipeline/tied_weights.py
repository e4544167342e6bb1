# SPDX-License-Identifier: Apache-2.0
"""Tied weights on several stages: one parameter of the model, a copy on each of these stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from neuron_accel.contract import Group, ParameterMap, ParameterRecord, Run


@dataclass
class Tie:
    """A parameter that is on several stages.

    Args:
        record: the parameter; its ``current`` is None on a stage without a copy.
        group: the ranks of this pipeline that hold it; unused on other ranks.
        stages: positions in the pipeline of the stages that hold it.
        first: position of the stage that holds it under its FQN, its name in one process.
        trains: whether it requires a gradient, on every stage.
    """

    record: ParameterRecord
    group: Group
    stages: tuple[int, ...]
    first: int
    trains: bool


class Ties:
    """Keeps copies of tied weights equal: their gradients are summed, and after a step the weights of one copy are
    broadcast. That copy is the one under the parameter's FQN, since a loop that selects parameters by name finds it
    there, for example to freeze it, to add it to an optimizer, or to set its gradient to zero.

    The backward pass of a micro-batch adds a partial gradient to each copy. Gradients of earlier passes are stored
    meanwhile, because they are already summed.

    Args:
        ties: the ties of the full model, in the same order on every rank.
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
        """Freezes or unfreezes all copies of a weight that was frozen or unfrozen under its FQN, since a loop that
        selects by name finds that name on one stage only. Collective over the pipeline, with one small message if there
        are ties.

        Raises:
            UsageError: on every stage, if only a copy with another name was frozen or unfrozen.
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
        """Returns the values of all stages, by their positions."""
        if not self._run.backend.reads_are_free:
            return self._run.backend.all_gather_object(changed, self._group)
        flags = torch.zeros((self._group.size, len(changed)), device=self._run.device)
        flags[self._group.index] = torch.tensor(changed, dtype=flags.dtype)
        return self._run.backend.all_reduce(flags, self._group).bool().tolist()

    def begin(self) -> None:
        """Must be called before the backward passes of a step. Stores earlier gradients."""
        self._before = []
        for _, parameter in self._learning():
            self._before.append(parameter.grad)
            parameter.grad = None

    def finish(self) -> None:
        """Must be called after all backward passes of this rank. Sums gradients; collective over the ranks of each
        tie."""
        work = []
        for (tie, parameter), before in zip(self._learning(), self._before, strict=True):
            part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if before is not None and tie.first == self._group.index:
                part = before + part
            work.append((parameter, self._run.backend.start_all_reduce(part, tie.group)))
        for parameter, pending in work:
            parameter.grad = pending.wait()

    def agree(self) -> None:
        """Broadcasts the weights of one copy after an optimizer step. Copies may differ, since rounding may depend on
        the position in an optimizer's buffer, and an optimizer may hold the parameter on one stage only."""
        for tie, parameter in self._learning():
            with torch.no_grad():
                source = tie.stages.index(tie.first)
                parameter.copy_(self._run.backend.broadcast(parameter.detach(), tie.group, source))


def _renamed(tie: Tie, stages: list[int]) -> UsageError:
    """Returns the error for a copy that was frozen or unfrozen under another name than the FQN."""
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
    """Returns the ties of a model, and creates their groups. Collective over all ranks.

    Args:
        parameters: the parameters of the model.
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
    """Returns groups of the ranks that do not hold a tied weight, to complete the partition. On a lazy device all
    groups must have equal size.

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
    """Checks that parameters on different stages do not share memory without being one object.

    Args:
        model: the full model.
        stage_of: the stage of each parameter's FQN.

    Raises:
        UnsupportedModelError: if two parameters do.
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
