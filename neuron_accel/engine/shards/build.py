# SPDX-License-Identifier: Apache-2.0
"""How the parameters of an optimizer become shards: in which buckets, over which ranks, in which dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from neuron_accel.engine.optim.buckets import Bucket, make_buckets
from neuron_accel.engine.optim.twin import attributes_of, knows_by_parameter
from neuron_accel.engine.shards.eager_shard import EagerShard, SendBuffers, UnequalShard, suitable_cap
from neuron_accel.engine.shards.lazy_shard import LazyShard
from neuron_accel.engine.shards.partition import Partition, owners_of, partition_of
from neuron_accel.errors import ParameterError, PlanError, UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord
    from neuron_accel.engine.shards.shard import BucketShard


class ShardBuilder:
    """Base class of :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`: makes buckets of parameters that
    begin to train, and this rank's shard of each. A subclass for other shards overrides :meth:`_buckets`,
    :meth:`_read_weights` and :meth:`_new_shard`.

    Args:
        optimizer, run, plugin, title: see :class:`~neuron_accel.engine.shards.optimizer.ShardedOptimizer`.
        optimizer_dtype, higher_cc_precision, bucket_cap_mb, partition: see :class:`~neuron_accel.Zero1Plugin`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        plugin: str,
        title: str,
        optimizer_dtype: torch.dtype,
        higher_cc_precision: bool,
        bucket_cap_mb: float,
        partition: Literal["even", "parameters"],
    ) -> None:
        self.optimizer, self._run, self._plugin, self._title = optimizer, run, plugin, title
        self._optimizer_dtype, self._higher_precision = optimizer_dtype, higher_cc_precision
        self._bucket_bytes, self._keeps_parameters = int(bucket_cap_mb * (1 << 20)), partition == "parameters"
        self._group = run.group(*run.mesh.gradient_axes)
        self._buffers = SendBuffers()
        self._owners: dict[nn.Parameter, int] = {}  # ranks of parameters that are not split
        self._loads: dict[tuple[int, ...], list[int]] = {}  # elements of each rank of a group
        self._models: list[PreparedModel] = []

    @property
    def _lazy(self) -> bool:
        return self._run.backend.is_lazy

    # ---- records -----------------------------------------------------------------------------------------------------
    def _records(self, groups: Iterable[dict[str, Any]]) -> list[ParameterRecord]:
        """Returns the records of all parameters in ``groups``, and adds their models to those of this optimizer."""
        records = [record_of(p, self._run) for group in groups for p in group["params"]]
        mine = {id(record) for record in records}
        for model in self._run.models:
            if not any(model is m for m in self._models) and any(id(record) in mine for record in model.parameters):
                self._models.append(model)
        return records

    def _in_model_order(self, records: list[ParameterRecord]) -> list[ParameterRecord]:
        """Sorts records in the order of the model, whose reverse is the order of the backward pass."""
        wanted = {id(record) for record in records}
        return [record for records in self._run.parameter_maps for record in records if id(record) in wanted]

    # ---- buckets -----------------------------------------------------------------------------------------------------
    def _build(self, records: list[ParameterRecord]) -> list[BucketShard]:
        """Returns this rank's shards of parameters that begin to train."""
        groups = self.optimizer.param_groups
        group_of = {p: index for index, group in enumerate(groups) for p in group["params"]}
        of_groups: list[list[ParameterRecord]] = [[] for _ in groups]
        for record in records:
            of_groups[group_of[record.current]].append(record)
        buckets = self._buckets(of_groups)
        if self._keeps_parameters:
            self._assign(buckets)
        self._read_weights(buckets)
        return [self._shard(bucket) for bucket in buckets]

    def _buckets(self, of_groups: list[list[ParameterRecord]]) -> list[Bucket]:
        cap = self._bucket_bytes
        if not self._lazy:
            everything = self._in_model_order([r for records in of_groups for r in records])
            return make_buckets(everything, suitable_cap(everything, cap), self._run.mesh)
        return [bucket for records in of_groups for bucket in self._lazy_buckets(records, cap)]

    def _lazy_buckets(self, records: list[ParameterRecord], cap_bytes: int) -> list[Bucket]:
        """Returns the buckets of parameters of one group. A shard is updated as one tensor, so a bucket has one set of
        options. Parameters with equal axes are neighbours, so that they are one part of a norm."""
        by_attributes: dict[Any, list[ParameterRecord]] = defaultdict(list)
        for record in self._in_model_order(records):
            by_attributes[attributes_of(record.current)].append(record)  # type: ignore[arg-type]
        alike = [sorted(records, key=lambda r: (r.axes, r.replicas)) for records in by_attributes.values()]
        return [bucket for records in alike for bucket in make_buckets(records, cap_bytes, self._run.mesh)]

    def _read_weights(self, buckets: Sequence[Bucket]) -> None:
        """Called before buckets are sharded; a subclass may read here what this rank needs of weights that have not
        been read."""

    def _assign(self, buckets: Sequence[Bucket]) -> None:
        """Chooses the ranks of parameters that are not split, over all buckets, so that ranks have as many elements."""
        by_ranks: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for bucket in buckets:
            by_ranks[tuple(self._run.group(*bucket.reduction_axes).ranks)] += bucket.parameters
        for ranks, parameters in by_ranks.items():
            loads = self._loads.setdefault(ranks, [0] * len(ranks))
            self._owners.update(zip(parameters, owners_of([p.numel() for p in parameters], loads), strict=True))

    # ---- the shard of a bucket ---------------------------------------------------------------------------------------
    def _shard(self, bucket: Bucket) -> BucketShard:
        self._check_dtype(bucket)
        dtype = torch.promote_types(self._optimizer_dtype, bucket.dtype)
        return self._new_shard(
            bucket=bucket,
            partition=self._partition(bucket),
            run=self._run,
            samples=self._group.size,
            optimizer_dtype=dtype,
            reduce_dtype=self._reduce_dtype(bucket, dtype),
            plugin=self._plugin,
            apart=self._knows_parameters if self._lazy else self._keeps_parameters,
        )

    def _new_shard(self, **arguments: Any) -> BucketShard:
        if self._lazy:
            return LazyShard(**arguments)
        kind = EagerShard if arguments["partition"].bounds is None else UnequalShard
        return kind(buffers=self._buffers, **arguments)

    def _partition(self, bucket: Bucket) -> Partition:
        owners = [self._owners[p] for p in bucket.parameters] if self._keeps_parameters else None
        return partition_of(bucket, self._run, owners=owners)

    def _reduce_dtype(self, bucket: Bucket, optimizer_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a bucket's gradients are sent and summed."""
        if bucket.reduce_dtype is None:
            return optimizer_dtype if self._higher_precision else bucket.dtype
        if self._higher_precision:
            raise PlanError(
                f"The gradient of {bucket.records[0].fqn!r} cannot be sent in two dtypes.",
                where=f"plugin {self._plugin!r}, higher_cc_precision=True",
                why=f"another plugin asks for {str(bucket.reduce_dtype).removeprefix('torch.')}",
                fix="leave higher_cc_precision out, or the other plugin",
            )
        return bucket.reduce_dtype

    def _check_dtype(self, bucket: Bucket) -> None:
        if self._lazy and bucket.dtype.is_complex:
            raise UsageError(
                f"{bucket.records[0].fqn!r} is {str(bucket.dtype).removeprefix('torch.')}.",
                where=f"plugin {self._plugin!r}, backend {self._run.backend.name!r}",
                why="this device has no sums of complex numbers over ranks",
                fix=f"train without {self._title} on this device, or keep real and imaginary part in a real parameter "
                "(torch.view_as_real)",
            )

    @property
    def _knows_parameters(self) -> bool:
        """Whether the optimizer may depend on the individual parameters, so that they cannot be updated as one tensor:
        it has values by parameter, or is not torch's and knows their names."""
        own = type(self.optimizer).__module__.partition(".")[0] == "torch"
        named = any("param_names" in group for group in self.optimizer.param_groups)
        return (named and not own) or knows_by_parameter(self.optimizer) is not None


def record_of(parameter: nn.Parameter, run: Run) -> ParameterRecord:
    """Returns the record of a parameter of the original model.

    Raises:
        ParameterError: if it belongs to no prepared model.
    """
    record = run.find_parameter(parameter)
    if record is None:
        raise ParameterError(
            f"A parameter of shape {tuple(parameter.shape)} belongs to no prepared model.",
            fix="prepare the model before, or together with, its optimizer",
        )
    return record
