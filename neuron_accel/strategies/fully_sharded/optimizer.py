# SPDX-License-Identifier: Apache-2.0
"""The optimizer that ``prepare`` returns when parameters are fully sharded: that of ZeRO-1, over other shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from neuron_accel.contract import (
    Bucket,
    EagerShard,
    LazyShard,
    ParameterRecord,
    SendBuffers,
    ShardedGrad,
    ShardedOptimizer,
    UnsupportedModelError,
    make_buckets,
)
from neuron_accel.strategies.fully_sharded.gathered_shard import GatheredShard
from neuron_accel.strategies.fully_sharded.lazy_gathered_shard import LazyGatheredShard
from neuron_accel.strategies.fully_sharded.reading import read_weights

if TYPE_CHECKING:
    from neuron_accel.contract import Run
    from neuron_accel.strategies.fully_sharded.frozen import FrozenShards
    from neuron_accel.strategies.fully_sharded.groups import ShardGroups
    from neuron_accel.strategies.fully_sharded.units import AnyShard, Unit, Units

_NO_LIMIT = 1 << 62

_LARGE = 8 << 20
"""Bytes from which a parameter has a bucket of its own: its gradient is sent from where autograd has put it. Copying it
would take longer than another message does."""


class FullyShardedOptimizer(ShardedOptimizer):
    """Steps this rank's shard of an optimizer's parameters, which is all that the rank keeps of them.

    Args:
        units: of every prepared model.
        frozen: shards of what does not train.
        groups: the ranks over which parameters are sharded.
        optimizer, run, more: see :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`.
    """

    by_arrival: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        *,
        units: Sequence[Units],
        frozen: FrozenShards,
        groups: ShardGroups,
        **more: Any,
    ) -> None:
        self._units, self._frozen, self._groups = units, frozen, groups
        self._passing = SendBuffers(keeps=False)
        self._own: dict[int, torch.Tensor] = {}  # this rank's weights of buckets that are sharded next, by bucket
        self._ahead = _Ahead()
        super().__init__(optimizer, run, **more)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """See :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`."""
        return self._groups.axes

    def admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        """See :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`."""
        self._frozen.release(records)
        return super().admit(records)

    def _buckets(self, of_groups: list[list[ParameterRecord]]) -> list[Bucket]:
        """The buckets of one unit after another, in the order in which backward passes end, the model's own at the end;
        then those of small parameters."""
        groups = of_groups if self._lazy else [[record for records in of_groups for record in records]]
        by_unit: dict[int, tuple[Unit, list[list[ParameterRecord]]]] = {}
        kept: list[list[ParameterRecord]] = [[] for _ in groups]
        for number, records in enumerate(groups):
            for record in self._in_model_order(records):
                units, unit = self._place(record)
                if units.keeps(record):
                    kept[number].append(record)
                    continue
                by_unit.setdefault(id(unit), (unit, [[] for _ in groups]))[1][number].append(record)
        ordered = sorted(by_unit.values(), key=lambda pair: pair[0].index, reverse=True)
        buckets = [b for _, parts in ordered for records in parts if records for b in self._of_unit(records)]
        small = super()._buckets(kept) if any(kept) else []  # no unit completes them, so they are the last
        return [self._groups.sharded(bucket) for bucket in (*buckets, *small)]

    def _read_weights(self, buckets: Sequence[Bucket]) -> None:
        self._own = read_weights(buckets, self._models, self._run, partition=self._partition, keeps=self._keeps)

    def _keeps(self, bucket: Bucket) -> bool:
        return self._place(bucket.records[0])[0].keeps(bucket.records[0])

    def _of_unit(self, records: list[ParameterRecord]) -> list[Bucket]:
        if self._lazy:
            return self._lazy_buckets(records, _NO_LIMIT)
        splits = not self._keeps_parameters
        rest = [record for record in records if not (splits and _is_large(record))]
        parts = [*([record] for record in records if splits and _is_large(record)), *([rest] if rest else [])]
        return [bucket for part in parts for bucket in make_buckets(part, _NO_LIMIT, self._run.mesh)]

    def _place(self, record: ParameterRecord) -> tuple[Units, Unit]:
        for units in self._units:
            unit = units.unit_of(record)
            if unit is not None:
                return units, unit
        raise UnsupportedModelError(
            f"{record.fqn!r} belongs to no prepared model.",
            where=f"plugin {self._plugin!r}",
            why="its parameters would have no module for whose forward pass they are gathered",
            fix="prepare the model before, or together with, its optimizer",
        )

    def _eager_shard(self, **arguments: Any) -> EagerShard:
        units, unit = self._place(arguments["bucket"].records[0])
        if units.keeps(arguments["bucket"].records[0]):
            return super()._eager_shard(**arguments)
        own = self._own.pop(id(arguments["bucket"]), None)
        arguments |= {"buffers": self._passing, "near": self._groups.near}
        shard = GatheredShard(read=units.read, own=own, **arguments)
        unit.shards.append((shard, partial(self._complete, unit)))
        if unit is units.root and self._before_units not in units.before_units:
            units.before_units.append(self._before_units)
        return shard

    def _lazy_shard(self, **arguments: Any) -> LazyShard:
        units, unit = self._place(arguments["bucket"].records[0])
        if units.keeps(arguments["bucket"].records[0]):
            return super()._lazy_shard(**arguments)
        own = self._own.pop(id(arguments["bucket"]), None)
        arguments |= {"read": units.read, "plugin": self._plugin, "own": own, "near": self._groups.near}
        shard = LazyGatheredShard(take_over=self.take_over, **arguments)
        unit.shards.append((shard, partial(self._complete, unit)))
        return shard

    def take_gradient(self, bucket: int, index: int) -> None:
        """Takes a gradient into the buffer that is sent, unless it is sent from where it is."""
        shard = self.shards[bucket]
        if self._ahead.travels:  # as much memory is needed for the gradients of the first unit
            self._passing.settle()
            self._ahead.travels = False
        if not isinstance(shard, GatheredShard) or not shard.is_alone:
            super().take_gradient(bucket, index)

    def _complete(self, unit: Unit, shard: AnyShard) -> None:
        """The backward pass of its unit is over. Gradients of one unit travel at a time, which bounds their memory."""
        self._passing.settle(but=[cast(EagerShard, mine) for mine, _ in unit.shards])
        self._watcher.complete([self.shards.index(shard)])

    # ---- large parameters whose gradients come first -----------------------------------------------------------------
    def _before_units(self, units: Units) -> None:
        """The backward pass of the first unit begins: frees parameters of the model itself whose use is over, such as
        the head's, and sends their gradients, instead of keeping both to the end.

        A gradient that has arrived is the sum over all uses of the parameter in this pass, so none follows.
        """
        for index in self._candidates(units):
            shard = cast(GatheredShard, self.shards[index])
            arrived = self._watcher.has_arrived(index)
            if arrived and not self._ahead.is_agreed(index):
                self._ahead.arrived.add(index)
            if not self._ahead.is_agreed(index):
                continue
            if arrived:
                units.root.finish(shard)  # first: gradients are received into as much memory
            self._ahead.travels |= self._watcher.complete_ahead(index)

    def _candidates(self, units: Units) -> list[int]:
        mine = [shard for shard, _ in units.root.shards]
        return [i for i, s in enumerate(self.shards) if isinstance(s, GatheredShard) and s.is_alone and s in mine]

    def close(self) -> None:
        """See :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`."""
        super().close()
        for units in self._units:
            if self._before_units in units.before_units:
                units.before_units.remove(self._before_units)

    def receive_gradients(self) -> None:
        """Also reduces gradients that arrived after those of their bucket were sent."""
        sent = [index for index in self._ahead.agreed if self.shards[index] in self._sent]
        late = {index: self._take_late(index) for index in sent}
        anywhere = self._receive_with([gradient is not None for gradient in late.values()])
        again = [index for index, is_late in zip(late, anywhere, strict=True) if is_late]
        for index in again:
            self._put_back(index, late[index])
            self.send_gradients(index)
        if again:
            self._ahead.refuse(again)
            self._receive_with([])
        self._agree()

    def _take_late(self, index: int) -> torch.Tensor | None:
        parameter = self.shards[index].parameters[0]
        gradient, parameter.grad = parameter.grad, None
        return gradient

    def _put_back(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            return
        parameter = self.shards[index].parameters[0]
        if isinstance(parameter.grad, ShardedGrad):
            parameter.grad.add_waiting(gradient)
        else:
            parameter.grad = gradient

    def _agree(self) -> None:
        """Agrees with the other ranks, after one of the first passes, whose gradients are sent ahead from now on: those
        that have arrived early on all ranks."""
        found = {index for units in self._units if units.sends_ahead for index in self._candidates(units)}
        join = self._run.join
        if join.is_uneven or join.is_through or not self._ahead.is_open(found):
            return
        everyone = self._run.backend.all_gather_object(sorted(self._ahead.arrived), self._group)
        self._ahead.agree(set(everyone[0]).intersection(*everyone), found)


class _Ahead:
    """Buckets whose gradients are sent when the backward pass of the first unit begins.

    Attributes:
        agreed: their indices, the same on every rank.
        arrived: those whose gradients had arrived by then on this rank, while ranks have not agreed.
        travels: whether some are under way.
    """

    _ATTEMPTS = 3
    """Passes after which ranks compare: the first ones of a loop may be without a loss."""

    def __init__(self) -> None:
        self.agreed: list[int] = []
        self.arrived: set[int] = set()
        self.travels = False
        self._known: set[int] = set()
        self._refused: set[int] = set()
        self._left = 0

    def is_agreed(self, index: int) -> bool:
        return index in self.agreed

    def is_open(self, candidates: set[int]) -> bool:
        """Whether ranks should agree now. The same on every rank."""
        if not candidates <= self._known:
            self._known |= candidates
            self._left = self._ATTEMPTS
        return self._left > 0

    def agree(self, indices: set[int], candidates: set[int]) -> None:
        """Adds buckets that are sent ahead from now on."""
        self.agreed = sorted({*self.agreed, *(indices - self._refused)})
        self.arrived = set()
        self._left = 0 if indices or not candidates else self._left - 1

    def refuse(self, indices: Iterable[int]) -> None:
        """Removes buckets for good, whose gradients do not always come first."""
        self._refused.update(indices)
        self.agreed = [index for index in self.agreed if index not in self._refused]


def _is_large(record: ParameterRecord) -> bool:
    current = record.current
    return current is not None and current.numel() * current.element_size() >= _LARGE
