# SPDX-License-Identifier: Apache-2.0
"""Parameters that do not train are sharded too: gathered with their unit, without gradients and optimizer state.

It does not matter whether an optimizer holds them: no optimizer holds the weights under adapters. A parameter that
begins to train is gathered in full for a moment, and becomes part of a shard of its optimizer. One that stops training
stays in its shard, with its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from neuron_accel.contract import SendBuffers, make_buckets, make_partition, return_freed_memory
from neuron_accel.strategies.fully_sharded.gathered_shard import GatheredShard
from neuron_accel.strategies.fully_sharded.lazy_gathered_shard import LazyGatheredShard
from neuron_accel.strategies.fully_sharded.reading import read_weights

if TYPE_CHECKING:
    import torch

    from neuron_accel.contract import Bucket, ParameterRecord, Partition, Run
    from neuron_accel.strategies.fully_sharded.groups import ShardGroups
    from neuron_accel.strategies.fully_sharded.units import AnyShard, Unit, Units

_NO_LIMIT = 1 << 62


class FrozenShards:
    """This rank's shards of parameters that do not train.

    Args:
        run: the run.
        units: of every prepared model; further ones may be added to the list.
        groups: the ranks over which parameters are sharded.
        plugin: name of the plugin, for messages.
    """

    def __init__(self, run: Run, units: Sequence[Units], groups: ShardGroups, plugin: str) -> None:
        self._run, self._units, self._groups, self._plugin = run, units, groups, plugin
        self._shards: list[tuple[Unit, AnyShard]] = []
        self._action = run.join.register("parameters that begin to train", self._release_along)

    @property
    def shards(self) -> list[AnyShard]:
        """The shards."""
        return [shard for _, shard in self._shards]

    def shard(self, but: Iterable[ParameterRecord] = ()) -> None:
        """Shards all parameters that do not train and are not sharded yet.

        Args:
            but: parameters that are about to train.
        """
        left = {id(record) for record in but}
        of_units: dict[int, tuple[Units, Unit, list[ParameterRecord]]] = {}
        for units, record in ((each, record) for each in self._units for record in each.records):
            unit = units.unit_of(record)
            if unit is not None and id(record) not in left and self._is_wanted(record, units):
                of_units.setdefault(id(unit), (units, unit, []))[2].append(record)
        places = [
            (units, unit, self._groups.sharded(bucket))
            for units, unit, records in of_units.values()
            for bucket in make_buckets(records, _NO_LIMIT, self._run.mesh)
        ]
        own = read_weights(
            [bucket for _, _, bucket in places],
            self._run.models,
            self._run,
            partition=self._partition,
            keeps=lambda _: False,
        )
        for units, unit, bucket in places:
            shard = self._shard(bucket, units, own.pop(id(bucket), None))
            self._shards.append((unit, shard))
            unit.shards.append((shard, _no_gradients))
        if of_units and not self._run.backend.is_lazy:  # the weights were copied to new memory
            return_freed_memory()

    def _is_wanted(self, record: ParameterRecord, units: Units) -> bool:
        current = record.current
        if current is None or current.requires_grad or record.weights is not None or units.keeps(record):
            return False
        # Numbers without NaN would be wrong by a little where they are read between uses.
        return current.is_floating_point() or (current.is_complex() and not self._run.backend.is_lazy)

    def _partition(self, bucket: Bucket) -> Partition:
        sizes, degree = [p.numel() for p in bucket.parameters], self._run.group(*bucket.reduction_axes).size
        return make_partition(sizes, degree, is_lazy=self._run.backend.is_lazy)

    def _shard(self, bucket: Bucket, units: Units, own: torch.Tensor | None) -> AnyShard:
        group = self._run.group(*bucket.reduction_axes)
        common: dict[str, Any] = {
            "bucket": bucket,
            "partition": self._partition(bucket),
            "own": own,
            "near": self._groups.near,
            "run": self._run,
            "group": group,
            "samples": group.size,
            "optimizer_dtype": bucket.dtype,
            "reduce_dtype": bucket.dtype,
            "read": units.read,
            "plugin": self._plugin,
        }
        if not self._run.backend.is_lazy:
            return GatheredShard(buffers=SendBuffers(), **common)
        shard: LazyGatheredShard = LazyGatheredShard(take_over=lambda: _take_over(shard), **common)
        return shard

    def release(self, records: Iterable[ParameterRecord]) -> None:
        """Gives parameters that begin to train their values in full. Collective, also with ranks that have run out of
        data."""
        of_maps = [(index, list(parameters)) for index, parameters in enumerate(self._run.parameter_maps)]
        begins = {id(record) for record in records}
        names = [(index, r.fqn) for index, of_map in of_maps for r in of_map if id(r) in begins]
        if not any(id(record) in begins for shard in self.shards for record in shard.bucket.records):
            return
        if self._action.announced:
            self._action(names)
        self._release_along(names)

    def _release_along(self, names: Sequence[tuple[int, str]]) -> None:
        records = [self._run.parameter_maps[index][fqn] for index, fqn in names]
        begins = {id(record) for record in records}
        kept = []
        for unit, shard in self._shards:
            if any(id(record) in begins for record in shard.bucket.records):
                shard.dissolve()
                unit.shards.remove((shard, _no_gradients))
            else:
                kept.append((unit, shard))
        self._shards = kept
        self.shard(but=records)


def _take_over(shard: LazyGatheredShard) -> None:
    shard.close({})  # there is no state


def _no_gradients(_: AnyShard) -> None:
    """The backward pass of the unit is over."""
