# SPDX-License-Identifier: Apache-2.0
"""The weights of models of which each rank keeps a shard, and which are gathered while a module computes.

Those that train are shards of their optimizer. Those that do not are sharded by :class:`ShardedWeights`: gathered with
their unit, without gradients and optimizer state. It does not matter whether an optimizer holds them: no optimizer
holds the weights under adapters. A parameter that begins to train is gathered in full for a moment, and becomes part of
a shard of its optimizer. One that stops training stays in its shard, with its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from neuron_accel.engine.optim.buckets import Bucket, make_buckets
from neuron_accel.engine.shards.eager_gathered_shard import EagerGatheredShard, UnequalGatheredShard
from neuron_accel.engine.shards.eager_shard import EagerShard, SendBuffers
from neuron_accel.engine.shards.gathered_shard import GatheredShard
from neuron_accel.engine.shards.lazy_gathered_shard import LazyGatheredShard
from neuron_accel.engine.shards.optimizer import ShardedOptimizer, return_freed_memory
from neuron_accel.engine.shards.partition import Partition, partition_of
from neuron_accel.engine.shards.sharded_grad import ShardedGrad
from neuron_accel.engine.shards.unread import read_weights
from neuron_accel.errors import UnsupportedModelError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord
    from neuron_accel.engine.shards.shard import BucketShard
    from neuron_accel.engine.shards.unit import Unit, UnitsOfModel

_NO_LIMIT = 1 << 62

_LARGE = 8 << 20
"""Bytes from which a parameter has a bucket of its own: its gradient is sent from where autograd has put it. Copying it
would take longer than another message does."""


class ShardedWeights:
    """The weights of a run's models, of which each rank keeps a shard.

    A strategy says which parameters are gathered together, and when: it adds the units of each model to :attr:`units`,
    and calls :meth:`Unit.gather` and :meth:`Unit.release`. What trains is sharded by the optimizers that
    :meth:`optimizer` returns.

    Args:
        run: the run.
        plugin: name of the plugin, for messages.
        replica_axes: gradient axes along which ranks have the same shards.
        near: the ranks between which parameters are gathered for the backward pass; None for all.

    Attributes:
        units: the units of each model.
        axes: gradient axes over which parameters are sharded.
    """

    def __init__(self, run: Run, plugin: str, *, replica_axes: Sequence[str] = (), near: Group | None = None) -> None:
        self._run, self._plugin, self._replica_axes, self.near = run, plugin, replica_axes, near
        self.axes = tuple(axis for axis in run.mesh.gradient_axes if axis not in replica_axes)
        self.units: list[UnitsOfModel] = []
        self._frozen: list[tuple[Unit, GatheredShard]] = []
        self._reading: GatheredShard | None = None
        self._action = run.join.register("parameters that begin to train", self._release_along)

    def __repr__(self) -> str:
        return f"<ShardedWeights of {len(self.units)} models over {', '.join(self.axes)}>"

    def optimizer(self, optimizer: torch.optim.Optimizer, **options: Any) -> ShardedOptimizer:
        """Shards what an optimizer trains, and all parameters that do not train. Collective.

        Args:
            optimizer: the user's optimizer.
            options: of :class:`ShardedOptimizer`.
        """
        sharded = FullyShardedOptimizer(optimizer, self._run, weights=self, **options)
        self._shard_frozen()
        return sharded

    def before_save(self) -> None:
        """Takes weights that do not train and that the loop has assigned. Collective."""
        for _, shard in self._frozen:
            shard.before_save()

    # ---- for the optimizers ------------------------------------------------------------------------------------------
    def sharded(self, bucket: Bucket) -> Bucket:
        """Returns a bucket whose gradients are reduce-scattered over :attr:`axes` only: what these ranks have is a
        partial sum over the others, and an all-reduce of the shards completes it."""
        replicas = tuple(axis for axis in bucket.reduction_axes if axis in self._replica_axes)
        if not replicas:
            return bucket
        return replace(
            bucket,
            reduction_axes=tuple(axis for axis in bucket.reduction_axes if axis not in replicas),
            partial_axes=(*bucket.partial_axes, *replicas),
        )

    def read(self, shard: GatheredShard) -> None:
        """A parameter of ``shard`` is read in full: one shard at a time has its values."""
        if self._reading is not None and self._reading is not shard:
            self._reading.release()
        self._reading = shard

    def release(self, records: Iterable[ParameterRecord]) -> None:
        """Gives parameters that begin to train their values in full. Collective, also with ranks that have run out of
        data."""
        of_maps = [(index, list(parameters)) for index, parameters in enumerate(self._run.parameter_maps)]
        begins = {id(record) for record in records}
        names = [(index, r.fqn) for index, of_map in of_maps for r in of_map if id(r) in begins]
        if not any(id(record) in begins for _, shard in self._frozen for record in shard.bucket.records):
            return
        if self._action.announced:
            self._action(names)
        self._release_along(names)

    def _release_along(self, names: Sequence[tuple[int, str]]) -> None:
        records = [self._run.parameter_maps[index][fqn] for index, fqn in names]
        begins = {id(record) for record in records}
        remaining = []
        for unit, shard in self._frozen:
            if any(id(record) in begins for record in shard.bucket.records):
                shard.dissolve()
                unit.shards.remove((shard, _no_gradients))
            else:
                remaining.append((unit, shard))
        self._frozen = remaining
        self._shard_frozen(but=records)

    # ---- what does not train -----------------------------------------------------------------------------------------
    def _shard_frozen(self, but: Iterable[ParameterRecord] = ()) -> None:
        """Shards all parameters that do not train and are not sharded yet, but for those that are about to train."""
        left = {id(record) for record in but}
        of_units: dict[int, tuple[Unit, list[ParameterRecord]]] = {}
        for units, record in ((each, record) for each in self.units for record in each.records):
            unit = units.unit_of(record)
            if unit is not None and id(record) not in left and self._is_wanted(record, units):
                of_units.setdefault(id(unit), (unit, []))[1].append(record)
        places = [
            (unit, self.sharded(bucket))
            for unit, records in of_units.values()
            for bucket in make_buckets(records, _NO_LIMIT, self._run.mesh)
        ]
        own = read_weights(
            [bucket for _, bucket in places],
            self._run.models,
            self._run,
            partition=self._partition,
            keeps=lambda _: False,
        )
        for unit, bucket in places:
            shard = self._shard(bucket, own.pop(id(bucket), None))
            self._frozen.append((unit, shard))
            unit.shards.append((shard, _no_gradients))
        if of_units and not self._run.backend.is_lazy:  # the weights were copied to new memory
            return_freed_memory()

    def _is_wanted(self, record: ParameterRecord, units: UnitsOfModel) -> bool:
        current = record.current
        if current is None or current.requires_grad or record.weights is not None or units.keeps(record):
            return False
        # Numbers without NaN would be wrong by a little where they are read between uses.
        return current.is_floating_point() or (current.is_complex() and not self._run.backend.is_lazy)

    def _partition(self, bucket: Bucket) -> Partition:
        return partition_of(bucket, self._run)

    def _shard(self, bucket: Bucket, own: torch.Tensor | None) -> GatheredShard:
        shard: GatheredShard = self.new_shard(
            bucket=bucket,
            partition=self._partition(bucket),
            run=self._run,
            samples=self._run.group(*bucket.reduction_axes).size,
            optimizer_dtype=bucket.dtype,
            reduce_dtype=bucket.dtype,
            plugin=self._plugin,
            loaded=own,
            take_over=lambda: shard.close({}),  # there is no state
        )
        return shard

    def new_shard(self, *, buffers: SendBuffers | None = None, **arguments: Any) -> GatheredShard:
        """Returns this rank's shard of a bucket of one unit, see :class:`GatheredShard`."""
        if self._run.backend.is_lazy:
            return LazyGatheredShard(read=self.read, near=self.near, **arguments)
        buffers = SendBuffers() if buffers is None else buffers
        if arguments["partition"].bounds is not None:
            return UnequalGatheredShard(read=self.read, buffers=buffers, **arguments)
        return EagerGatheredShard(read=self.read, near=self.near, buffers=buffers, **arguments)


def _no_gradients(_: GatheredShard) -> None:
    """The backward pass of the unit is over."""


class FullyShardedOptimizer(ShardedOptimizer):
    """Steps this rank's shard of an optimizer's parameters, which is all that the rank keeps of them.

    Args:
        weights: of all models; their units complete the gradients of a shard.
        optimizer, run, more: see :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`.
    """

    by_arrival: ClassVar[bool] = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        *,
        weights: ShardedWeights,
        **more: Any,
    ) -> None:
        self._weights = weights
        self._passing = SendBuffers(keeps=False)
        self._own: dict[int, torch.Tensor] = {}  # this rank's weights of buckets that are sharded next, by bucket
        self._ahead = _Ahead()
        super().__init__(optimizer, run, **more)

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """See :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`."""
        return self._weights.axes

    def admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        """See :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`."""
        self._weights.release(records)
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
        return [self._weights.sharded(bucket) for bucket in (*buckets, *small)]

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

    def _place(self, record: ParameterRecord) -> tuple[UnitsOfModel, Unit]:
        for units in self._weights.units:
            unit = units.unit_of(record)
            if unit is not None:
                return units, unit
        raise UnsupportedModelError(
            f"{record.fqn!r} belongs to no prepared model.",
            where=f"plugin {self._plugin!r}",
            why="its parameters would have no module for whose forward pass they are gathered",
            fix="prepare the model before, or together with, its optimizer",
        )

    def _new_shard(self, **arguments: Any) -> BucketShard:
        bucket = arguments["bucket"]
        units, unit = self._place(bucket.records[0])
        if units.keeps(bucket.records[0]):
            return super()._new_shard(**arguments)
        own = self._own.pop(id(bucket), None)
        shard = self._weights.new_shard(buffers=self._passing, loaded=own, take_over=self.take_over, **arguments)
        unit.shards.append((shard, partial(self._complete, unit)))
        if unit is units.root and self._before_units not in units.before_units:
            units.before_units.append(self._before_units)
        return shard

    def take_gradient(self, bucket: int, index: int) -> None:
        """Takes a gradient into the buffer that is sent, unless it is sent from where it is."""
        shard = self.shards[bucket]
        if self._ahead.travels:  # as much memory is needed for the gradients of the first unit
            self._passing.wait()
            self._ahead.travels = False
        if not isinstance(shard, EagerGatheredShard) or not shard.is_alone:
            super().take_gradient(bucket, index)

    def _complete(self, unit: Unit, shard: GatheredShard) -> None:
        """The backward pass of its unit is over. Gradients of one unit travel at a time, which bounds their memory."""
        self._passing.wait(but=[cast(EagerShard, mine) for mine, _ in unit.shards])
        self._watcher.complete([self.shards.index(shard)])

    # ---- large parameters whose gradients come first -----------------------------------------------------------------
    def _before_units(self, root: Unit) -> None:
        """The backward pass of the first unit begins: frees parameters of the model itself whose use is over, such as
        the head's, and sends their gradients, instead of keeping both to the end.

        A gradient that has arrived is the sum over all uses of the parameter in this pass, so none follows.
        """
        for index in self._candidates(root):
            shard = cast(EagerGatheredShard, self.shards[index])
            arrived = self._watcher.has_arrived(index)
            if arrived and not self._ahead.is_agreed(index):
                self._ahead.arrived.add(index)
            if not self._ahead.is_agreed(index):
                continue
            if arrived:
                root.finish(shard)  # first: gradients are received into as much memory
            self._ahead.travels |= self._watcher.complete_ahead(index)

    def _candidates(self, root: Unit) -> list[int]:
        mine = [shard for shard, _ in root.shards]
        return [i for i, s in enumerate(self.shards) if isinstance(s, EagerGatheredShard) and s.is_alone and s in mine]

    def _dissolve(self) -> None:
        for shard in self.shards:
            _, unit = self._place(shard.bucket.records[0])
            if isinstance(shard, GatheredShard):
                shard.dissolve()
                unit.shards[:] = [pair for pair in unit.shards if pair[0] is not shard]

    def close(self) -> None:
        """See :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`."""
        super().close()
        for units in self._weights.units:
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
        found = {index for units in self._weights.units if units.sends_ahead for index in self._candidates(units.root)}
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
