"""Weights that several stages share: one parameter of the model, a copy on each of these stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from neuron_accel.contract import UnsupportedModelError

if TYPE_CHECKING:
    from neuron_accel.contract import Group, ParameterMap, ParameterRecord, Run


@dataclass
class Tie:
    """A parameter that lies on several stages, one of them on this rank.

    Args:
        record: the parameter.
        group: the ranks of this pipeline that hold it.
    """

    record: ParameterRecord
    group: Group


class Ties:
    """Keeps copies of tied weights the same: gradients are summed, and after a step the first stage's weights hold.

    A micro-batch's backward pass gives each copy a part of the gradient. What was there before is set aside meanwhile,
    because it is a sum already.
    """

    def __init__(self, ties: list[Tie], run: Run) -> None:
        self._ties, self._run = ties, run
        self._before: list[torch.Tensor | None] = []

    def __len__(self) -> int:
        return len(self._ties)

    def _learning(self) -> list[tuple[Tie, nn.Parameter]]:
        pairs = [(tie, tie.record.current) for tie in self._ties]
        return [(tie, parameter) for tie, parameter in pairs if parameter is not None and parameter.requires_grad]

    def begin(self) -> None:
        """A step's backward passes begin."""
        self._before = []
        for _, parameter in self._learning():
            self._before.append(parameter.grad)
            parameter.grad = None

    def finish(self) -> None:
        """All backward passes of this rank are over. Collective over each tie's ranks."""
        work = []
        for tie, parameter in self._learning():
            part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            work.append((parameter, self._run.backend.start_all_reduce(part, tie.group)))
        for (parameter, pending), before in zip(work, self._before, strict=True):
            total = pending.wait()
            parameter.grad = total if before is None else before + total

    def agree(self) -> None:
        """The optimizer has updated each copy from the same gradient. Rounding may depend on what lies beside a copy in
        an optimizer's buffer, so the first stage's copy is taken."""
        for tie, parameter in self._learning():
            with torch.no_grad():
                parameter.copy_(self._run.backend.broadcast(parameter.detach(), tie.group))


def find_ties(parameters: ParameterMap, run: Run, axis: str) -> list[Tie]:
    """The ties of this rank; makes their groups, which is collective over all ranks."""
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
        if record.current is not None:
            ties.append(Tie(record, group))
    return ties


def _others(ranks: list[int], size: int, run: Run, record: ParameterRecord, axis: str) -> list[tuple[int, ...]]:
    """Groups of the ranks that do not hold a tied weight. They have nothing to do with it, but where groups are part of
    a graph all have one size.

    Raises:
        UnsupportedModelError: if they cannot have.
    """
    if not run.backend.is_lazy:
        return [(rank,) for rank in ranks]
    if len(ranks) % size:
        raise UnsupportedModelError(
            f"{' and '.join(repr(name) for name in record.names)} are tied and lie on {size} of {size + len(ranks)} "
            "stages.",
            where=f"axis {axis!r} on the {run.backend.name} backend",
            why="the ranks of a collective lie in groups of one size, and the others cannot form such groups",
            fix=f"use a number of stages that {size} divides, or untie the weights (tie_word_embeddings=False)",
        )
    return [tuple(ranks[start : start + size]) for start in range(0, len(ranks), size)]


def check_shared_memory(model: nn.Module, stage_of: dict[str, int]) -> None:
    """Refuses parameters that are tied by sharing memory instead of being one object, if a cut runs between them.

    Args:
        model: the whole model.
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
                f"{other_name!r} and {name!r} share memory but are two parameters, and a cut runs between them.",
                why="each stage would train a copy of its own, and they would drift apart",
                fix="tie them by assigning the parameter itself (b.weight = a.weight), or choose other stage_cuts",
            )
