"""Hidden states and their gradients where ranks cannot send to each other: all of a pipeline hand on at once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch

from neuron_accel.backends.base import Done
from neuron_accel.strategies.pipeline.wire import Form, Part, Values

if TYPE_CHECKING:
    from neuron_accel.backends.base import Backend, Group, Pending


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
        self._nothing: dict[Part, torch.Tensor] = {}

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

    def turn(self, values: Values | None, parts: tuple[Part | None, ...], shift: int) -> list[Pending | None]:
        """What the rank ``shift`` positions before this one hands on; this one hands on ``values``. Collective.

        Args:
            parts: which of the values travel, and what they look like.
        """
        arrived: list[Pending | None] = []
        for part, value in zip(parts, values or (None,) * len(parts), strict=True):
            if part is None:
                arrived.append(None)
                continue
            if value is None:
                if part not in self._nothing:
                    self._nothing[part] = torch.zeros(part[0], dtype=part[1], device=self._backend.device)
                value = self._nothing[part]
            arrived.append(Done(self._backend.permute(value, self._group, shift)))
        return arrived
