"""Hidden states and their gradients where ranks cannot send to each other: all of a pipeline hand on at once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from neuron_accel.strategies.pipeline.wire import Form

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend, Group


class Ring:
    """Turns what the ranks of a pipeline have for each other by one position.

    Every rank takes part in every turn, with zeros if it has nothing for anybody, so that a turn is one and the same
    graph on all of them. What all stages hand on has therefore one form, that of the first stage's first micro-batch,
    and everybody hears of it beside the device.

    Args:
        backend: permutes.
        group: the ranks of the pipeline.
        everyone: these and those of all replicas, whose turns are the same collective.
    """

    def __init__(self, backend: Backend, group: Group, everyone: Group) -> None:
        self._backend, self._group, self._everyone = backend, group, everyone
        self._forms: dict[Hashable, Form] = {}
        self._nothing: dict[Form, torch.Tensor] = {}

    def form(self, key: Hashable) -> Form | None:
        """What travels for ``key``, a kind of batch; None if that is not known (yet)."""
        return self._forms.get(key)

    def learn(self, key: Hashable, mine: Form | None) -> Form | None:
        """What travels for ``key``, from the rank of the first stage, or that of a replica if it failed. Collective.

        Args:
            mine: what that rank computed; None if it failed, and on the others.
        """
        told = self._backend.all_gather_object(mine, self._everyone)
        form = next((form for form in told if form is not None), None)
        if form is not None:
            self._forms[key] = form
        return form

    def turn(self, tensor: torch.Tensor | None, key: Hashable, shift: int) -> torch.Tensor:
        """What the rank ``shift`` positions before this one hands on; this one hands on ``tensor``. Collective."""
        if tensor is None:
            form = self._forms[key]
            if form not in self._nothing:
                self._nothing[form] = torch.zeros(form.shape, dtype=form.dtype, device=self._backend.device)
            tensor = self._nothing[form]
        return self._backend.permute(tensor, self._group, shift)
