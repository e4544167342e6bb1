"""The optimizer that ``prepare`` returns when parameters are fully sharded: that of ZeRO-1, over other shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from neuron_accel.contract import Bucket, ParameterRecord, UnsupportedModelError, make_buckets
from neuron_accel.strategies.fully_sharded.gathered_shard import GatheredShard
from neuron_accel.strategies.fully_sharded.lazy_gathered_shard import LazyGatheredShard
from neuron_accel.strategies.fully_sharded.reading import read_weights
from neuron_accel.strategies.zero1.eager_shard import EagerShard, SendBuffers
from neuron_accel.strategies.zero1.lazy_shard import LazyShard
from neuron_accel.strategies.zero1.optimizer import Zero1Optimizer

if TYPE_CHECKING:
    from neuron_accel.contract import Run
    from neuron_accel.strategies.fully_sharded.frozen import FrozenShards
    from neuron_accel.strategies.fully_sharded.groups import ShardGroups
    from neuron_accel.strategies.fully_sharded.units import AnyShard, Unit, Units

_NO_LIMIT = 1 << 62

_LARGE = 8 << 20
"""Bytes from which a parameter has a bucket of its own: its gradient is sent from where autograd has put it. Copying it
would take longer than another message does."""


class FullyShardedOptimizer(Zero1Optimizer):
    """Steps this rank's shard of an optimizer's parameters, which is all that the rank keeps of them.

    Args:
        units: of every prepared model.
        frozen: shards of what does not train.
        groups: the ranks over which parameters are sharded.
        optimizer, run, more: see :class:`~neuron_accel.strategies.zero1.optimizer.Zero1Optimizer`.
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
        super().__init__(optimizer, run, **more)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """See :class:`~neuron_accel.strategies.zero1.optimizer.Zero1Optimizer`."""
        return self._groups.axes

    def _admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        self._frozen.release(records)
        return super()._admit(records)

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
        shard = GatheredShard(read=units.read, plugin=self._plugin, own=own, **arguments)
        unit.shards.append((shard, partial(self._complete, unit)))
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

    def _take(self, bucket: int, index: int) -> None:
        shard = self.shards[bucket]
        if not isinstance(shard, GatheredShard) or not shard.is_alone:
            super()._take(bucket, index)

    def _complete(self, unit: Unit, shard: AnyShard) -> None:
        """The backward pass of its unit is over. Gradients of one unit travel at a time, which bounds their memory."""
        self._passing.settle(but=[cast(EagerShard, mine) for mine, _ in unit.shards])
        self._watcher.complete([self.shards.index(shard)])


def _is_large(record: ParameterRecord) -> bool:
    current = record.current
    return current is not None and current.numel() * current.element_size() >= _LARGE
