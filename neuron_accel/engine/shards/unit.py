# SPDX-License-Identifier: Apache-2.0
"""A module whose parameters are gathered together, while it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from neuron_accel.engine.sharding.parameters import ParameterRecord
    from neuron_accel.engine.shards.gathered_shard import GatheredShard


class Unit:
    """A module whose parameters are gathered together.

    Args:
        name: FQN of the module.
        module: the module.
        index: among the units of the model.

    Attributes:
        shards: this rank's shards of its parameters, each with what is called when their gradients are complete.
        following: the unit that was gathered after this one the last time, in the forward and in the backward pass.
        forwards: forward passes whose backward pass has not ended.
        in_backward: whether its backward pass runs.
        trains: whether a backward pass follows its forward pass: a parameter of it trains, or an input has a gradient.
        saving: hooks for what autograd saves, while its forward pass runs.
    """

    def __init__(self, name: str, module: nn.Module, index: int) -> None:
        self.name, self.module, self.index = name, module, index
        self.shards: list[tuple[GatheredShard, Callable[[GatheredShard], None]]] = []
        self.following: dict[bool, Unit] = {}
        self.forwards, self.in_backward = 0, False
        self.trains = True
        self.saving: Any = None
        self._finished: list[GatheredShard] = []

    def __repr__(self) -> str:
        return f"<Unit {self.name!r}: {len(self.shards)} shards>"

    @property
    def idle(self) -> list[GatheredShard]:
        """The shards of what is neither gathered nor being gathered."""
        return [shard for shard, _ in self.shards if not shard.is_gathered and not shard.is_arriving]

    def finish(self, shard: GatheredShard) -> None:
        """Frees what was gathered of one shard, which is not gathered again in this backward pass."""
        shard.release()
        self._finished.append(shard)

    def reopen(self) -> None:
        """Shards that were finished may be gathered again."""
        self._finished = []

    @property
    def is_idle(self) -> bool:
        """Whether nothing was gathered, or is being gathered, of what is sharded."""
        return bool(self.idle)

    def start_gather(self) -> None:
        """Starts to gather. Collective."""
        for shard, _ in self.shards:
            if shard not in self._finished:
                shard.start_gather()

    def gather(self) -> None:
        """Gathers. Collective."""
        self.start_gather()
        for shard, _ in self.shards:
            if shard not in self._finished:
                shard.gather()

    def end_backward(self) -> None:
        """A backward pass is over."""
        self.in_backward, self.forwards = False, 0
        self.reopen()

    def reshard(self) -> None:
        """Frees what was gathered, until the backward pass."""
        for shard, _ in self.shards:
            shard.reshard()

    def release(self) -> None:
        """Frees what was gathered."""
        for shard, _ in self.shards:
            shard.release()


class UnitsOfModel(Protocol):
    """The units of one model, and when they are gathered, which a strategy decides.

    Attributes:
        root: the unit of the model itself: all uses of its parameters are in no other unit.
        before_units: functions that are called with :attr:`root` when the backward pass of the first other unit begins.
    """

    root: Unit
    before_units: list[Callable[[Unit], None]]

    @property
    def records(self) -> Iterable[ParameterRecord]:
        """The parameters of the model, in its order."""

    @property
    def sends_ahead(self) -> bool:
        """Whether :attr:`before_units` are called."""

    def unit_of(self, record: ParameterRecord) -> Unit | None:
        """The unit of a parameter; None if it is of another model."""

    def keeps(self, record: ParameterRecord) -> bool:
        """Whether every rank keeps a parameter."""
