"""What preparing a model would make of it, found out on a copy without weights and without a word to other ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.backends.base import COLLECTIVES, Group
from neuron_accel.engine.plan.plugin import Phase
from neuron_accel.engine.runtime.run import PreparedModel, Run, transform_model
from neuron_accel.engine.sharding.parameters import ParameterMap
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend


class _OnPaper:
    """A backend that knows who is where and connects nobody."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        if name in COLLECTIVES:
            raise UsageError(
                "What becomes of this model cannot be told before it is prepared.",
                why=f"a plugin exchanges something with other ranks ({name}) when it rewrites a model",
                fix="call explain after `prepare`",
            )
        return getattr(self._backend, name)

    def new_group(self, partition: Sequence[Sequence[int]], name: str) -> Group:
        key = tuple(sorted(tuple(sorted(ranks)) for ranks in partition))
        ranks = next(ranks for ranks in key if self._backend.rank in ranks)
        return Group(ranks=ranks, index=ranks.index(self._backend.rank), partition=key, name=name)


def preview(model: nn.Module, run: Run) -> tuple[PreparedModel, Run]:
    """What ``model`` would become on this rank, and a run to ask about it. ``model`` is not changed; not collective.

    Raises:
        UsageError: if a plugin needs other ranks to rewrite a model.
        NeuronAccelError: what preparing it would raise.
    """
    paper = Run(plan=run.plan, backend=_OnPaper(run.backend))  # type: ignore[arg-type]
    paper.set_known_groups(run)
    module = without_weights(model)
    record = PreparedModel(original=module, module=module, parameters=ParameterMap(module, mesh=run.mesh))
    paper.models.append(record)
    transform_model(record, paper, before=Phase.GRADIENTS)
    return record, paper


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)
