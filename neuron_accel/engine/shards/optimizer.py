# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose state is sharded over ranks: what ``prepare`` returns under ZeRO-1, and fully sharded.

It has the interface of the user's optimizer: the same groups with the model's parameters, which schedulers edit. A twin
of the user's optimizer, of the same class and with the same hyper-parameters, updates this rank's shards only
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1).
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.engine.optim.buckets import Bucket, make_buckets, used_anywhere
from neuron_accel.engine.optim.elementwise import is_elementwise, needs_closure
from neuron_accel.engine.optim.full_parameter import FullParameterOptimizer
from neuron_accel.engine.optim.held import state_of
from neuron_accel.engine.optim.norms import GradientPart, clip_coefficient, elsewhere, global_norm
from neuron_accel.engine.optim.own_methods import OwnMethods
from neuron_accel.engine.optim.reducer import BackwardWatcher
from neuron_accel.engine.optim.twin import (
    StandIn,
    StatePiece,
    attributes_of,
    copy_options,
    extend_group,
    knows_by_parameter,
    put_state,
    recipe_of,
    translate,
    twin,
)
from neuron_accel.engine.shards.awaited import AwaitedWeights, may_be_awaited
from neuron_accel.engine.shards.eager_shard import EagerShard, SendBuffers, suitable_cap
from neuron_accel.engine.shards.lazy_shard import LazyShard
from neuron_accel.engine.shards.partition import Partition, make_partition
from neuron_accel.engine.shards.shard import BucketShard
from neuron_accel.engine.shards.sharded_grad import ParameterShard
from neuron_accel.engine.shards.state_dict import Place, by_place, joined_entries, place_of, reordered
from neuron_accel.errors import ParameterError, PlanError, UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.layout import Layout
    from neuron_accel.engine.sharding.parameters import ParameterRecord

T = TypeVar("T")


class ShardedOptimizer(OwnMethods, torch.optim.Optimizer):
    """Updates this rank's shards of an optimizer's parameters.

    Args:
        optimizer: the user's optimizer, with the rewritten parameters; an attribute, too.
        run: the run.
        plugin: name of the plugin, for messages.
        title: what the plugin does, as messages say it: "train without ...".
        optimizer_dtype, max_norm, use_grad_acc_hook, higher_cc_precision: see :class:`~neuron_accel.Zero1Plugin`.
        bucket_cap_mb, partition, save_master_weights, overlap, overlap_gather: see there, too.
        synchronises: returns whether a backward pass that runs now reduces gradients; by default, whether one of the
            models synchronises.
        others: functions that are called with the parameters of an added group, whose gradients this optimizer then
            reduces.

    Attributes:
        inner: the twin of the user's optimizer, which updates the shards.
        shards: this rank's shard of every bucket.
        saves_masters: whether checkpoints contain the master weights.
        grad_norm: norm of the last step's gradients before clipping, 0-dim; None if ``max_norm`` is not set.

    Raises:
        UsageError: if the optimizer cannot step without a closure.
        ParameterError: if it holds a parameter of no prepared model.
    """

    by_arrival: ClassVar[bool] = True
    """Whether a bucket is reduced once all its gradients have arrived, see :class:`GradientOwner`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        *,
        plugin: str,
        title: str = "sharded optimizer state",
        optimizer_dtype: torch.dtype = torch.float32,
        max_norm: float | None = None,
        use_grad_acc_hook: bool = False,
        higher_cc_precision: bool = False,
        bucket_cap_mb: float = 25.0,
        partition: Literal["even", "parameters"] = "even",
        save_master_weights: bool = True,
        overlap: bool = True,
        overlap_gather: bool = False,
        synchronises: Callable[[], bool] | None = None,
        others: Sequence[Callable[[Iterable[torch.Tensor]], None]] = (),
    ) -> None:
        # Like Accelerate's wrapper, this has the interface of an optimizer but does not call its constructor, which
        # would create groups, state and defaults of its own.
        refuse_closures(optimizer, plugin)
        self.optimizer = optimizer
        self._plugin, self._title = plugin, title
        self._optimizer_dtype, self._higher_precision = optimizer_dtype, higher_cc_precision
        self._max_norm, self._every_micro_batch = max_norm, use_grad_acc_hook
        self._bucket_bytes, self._keeps_parameters = int(bucket_cap_mb * (1 << 20)), partition == "parameters"
        self.saves_masters = save_master_weights
        self.grad_norm: torch.Tensor | None = None
        self._has_warned = False
        self._run = run
        self._group = run.group(*run.mesh.gradient_axes)
        self._others = others
        self._synchronises = synchronises or self._models_synchronise
        self.shards: list[BucketShard] = []
        self._updated: dict[nn.Parameter, list[nn.Parameter]] = defaultdict(list)
        self._layouts: dict[nn.Parameter, Layout] = {}
        self._models: list[PreparedModel] = []
        self._sent: list[BucketShard] = []
        self._buffers = SendBuffers()
        self._awaited = AwaitedWeights() if overlap_gather and may_be_awaited(run, plugin) else None
        self._recipe = recipe_of(optimizer)
        self.inner: torch.optim.Optimizer = None  # type: ignore[assignment]  # created below, after the shards
        overlap = overlap and (not self._lazy or not self.by_arrival)
        self._watcher = BackwardWatcher(self, self._records(optimizer.param_groups), run, overlap=overlap)
        self._own_call = run.join.register("a method of the optimizer", self.call_own)
        self._uses_gradients: dict[str, bool] = {}  # the methods that were tested
        state = self._sharded_state(self.shards)
        self.inner = twin(optimizer, [self._inner_group(g) for g in optimizer.param_groups], state)
        self._copy_attributes()
        self._translate()
        if self._needs_full_parameters(optimizer):
            self.inner = FullParameterOptimizer(self.inner, self._layouts, run)
        self._release(self.shards)
        if self._recipe is not None:
            del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]

    # ---- construction ------------------------------------------------------------------------------------------------
    def _records(self, groups: Iterable[dict[str, Any]]) -> list[ParameterRecord]:
        """Returns the records of all parameters in ``groups``, and adds their models to those of this optimizer."""
        records = [self.record(p) for group in groups for p in group["params"]]
        mine = {id(record) for record in records}
        for model in self._run.models:
            if not any(model is m for m in self._models) and any(id(record) in mine for record in model.parameters):
                self._models.append(model)
        return records

    def admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        """Shards parameters that begin to train, and returns their buckets. Until then parameters have no master
        weights, and state that was loaded for them is unsharded."""
        self.settle()
        group_of = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        of_groups: list[list[ParameterRecord]] = [[] for _ in self.param_groups]
        for record in records:
            of_groups[group_of[record.current]].append(record)
        buckets = self._buckets(of_groups)
        self._read_weights(buckets)
        shards = [self._shard(bucket, self._buffers) for bucket in buckets]
        for shard in shards:
            for piece in shard.pieces:
                self._layouts[piece.master] = shard.bucket.records[piece.place.parameter].layout
        self.shards += shards
        self._index_updated()
        if not self._lazy:  # the weights were copied to new memory
            return_freed_memory()
        if self.inner is not None:
            self._add_shards(shards)
        return [shard.bucket for shard in shards]

    def _read_weights(self, buckets: Sequence[Bucket]) -> None:
        """Called before buckets are sharded; a subclass may read here what this rank needs of weights that have not
        been read."""

    def _index_updated(self) -> None:
        """Updates the map from a parameter to the tensors that the inner optimizer updates in its group."""
        self._updated = defaultdict(list)
        for shard in self.shards:
            for updated, pieces in shard.updated():
                self._updated[pieces[0].parameter].append(updated)

    def _replace(self, replaced: Mapping[torch.Tensor, list[nn.Parameter]]) -> None:
        """Replaces tensors in the groups of the inner optimizer by others, for which it already has state."""
        if not replaced:
            return
        self._index_updated()
        if self.inner is not None:
            for group, known in zip(self.inner.param_groups, self.param_groups, strict=False):
                group["params"][:] = [new for p in group["params"] for new in replaced.get(p, [p])]
                self._name(group, known)

    def _add_shards(self, shards: list[BucketShard]) -> None:
        """Adds further shards to existing groups of the inner optimizer."""
        assert self.inner is not None
        state: Mapping[torch.Tensor, Mapping[str, Any]] = self._sharded_state(shards)
        known = self.param_groups[: len(self.inner.param_groups)]
        group_of = {p: index for index, group in enumerate(known) for p in group["params"]}
        updated: list[list[nn.Parameter]] = [[] for _ in known]
        for master, pieces in (pair for shard in shards for pair in shard.updated()):
            if pieces[0].parameter in group_of:
                updated[group_of[pieces[0].parameter]].append(master)
        for index, masters in enumerate(updated):
            extend_group(self.inner, index, masters)
            self._name(self.inner.param_groups[index], known[index])
        self._copy_attributes()
        self._translate()
        if self._recipe is not None:
            options = [{name: value for name, value in group.items() if name != "param_names"} for group in known]
            groups = [{**group, "params": masters} for group, masters in zip(options, updated, strict=True)]
            state = {**state_of(self._recipe.build(groups)), **state}
        for updates, entries in state.items():
            put_state(self.inner, updates, entries)
        self._release(shards)

    def _stand_ins(self) -> dict[torch.Tensor, list[StandIn]]:
        """Returns the tensors that the inner optimizer updates instead of each parameter."""
        result: dict[torch.Tensor, list[StandIn]] = defaultdict(list)
        for updated, pieces in (pair for shard in self.shards for pair in shard.updated()):
            if len(pieces) == 1:
                result[pieces[0].parameter].append(self._stand_in(pieces[0], updated))
        return result

    def _stand_in(self, piece: ParameterShard, updated: nn.Parameter) -> StandIn:
        """Returns the stand-in of a parameter for the tensor ``updated``, which is updated instead of one shard of
        it."""
        shard = partial(_shard_entry, parameter=piece.parameter, piece=piece, plugin=self._plugin, like=updated)
        return StandIn(updated, shard)

    def _translate(self) -> None:
        """Adds the shards to what the optimizer stores by parameter."""
        translate(self._twin, self._stand_ins())

    @property
    def _twin(self) -> torch.optim.Optimizer:
        """The optimizer of the class of the user's, of this rank's shards."""
        return self.inner.optimizer if isinstance(self.inner, FullParameterOptimizer) else self.inner

    def _copy_attributes(self) -> None:
        """Copies attributes that the user has set on parameters to the tensors that are updated instead of them."""
        for updated, pieces in (pair for shard in self.shards for pair in shard.updated()):
            parameter = pieces[0].parameter  # if there are several, all have the same attributes
            if len(pieces) > 1:
                vars(updated).update(vars(parameter))
            elif vars(parameter):
                self._stand_in(pieces[0], updated).take_attributes(parameter)

    def _needs_full_parameters(self, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether parameters are sharded along other axes and the optimizer needs them in full."""
        records = self._records(optimizer.param_groups)
        cut = self._keeps_parameters and any(record.layout.axes for record in records)
        return cut and not is_elementwise(optimizer)

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

    def _shard(self, bucket: Bucket, buffers: SendBuffers) -> BucketShard:
        self._check_dtype(bucket)
        dtype = torch.promote_types(self._optimizer_dtype, bucket.dtype)
        group = self._run.group(*bucket.reduction_axes)
        common: dict[str, Any] = {
            "bucket": bucket,
            "run": self._run,
            "group": group,
            "samples": self._group.size,
            "optimizer_dtype": dtype,
            "reduce_dtype": self._reduce_dtype(bucket, dtype),
        }
        common["partition"] = self._partition(bucket)
        if self._lazy:
            return self._lazy_shard(apart=self._knows_parameters, **common)
        return self._eager_shard(buffers=buffers, plugin=self._plugin, keep_shapes=self._keeps_parameters, **common)

    def _partition(self, bucket: Bucket) -> Partition:
        sizes, degree = [p.numel() for p in bucket.parameters], self._run.group(*bucket.reduction_axes).size
        return make_partition(sizes, degree, is_lazy=self._lazy, splits=not self._keeps_parameters)

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

    def _eager_shard(self, **arguments: Any) -> EagerShard:
        return EagerShard(**arguments)

    def _lazy_shard(self, **arguments: Any) -> LazyShard:
        return LazyShard(**arguments)

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
    def _lazy(self) -> bool:
        return self._run.backend.is_lazy

    def record(self, parameter: nn.Parameter) -> ParameterRecord:
        """Returns the record of a parameter of the original model.

        Raises:
            ParameterError: if it belongs to no prepared model.
        """
        record = self._run.find_parameter(parameter)
        if record is None:
            raise ParameterError(
                f"A parameter of shape {tuple(parameter.shape)} belongs to no prepared model.",
                fix="prepare the model before, or together with, its optimizer",
            )
        return record

    def _in_model_order(self, records: list[ParameterRecord]) -> list[ParameterRecord]:
        """Sorts records in the order of the model, whose reverse is the order of the backward pass."""
        wanted = {id(record) for record in records}
        return [record for records in self._run.parameter_maps for record in records if id(record) in wanted]

    def _models_synchronise(self) -> bool:
        return not self._models or any(model.synchronises for model in self._models)

    @property
    def _knows_parameters(self) -> bool:
        """Whether the optimizer may depend on the individual parameters, so that they cannot be updated as one tensor:
        it has values by parameter, or is not torch's and knows their names."""
        own = type(self.optimizer).__module__.partition(".")[0] == "torch"
        named = any("param_names" in group for group in self.param_groups)
        return (named and not own) or knows_by_parameter(self.optimizer) is not None

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        result = {**group, "params": [updated for p in group["params"] for updated in self._updated.get(p, ())]}
        self._name(result, group)
        return result

    def _name(self, inner: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Sets the names in a group of the inner optimizer to those of the parameters in ``group``."""
        if "param_names" not in group:
            return
        names = dict(zip(group["params"], group["param_names"], strict=True))
        pieces_of = {updated: pieces for shard in self.shards for updated, pieces in shard.updated()}
        inner["param_names"] = [", ".join(names[p.parameter] for p in pieces_of[master]) for master in inner["params"]]

    def _sharded_state(self, shards: Iterable[BucketShard]) -> dict[torch.Tensor, dict[str, Any]]:
        """Returns the shards of state that the user's optimizer has from the start or from earlier steps."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        known = state_of(self.optimizer)
        for shard in shards if known else ():
            entries_of = shard.open(state)
            for piece in shard.pieces:
                for name, value in known.get(piece.parameter, {}).items():
                    sharded = _shard_entry(value, piece.parameter, piece, self._plugin)
                    entries_of.setdefault(piece.master, {})[name] = sharded
            self._replace(shard.close(state))
        return state

    def _release(self, shards: Iterable[BucketShard]) -> None:
        """Removes the state of sharded parameters from the user's optimizer, as the inner optimizer has it."""
        known = state_of(self.optimizer)
        for shard in shards:
            for parameter in shard.parameters:
                known.pop(parameter, None)

    # ---- the interface of an optimizer -------------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of this rank's shards."""
        return self.inner.state if isinstance(self.inner, FullParameterOptimizer) else state_of(self.inner)

    def take_over(self) -> None:
        """Applies values that were written to master weights and state by parameter (:meth:`state_pieces`)."""
        self.settle()
        for shard in self.shards:
            self._replace(shard.close(self.state))

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of prepared models, and shards them."""
        self.optimizer.add_param_group(param_group)
        group = self.optimizer.param_groups[-1]
        try:
            records = self._records([group])
        except ParameterError:
            self.optimizer.param_groups.pop()
            raise
        for leave in self._others:
            leave(group["params"])
        self._watcher.extend(records)
        self.inner.add_param_group(self._inner_group(group))
        self._release(self.shards)
        self._copy_attributes()
        self._translate()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, or sets them to zero. In the latter case parameters without a gradient in the next pass are
        updated as with zeros, by momentum and weight decay, so this rank's shards of the gradients are kept."""
        for shard in self.shards:
            if set_to_none:
                shard.drop_gradients()
            else:
                shard.zero_gradients()
        kept = set() if set_to_none else {p for shard in self.shards for p in shard.parameters}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in kept:
                    parameter.grad = None
        self._watcher.forget()

    # ---- gradients, see GradientOwner --------------------------------------------------------------------------------
    @property
    def synchronises(self) -> bool:
        """Whether gradients that arrive now are reduced: those of every micro-batch, if they accumulate as shards. With
        uneven inputs none but the last of a step is then: a rank whose last batch completes a step early would reduce
        once where others reduce several times."""
        return (self._every_micro_batch and not self._run.join.is_uneven) or self._synchronises()

    @property
    def in_backward(self) -> bool:
        """Whether the run executes a backward pass of one of the models."""
        return any(model.in_backward for model in self._models)

    def take_gradient(self, bucket: int, index: int) -> None:
        """Takes a gradient that has arrived into the buffer that is sent."""
        self.shards[bucket].take_gradient(index)

    def send_gradients(self, bucket: int) -> None:
        """Starts the reduce-scatter of a bucket."""
        self.shards[bucket].send_gradients()
        self._sent.append(self.shards[bucket])

    def receive_gradients(self) -> None:
        """Waits for the gradients that were sent."""
        self._receive_with([])

    def _receive_with(self, flags: Sequence[bool]) -> list[bool]:
        """Waits for the gradients that were sent. Returns which of ``flags`` are set on any rank."""
        shards, self._sent = self._sent, []
        anywhere = used_anywhere([*flags, *(flag for s in shards for flag in s.used)], self._run, self._group)
        used = iter(anywhere[len(flags) :])
        for shard in shards:
            partial = self._run.group(*shard.bucket.partial_axes)
            shard.receive_gradients([next(used) for _ in shard.used], 1.0 / self._group.size, partial)
        return anywhere[: len(flags)]

    def finish_backward(self) -> None:
        """Must be called at the end of a backward pass."""
        self._watcher.finish()

    def flush(self) -> None:
        """Reduces gradients that are not reduced yet, and applies the user's changes to reduced ones."""
        self._watcher.flush()
        for shard in self.shards:
            shard.sync_user_edits()

    def gradient_parts(self, parameters: Iterable[nn.Parameter]) -> list[GradientPart]:
        """Returns this rank's shards of the reduced gradients of those ``parameters`` that this optimizer updates. They
        may be changed in place."""
        wanted = set(parameters)
        parts = [part for shard in self.shards for part in shard.gradient_parts(wanted)]
        return [*parts, *elsewhere(self._run, self.shard_axes)]

    @property
    def sharded_parameters(self) -> set[torch.Tensor]:
        """The parameters of the model that have shards: all but those that have never trained."""
        return {p for shard in self.shards for p in shard.parameters}

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The gradient axes over which state is sharded, but for parameters that are themselves."""
        return self._run.mesh.gradient_axes

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Returns the reduced gradient of one parameter in its local shape, or None. Collective."""
        for shard in self.shards:
            for index, candidate in enumerate(shard.parameters):
                if candidate is parameter:
                    return shard.gather_gradients()[index]
        return None

    # ---- the step ----------------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Updates this rank's shards, and gathers the weights of all ranks.

        Each rank has only its shard of the optimizer's state, so ranks cannot step independently. Gradients that were
        accumulated inside ``no_sync`` are therefore reduced first, with a warning.

        Args:
            closure: runs forward and backward and returns the loss; called once, before the update.
            options: further arguments of the optimizer's own ``step``.
        """
        loss = None
        self._warn_inside_no_sync()
        self.settle()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.flush()
        self.take_over()  # of a checkpoint, whose weights are not the user's
        self._sync_user_weights()
        if self._max_norm is not None:
            parts = self.gradient_parts(p for group in self.param_groups for p in group["params"])
            self.grad_norm = global_norm(parts, self._run)
            scale_parts(parts, clip_coefficient(self.grad_norm, self._max_norm))
        copy_options(self.optimizer, self._twin)
        self._copy_attributes()
        for shard in self.shards:
            self._replace(shard.regroup(self.state))
            shard.before_update()
        self.inner.step(**options)
        for shard in self.shards:
            shard.after_update()
        copy_options(self._twin, self.optimizer)
        self.gather_weights()
        # A scheduler warns if the optimizer it was built with never steps; it checks this attribute.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def call_own(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Calls a method of the user's optimizer for this rank's shards, such as ``eval`` of a schedule-free optimizer,
        and gathers the weights if it may have written to them. Collective.

        Raises:
            UsageError: if its result would not be that of a call for all parameters.
        """
        self._own_call(name, arguments, options)
        self.settle()
        copy_options(self.optimizer, self._twin)
        self.take_over()
        if name not in self._uses_gradients:
            self._test_own(name, arguments, options)
        if self._uses_gradients[name]:
            self.flush()
        self._sync_user_weights()
        for shard in self.shards:
            self._replace(shard.regroup(self.state) if self._uses_gradients[name] else {})
            shard.before_update()
        result, wrote = self.watched_call(name, arguments, options)
        for shard in self.shards:
            shard.after_update()
        copy_options(self._twin, self.optimizer)
        if any(self._everyone(wrote)):
            self.gather_weights()
            self._run.backend.step_boundary()
        return result

    def _test_own(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        found = self.trial(self._twin, name, arguments, options, by_parameter=self._keeps_parameters)
        everyone = self._everyone(found)
        reason = next((reason for reason, _ in everyone if reason is not None), None)
        if reason is not None:
            raise UsageError(
                f"{type(self._twin).__name__}.{name} cannot be called with {self._title}.",
                where=f"plugin {self._plugin!r}, optimizer.{name}()",
                why=reason,
                fix=f"train without {self._title}",
            )
        self._uses_gradients[name] = any(uses for _, uses in everyone)

    def _everyone(self, value: T) -> list[T]:
        """Returns the values of all ranks that shard the optimizer; on devices whose ranks run one graph, this
        rank's."""
        alone = self._lazy or self._group.size == 1
        return [value] if alone else self._run.backend.all_gather_object(value, self._group)

    def _warn_inside_no_sync(self) -> None:
        if self._has_warned or self._run.data_parallel_size == 1 or all(m.sync_enabled for m in self._models):
            return
        self._has_warned = True
        warnings.warn(
            f"With {self._title} ranks step together, also inside `no_sync`, where `LocalSGD` expects each rank to "
            "step alone: gradients are averaged before every step, so LocalSGD saves no communication. Leave it out "
            f"(enabled=False), accumulate more micro-batches in each step, or train without {self._title}.",
            stacklevel=3,
        )

    def _sync_user_weights(self) -> None:
        for shard in self.shards:
            shard.sync_user_weights()

    def take_user_weights(self) -> None:
        """Takes weights that the loop has assigned or written to."""
        self.settle()
        self._sync_user_weights()

    def gather_weights(self) -> None:
        """Gathers the updated weights on every rank; with ``overlap_gather``, starts to."""
        self.take_over()
        if self._awaited is not None:
            self._awaited.start(self.shards, self._models)
            return
        for finish in [shard.send_weights() for shard in self.shards]:
            finish()

    def settle(self) -> None:
        """Waits for weights that are being gathered."""
        if self._awaited is not None:
            self._awaited.settle()

    # ---- state -------------------------------------------------------------------------------------------------------
    def state_pieces(self) -> list[StatePiece]:
        """Returns this rank's state, one :class:`StatePiece` for each shard of a parameter of the original model."""
        return state_pieces(self)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state of this rank's shards, their places in the parameters, the current options, and the master
        weights if they are separate from the parameters."""
        self.take_over()
        self._sync_user_weights()
        copy_options(self.optimizer, self._twin)
        result = self.inner.state_dict()
        result["pieces"] = self._held()
        known = cast(Mapping[nn.Parameter, Any], state_of(self.optimizer))
        frozen = {self.record(p).fqn: dict(entries) for p, entries in known.items() if entries}
        if frozen:
            result["whole_state"] = frozen
        if self.saves_masters and any(shard.has_masters for shard in self.shards):
            result["master_weights"] = [master.detach().clone() for master in self._masters()]
        return result

    def _held(self) -> list[list[Place]]:
        """Returns the places of all shards that the inner optimizer updates, in the order of its groups."""
        places: dict[torch.Tensor, list[Place]] = {}
        for shard in self.shards:
            for master, pieces in shard.updated():
                places[master] = [place_of(shard, piece) for piece in pieces]
        return [places[master] for master in self._masters()]

    def _lengths(self) -> dict[Place, int]:
        """Returns the number of elements of each shard, padding included."""
        return {place_of(shard, piece): piece.place.length for shard in self.shards for piece in shard.pieces}

    def _masters(self) -> list[nn.Parameter]:
        return [master for group in self.inner.param_groups for master in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict` on the same rank of the same mesh. If it has no master weights, they
        are set from the model's parameters. Collective.

        Raises:
            UsageError: if it is the state of other shards than those of this rank.
        """
        self.take_over()
        self._sync_user_weights()
        own = ("master_weights", "pieces", "whole_state")
        given = {key: value for key, value in state_dict.items() if key not in own}
        held, masters = self._held(), state_dict.get("master_weights")
        saved = state_dict.get("pieces", held)
        if saved != held:
            held = self._split_like(saved)
            given = reordered(given, saved, held, self._lengths(), self.inner.state_dict())
        self.inner.load_state_dict(given)
        copy_options(self._twin, self.optimizer)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            entries = state_dict.get("whole_state", {}).get(self.record(parameter).fqn)
            if entries is not None and parameter not in self.sharded_parameters:
                state_of(self.optimizer)[parameter] = dict(entries)
        if masters is None:
            self.reload_masters()
            return
        if saved != held:
            self.reload_masters()
        if "pieces" not in state_dict:  # written by an older version, which did not store them
            in_shards = [master for shard in self.shards for master, _ in shard.updated()]
            masters = [dict(zip(in_shards, masters, strict=True))[master] for master in self._masters()]
        lengths = self._lengths()
        known = [index for index, places in enumerate(saved) if tuple(places[0]) in lengths]
        values = by_place([saved[index] for index in known], [{"": masters[index]} for index in known], lengths)
        with torch.no_grad():
            for master, places in zip(self._masters(), held, strict=True):
                if places[0] in values:
                    master.copy_(joined_entries([values[place] for place in places])[""])
        self.gather_weights()
        self.settle()

    def _split_like(self, saved: Sequence[Sequence[Sequence[Any]]]) -> list[list[Place]]:
        """Splits the tensors that the inner optimizer updates, such that each belongs to one entry of ``saved``.
        Returns their places."""
        index_of = {tuple(place): index for index, places in enumerate(saved) for place in places}
        for shard in self.shards:
            kinds = {piece.place.parameter: index_of.get(place_of(shard, piece)) for piece in shard.pieces}
            self._replace(shard.split_by(kinds, self.state))
        return self._held()

    def reload_masters(self) -> None:
        """Sets the master weights from the model's weights, after these were changed."""
        self.take_over()
        self._sync_user_weights()
        for shard in self.shards:
            shard.reload()

    def close(self) -> None:
        """Removes the hooks of backward passes, and drops gradients, which cannot be gathered afterwards."""
        self._watcher.close()
        if self._awaited is not None:
            self._awaited.close()
        for shard in self.shards:
            shard.drop_gradients()


def scale_parts(parts: Iterable[GradientPart], coefficient: torch.Tensor) -> None:
    """Multiplies this rank's shards of gradients in place."""
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if tensors:
        torch._foreach_mul_(tensors, coefficient.to(tensors[0].dtype.to_real()))


def refuse_closures(optimizer: torch.optim.Optimizer, plugin: str) -> None:
    """Raises UsageError, in the name of ``plugin``, for an optimizer that cannot step without a closure."""
    if needs_closure(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} evaluates a closure inside its step, which sharded state does not support.",
            where=f"plugin {plugin!r}",
            why="it runs forward and backward several times inside a step, and uses all parameters at once",
            fix="train without sharding the optimizer's state",
        )


def _shard_entry(
    value: Any, parameter: nn.Parameter, piece: ParameterShard, plugin: str, like: torch.Tensor | None = None
) -> Any:
    like = piece.master if like is None else like
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and parameter.dim() > 0:
        part = value.reshape(-1)[piece.place.start : piece.place.stop]
        part = F.pad(part, (0, piece.place.padding)) if piece.place.padding else part
        return part.clone().view(like.shape).to(like.dtype if value.is_floating_point() else value.dtype)
    if value.numel() == 1 or like.shape == parameter.shape:
        return value.clone()
    raise UsageError(
        f"State of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)} cannot be sharded.",
        where=f"plugin {plugin!r}",
        fix="prepare the optimizer before its first step",
    )


# ---- The state on this rank, for checkpoints -------------------------------------------------------------------------
def state_pieces(optimizer: ShardedOptimizer) -> list[StatePiece]:
    """Returns the state of this rank's shards of every parameter of ``optimizer``."""
    optimizer.settle()  # a checkpoint writes to parameters too
    groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    pieces = []
    for shard in optimizer.shards:
        store_of_pieces = shard.open(optimizer.state)
        for piece in shard.pieces:
            store, key = store_of_pieces, piece.master
            if isinstance(optimizer.inner, FullParameterOptimizer):
                store, key = optimizer.inner.place_of_state(piece.master)
            pieces.append(
                StatePiece(
                    record=shard.bucket.records[piece.place.parameter],
                    parameter=piece.master,
                    start=piece.place.start,
                    stop=piece.place.stop,
                    group=groups[piece.parameter],
                    axes=shard.bucket.reduction_axes,
                    master=piece.master.dtype != piece.parameter.dtype and optimizer.saves_masters,
                    whole=key is not piece.master,
                    key=key,
                    store=store,
                )
            )
    sharded = optimizer.sharded_parameters
    for parameter, group in groups.items():  # parameters that never trained are unsharded, and so is their loaded state
        record = optimizer.record(parameter)
        if parameter not in sharded:
            pieces.append(
                StatePiece(
                    record=record,
                    parameter=parameter,
                    start=0,
                    stop=parameter.numel(),
                    group=group,
                    store=state_of(optimizer.optimizer),
                )
            )
    return pieces


# ---- Memory of the host ----------------------------------------------------------------------------------------------
def return_freed_memory() -> None:
    """Returns freed memory that the C library keeps to the system.

    glibc's allocator keeps freed blocks below its mmap threshold (at most 32 MiB), and those below a block that is
    still in use. After the weights of a model were copied, this can be as much as the size of the model. Does nothing
    with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
