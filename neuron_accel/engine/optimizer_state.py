"""How the state of an optimizer belongs to the parameters of the original model.

Whoever divides an optimizer over ranks says what each rank holds, in terms of the one identity that parameters have:
their FQN and layout. That is all a checkpoint needs in order to store the state of any division and to load it into
another.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from neuron_accel.engine.parameters import ParameterRecord


@dataclass(frozen=True, kw_only=True)
class StatePiece:
    """What a rank's optimizer holds of one parameter.

    Args:
        record: the parameter.
        parameter: what the optimizer updates, and the key of its state; its elements are a run of those of the
            parameter's shard on this rank, flattened.
        start, stop: that run.
        group: index of the parameter's group.
        axes: axes of the mesh along which ranks hold other runs of the same shard.
        master: whether ``parameter`` has values of its own, more exact than those in the model.
        whole: whether the state is that of the whole parameter, equal on all ranks along the axes that cut it.
        key, store: where the state lies: ``store[key]``; by default ``optimizer.state[parameter]``.
    """

    record: ParameterRecord
    parameter: nn.Parameter
    start: int
    stop: int
    group: int
    axes: tuple[str, ...] = ()
    master: bool = False
    whole: bool = False
    key: torch.Tensor | None = None
    store: MutableMapping[torch.Tensor, dict[str, Any]] | None = None

    def read_state(self, optimizer: Any) -> dict[str, Any]:
        """The entries that ``optimizer``, which holds this piece, has for it; empty before the first step."""
        store = optimizer.state if self.store is None else self.store
        return store.get(self.parameter if self.key is None else self.key, {})

    def new_state(self, optimizer: Any) -> dict[str, Any]:
        """An empty dict in place of the entries so far."""
        store = optimizer.state if self.store is None else self.store
        entries = store[self.parameter if self.key is None else self.key] = {}
        return entries

    def drop_state(self, optimizer: Any) -> None:
        """As before the first step."""
        store = optimizer.state if self.store is None else self.store
        store.pop(self.parameter if self.key is None else self.key, None)


@runtime_checkable
class DividedOptimizer(Protocol):
    """An optimizer that holds pieces of parameters."""

    state: dict[torch.Tensor, dict]
    param_groups: list[dict]

    def state_pieces(self) -> list[StatePiece]:
        """This rank's pieces."""
        ...
