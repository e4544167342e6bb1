"""Carries out a division: replaces modules, cuts parameters, and lets activations in and out."""

from __future__ import annotations

from torch import nn

from neuron_accel.engine.parameters import ParameterMap
from neuron_accel.engine.run import Run
from neuron_accel.models.architecture import Architecture, join
from neuron_accel.strategies.tensor_parallel.boundary import Boundary
from neuron_accel.strategies.tensor_parallel.division import AXIS, Division
from neuron_accel.strategies.tensor_parallel.embedding import (
    VocabularyParallelHead,
    parallel_embedding,
    parallel_head,
)
from neuron_accel.strategies.tensor_parallel.linear import parallel_linear, refresh_features
from neuron_accel.strategies.tensor_parallel.regions import (
    change_output,
    gather_heads,
    install_logits_switch,
    install_regions,
)
from neuron_accel.strategies.tensor_parallel.vocabulary import Vocabulary


def rewrite(architecture: Architecture, divisions: list[Division], run: Run, parameters: ParameterMap) -> None:
    """Divides a model in place.

    Args:
        architecture: the model.
        divisions: what becomes of its modules.
        run: ranks and backend.
        parameters: gets the layouts; to be told to follow the model afterwards.
    """
    boundary = Boundary(run.backend, run.group(AXIS))
    cutter = _Cutter(run.coordinates)
    for division in divisions:
        if division.kind == "shared":
            for name in division.layouts:
                parameters.add_partial_axis(join(division.fqn, name), AXIS)
            continue
        module = _replacement(division, boundary)
        for name, layout in division.layouts.items():
            if layout.cuts:
                parameters.set_layout(join(division.fqn, name), layout)
                module.register_parameter(name, cutter.cut(getattr(module, name), layout))
        refresh_features(module)
        _put(architecture.model, division.fqn, module)
    _divide_attributes(architecture, boundary.group.size)
    install_regions(architecture, boundary)
    change_output(architecture, "attentions", gather_heads(boundary))
    head = architecture.head
    if head is not None and isinstance(head[1], VocabularyParallelHead):
        install_logits_switch(architecture.owner, head[1])


class _Cutter:
    """Cuts each parameter once, so that tied weights stay tied."""

    def __init__(self, coordinates: dict[str, int]) -> None:
        self._coordinates = coordinates
        self._done: dict[nn.Parameter, nn.Parameter] = {}

    def cut(self, parameter: nn.Parameter, layout) -> nn.Parameter:
        if parameter not in self._done:
            shard = layout.shard(parameter.detach(), self._coordinates)
            self._done[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        return self._done[parameter]


def _replacement(division: Division, boundary: Boundary) -> nn.Module:
    if division.kind in ("colwise", "rowwise"):
        return parallel_linear(division.module, division.kind, boundary)
    vocabulary = Vocabulary(size=division.module.weight.shape[0], backend=boundary.backend, group=boundary.group)
    if division.kind == "embedding":
        return parallel_embedding(division.fqn, division.module, vocabulary)
    return parallel_head(division.module, vocabulary)


def _put(model: nn.Module, fqn: str, module: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _divide_attributes(architecture: Architecture, degree: int) -> None:
    for pattern, names in architecture.plan.per_rank.items():
        for _, module in architecture.find(pattern):
            for name in names:
                setattr(module, name, getattr(module, name) // degree)
