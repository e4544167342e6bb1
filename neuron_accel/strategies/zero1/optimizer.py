"""The optimizer that ``prepare`` returns under ZeRO-1.

To the user it is their optimizer: the same groups with the model's parameters, which schedulers edit. Inside, a twin of
it, of the same class and with the same hyper-parameters, updates this rank's shards only (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1).
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.contract import (
    BackwardWatcher,
    Bucket,
    FullParameterOptimizer,
    GradientPart,
    ParameterError,
    StandIn,
    StatePiece,
    UsageError,
    attributes_of,
    clip_coefficient,
    copy_options,
    elsewhere,
    extend_group,
    global_norm,
    is_elementwise,
    knows_by_parameter,
    make_buckets,
    put_state,
    recipe_of,
    translate,
    twin,
    used_anywhere,
)
from neuron_accel.strategies.zero1.eager_shard import EagerShard, SendBuffers, suitable_cap
from neuron_accel.strategies.zero1.lazy_shard import LazyShard
from neuron_accel.strategies.zero1.partition import even, lazy_partition, whole
from neuron_accel.strategies.zero1.shard import BucketShard
from neuron_accel.strategies.zero1.sharded_grad import ParameterShard

if TYPE_CHECKING:
    from neuron_accel.contract import Layout, ParameterRecord, PreparedModel, Run
    from neuron_accel.strategies.zero1.options import Zero1Options


class Zero1Optimizer(torch.optim.Optimizer):
    """Steps this rank's shard of an optimizer's parameters.

    Args:
        optimizer: the user's optimizer, holding the rewritten parameters.
        run: the run.
        options: the plugin, whose options say how to shard and when to reduce.
        synchronises: whether a backward pass that runs now is the last before a step; by default what the models say.
        others: called with the parameters of a group that is added, whose gradients this optimizer then reduces.

    Attributes:
        optimizer: the user's optimizer.
        inner: its twin, which updates the shards.
        shards: this rank's shard of every bucket.
        grad_norm: norm of the last step's gradients before clipping, 0-dim; None if ``max_norm`` is not set.

    Raises:
        UsageError: if the optimizer cannot step without a closure.
        ParameterError: if it holds a parameter of no prepared model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        options: Zero1Options,
        synchronises: Callable[[], bool] | None = None,
        others: Sequence[Callable[[Iterable[torch.Tensor]], None]] = (),
    ) -> None:
        # Like Accelerate's own wrapper, this is an Optimizer by interface: groups, state and defaults are those of the
        # optimizers inside, so the base class's constructor, which would make its own, is not run.
        refuse_closures(optimizer)
        self.optimizer = optimizer
        self.options = options
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
        self._recipe = recipe_of(optimizer)
        self.inner: torch.optim.Optimizer = None  # type: ignore[assignment]  # made below, from what asks for it
        self._action = run.join.register(
            "a backward pass", lambda *state: self._watcher.take_part(*state), settle=self.flush
        )
        self._watcher = BackwardWatcher(
            self._records(optimizer.param_groups),
            self._divide,
            run=run,
            group=self._group,
            synchronises=lambda: self.options.use_grad_acc_hook or self._synchronises(),
            driven=lambda: any(model.in_backward for model in self._models),
            ready=self._send,
            done=self._receive,
            overlap=self.options.overlap and not self._lazy,
            take=None if self._lazy else self._take,
            action=self._action,
        )
        state = self._sharded_state(self.shards)
        self.inner = twin(optimizer, [self._inner_group(g) for g in optimizer.param_groups], state)
        self._carry_attributes()
        self._translate()
        if self._sees_wholes(optimizer):
            self.inner = FullParameterOptimizer(self.inner, self._layouts, run)
        self._release(self.shards)
        if self._recipe is not None:
            del optimizer._neuron_accel_recipe  # type: ignore[attr-defined]

    # ---- construction ------------------------------------------------------------------------------------------------
    def _records(self, groups: Iterable[dict[str, Any]]) -> list[ParameterRecord]:
        """All parameters that may train, and the models that they belong to."""
        records = [self.record(p) for group in groups for p in group["params"]]
        mine = {id(record) for record in records}
        for model in self._run.models:
            if not any(model is m for m in self._models) and any(id(record) in mine for record in model.parameters):
                self._models.append(model)
        return records

    def _divide(self, records: list[ParameterRecord]) -> list[Bucket]:
        """Shards parameters that begin to train. Until then they have no masters, and the state loaded for them is
        unsharded."""
        group_of = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
        of_groups: list[list[ParameterRecord]] = [[] for _ in self.param_groups]
        for record in records:
            of_groups[group_of[record.current]].append(record)
        shards = [self._shard(bucket, self._buffers) for bucket in self._buckets(of_groups)]
        for shard in shards:
            for piece in shard.pieces:
                self._layouts[piece.master] = shard.bucket.records[piece.place.parameter].layout
        self.shards += shards
        self._find_updated()
        if not self._lazy:  # the weights have moved
            return_freed_memory()
        if self.inner is not None:
            self._update_also(shards)
        return [shard.bucket for shard in shards]

    def _find_updated(self) -> None:
        """What the inner optimizer updates, by a parameter in whose group it belongs."""
        self._updated = defaultdict(list)
        for shard in self.shards:
            for updated, pieces in shard.updated():
                self._updated[pieces[0].parameter].append(updated)

    def _follow(self, replaced: Mapping[torch.Tensor, list[nn.Parameter]]) -> None:
        """The inner optimizer updates other tensors, of which it has the state already."""
        if not replaced:
            return
        self._find_updated()
        if self.inner is not None:
            for group, known in zip(self.inner.param_groups, self.param_groups, strict=False):
                group["params"][:] = [new for p in group["params"] for new in replaced.get(p, [p])]
                self._name(group, known)

    def _update_also(self, shards: list[BucketShard]) -> None:
        """Adds further shards to the inner optimizer, in those groups of their parameters that it has already."""
        assert self.inner is not None
        state: Mapping[torch.Tensor, dict[str, Any]] = self._sharded_state(shards)
        known = self.param_groups[: len(self.inner.param_groups)]
        group_of = {p: index for index, group in enumerate(known) for p in group["params"]}
        updated: list[list[nn.Parameter]] = [[] for _ in known]
        for master, pieces in (pair for shard in shards for pair in shard.updated()):
            if pieces[0].parameter in group_of:
                updated[group_of[pieces[0].parameter]].append(master)
        for index, masters in enumerate(updated):
            extend_group(self.inner, index, masters)
            self._name(self.inner.param_groups[index], known[index])
        self._carry_attributes()
        self._translate()
        if self._recipe is not None:
            options = [{name: value for name, value in group.items() if name != "param_names"} for group in known]
            groups = [{**group, "params": masters} for group, masters in zip(options, updated, strict=True)]
            state = {**self._recipe.build(groups).state, **state}
        for updates, entries in state.items():
            put_state(self.inner, updates, entries)
        self._release(shards)

    def _take(self, bucket: int, index: int) -> None:
        cast(EagerShard, self.shards[bucket]).take_gradient(index)

    def _stand_ins(self) -> dict[torch.Tensor, list[StandIn]]:
        """What the inner optimizer updates instead of each parameter."""
        result: dict[torch.Tensor, list[StandIn]] = defaultdict(list)
        for updated, pieces in (pair for shard in self.shards for pair in shard.updated()):
            if len(pieces) == 1:
                result[pieces[0].parameter].append(_stand_in(pieces[0], updated))
        return result

    def _translate(self) -> None:
        """Translates what the optimizer stores by parameter to shards."""
        assert self.inner is not None
        inner = self.inner.optimizer if isinstance(self.inner, FullParameterOptimizer) else self.inner
        translate(inner, self._stand_ins())

    def _carry_attributes(self) -> None:
        """Copies attributes that a loop has set on parameters to the tensors that are updated instead of them."""
        for updated, pieces in (pair for shard in self.shards for pair in shard.updated()):
            parameter = pieces[0].parameter  # where there are several, all have the same
            if len(pieces) > 1:
                vars(updated).update(vars(parameter))
            elif vars(parameter):
                _stand_in(pieces[0], updated).take_attributes(parameter)

    def _sees_wholes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an unsharded parameter of this rank is a shard of an original parameter that the optimizer needs in
        full."""
        records = self._records(optimizer.param_groups)
        cut = self._keeps_parameters and any(record.layout.axes for record in records)
        return cut and not is_elementwise(optimizer)

    def _buckets(self, of_groups: list[list[ParameterRecord]]) -> list[Bucket]:
        cap = int(self.options.bucket_cap_mb * (1 << 20))
        if not self._lazy:
            everything = self._in_model_order([r for records in of_groups for r in records])
            return make_buckets(everything, suitable_cap(everything, cap), self._run.mesh)
        # A shard is updated as one: a bucket has one set of options. Neighbours count in the same way in norms.
        buckets = []
        for records in of_groups:
            ordered = self._in_model_order(records)
            by_attributes: dict[Any, list[ParameterRecord]] = defaultdict(list)
            for record in ordered:
                by_attributes[attributes_of(record.current)].append(record)  # type: ignore[arg-type]
            for alike_ones in by_attributes.values():
                buckets += make_buckets(sorted(alike_ones, key=lambda r: (r.axes, r.replicas)), cap, self._run.mesh)
        return buckets

    def _shard(self, bucket: Bucket, buffers: SendBuffers) -> BucketShard:
        options, sizes = self.options, [p.numel() for p in bucket.parameters]
        self._check_dtype(bucket)
        dtype = torch.promote_types(options.optimizer_dtype, bucket.dtype)
        group = self._run.group(*bucket.reduction_axes)
        common: dict[str, Any] = {
            "bucket": bucket,
            "run": self._run,
            "group": group,
            "samples": self._group.size,
            "optimizer_dtype": dtype,
            "reduce_dtype": dtype if options.higher_cc_precision else bucket.dtype,
        }
        if self._lazy:
            return LazyShard(partition=lazy_partition(sizes, group.size), apart=self._knows_parameters, **common)
        partition = (whole if self._keeps_parameters else even)(sizes, group.size)
        return EagerShard(partition=partition, buffers=buffers, keep_shapes=self._keeps_parameters, **common)

    def _check_dtype(self, bucket: Bucket) -> None:
        if self._lazy and bucket.dtype.is_complex:
            raise UsageError(
                f"{bucket.records[0].fqn!r} is {str(bucket.dtype).removeprefix('torch.')}.",
                where=f"plugin 'zero1', backend {self._run.backend.name!r}",
                why="this device has no sums of complex numbers over ranks",
                fix="train without ZeRO-1 on this device, or keep real and imaginary part in a real parameter "
                "(torch.view_as_real)",
            )

    @property
    def _keeps_parameters(self) -> bool:
        return self.options.partition == "parameters"

    @property
    def _lazy(self) -> bool:
        return self._run.backend.is_lazy

    def record(self, parameter: nn.Parameter) -> ParameterRecord:
        """The record of a parameter of the original model."""
        record = self._run.find_parameter(parameter)
        if record is None:
            raise ParameterError(
                f"A parameter of shape {tuple(parameter.shape)} belongs to no prepared model.",
                fix="prepare the model before, or together with, its optimizer",
            )
        return record

    def _in_model_order(self, records: list[ParameterRecord]) -> list[ParameterRecord]:
        """Backward reaches parameters in the reverse order of the model, whatever the optimizer's groups are."""
        wanted = {id(record) for record in records}
        return [record for records in self._run.parameter_maps for record in records if id(record) in wanted]

    def _models_synchronise(self) -> bool:
        return not self._models or any(model.synchronises for model in self._models)

    @property
    def _knows_parameters(self) -> bool:
        """Whether the optimizer knows something of each parameter that those updated as one tensor may not share: its
        name, which torch's own only keep, or something in a collection."""
        own = type(self.optimizer).__module__.partition(".")[0] == "torch"
        named = any("param_names" in group for group in self.param_groups)
        return (named and not own) or knows_by_parameter(self.optimizer) is not None

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        result = {**group, "params": [updated for p in group["params"] for updated in self._updated.get(p, ())]}
        self._name(result, group)
        return result

    def _name(self, inner: dict[str, Any], group: Mapping[str, Any]) -> None:
        """Names what a group of the inner optimizer updates after the parameters in ``group``."""
        if "param_names" not in group:
            return
        names = dict(zip(group["params"], group["param_names"], strict=True))
        pieces_of = {updated: pieces for shard in self.shards for updated, pieces in shard.updated()}
        inner["param_names"] = [", ".join(names[p.parameter] for p in pieces_of[master]) for master in inner["params"]]

    def _sharded_state(self, shards: Iterable[BucketShard]) -> dict[torch.Tensor, dict[str, Any]]:
        """State that the user's optimizer has from the start, or from earlier steps, sharded."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for shard in shards if self.optimizer.state else ():
            entries_of = shard.open(state)
            for piece in shard.pieces:
                for name, value in self.optimizer.state.get(piece.parameter, {}).items():
                    sharded = _divide_entry(value, piece.parameter, piece)
                    entries_of.setdefault(piece.master, {})[name] = sharded
            self._follow(shard.close(state))
        return state

    def _release(self, shards: Iterable[BucketShard]) -> None:
        """The user's optimizer is only an interface from now on: state per parameter would be held twice."""
        for shard in shards:
            for parameter in shard.parameters:
                self.optimizer.state.pop(parameter, None)

    # ---- the interface of an optimizer -------------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of this rank's shard."""
        return self.inner.state

    def take_over(self) -> None:
        """Takes over what was written to masters and state by parameter (:meth:`state_pieces`)."""
        for shard in self.shards:
            self._follow(shard.close(self.inner.state))

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Shards further parameters, of models that are prepared already."""
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
        self._carry_attributes()
        self._translate()

    def __repr__(self) -> str:
        return f"Zero1Optimizer({self.optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, or sets them to zero: parameters without a gradient in the next pass are then updated as
        with zeros, by momentum and weight decay. This rank's shards of the gradients are kept for that."""
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

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def _send(self, bucket: int) -> None:
        self.shards[bucket].send_gradients()
        self._sent.append(self.shards[bucket])

    def _receive(self) -> None:
        shards, self._sent = self._sent, []
        used = iter(used_anywhere([flag for s in shards for flag in s.used], self._run, self._group))
        for shard in shards:
            partial = self._run.group(*shard.bucket.partial_axes)
            shard.receive_gradients([next(used) for _ in shard.used], 1.0 / self._group.size, partial)

    def finish_backward(self) -> None:
        """A backward pass is over."""
        self._watcher.finish()

    def flush(self) -> None:
        """Completes the reduction of gradients that wait for it, and applies the loop's changes to reduced ones."""
        self._watcher.flush()
        for shard in self.shards:
            shard.sync_user_edits()

    def gradient_parts(self, parameters: Iterable[nn.Parameter]) -> list[GradientPart]:
        """This rank's shards of the reduced gradients of ``parameters``, those of other optimizers left out; the caller
        may change them in place."""
        wanted = set(parameters)
        parts = [part for shard in self.shards for part in shard.gradient_parts(wanted)]
        return [*parts, *elsewhere(self._run, self._run.mesh.gradient_axes)]

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The reduced gradient of one parameter in its local shape; collective."""
        for shard in self.shards:
            for index, candidate in enumerate(shard.parameters):
                if candidate is parameter:
                    return shard.gather_gradients()[index]
        return None

    # ---- the step ----------------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Updates this rank's shards and gathers those of all ranks.

        A rank has only its shard of the optimizer's state, so none can step alone. Inside ``no_sync`` gradients stay
        unreduced until a step, which reduces them first; a warning says once that no communication was saved.

        Args:
            closure: runs forward and backward and returns the loss; called once, before the update.
            options: what the optimizer's own step takes besides.
        """
        loss = None
        self._warn_inside_no_sync()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.flush()
        self._heed_weights()
        if self.options.max_norm is not None:
            parts = self.gradient_parts(p for group in self.param_groups for p in group["params"])
            self.grad_norm = global_norm(parts, self._run)
            scale_parts(parts, clip_coefficient(self.grad_norm, self.options.max_norm))
        copy_options(self.optimizer, self.inner)
        self._carry_attributes()
        self.take_over()
        for shard in self.shards:
            self._follow(shard.regroup(self.inner.state))
            shard.before_update()
        self.inner.step(**options)
        for shard in self.shards:
            shard.after_update()
        copy_options(self.inner, self.optimizer)
        self.gather_weights()
        # A scheduler warns if the optimizer it was built with never steps; it checks this attribute.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _warn_inside_no_sync(self) -> None:
        if self._has_warned or self._run.data_parallel_size == 1 or all(m.sync_enabled for m in self._models):
            return
        self._has_warned = True
        warnings.warn(
            "Under ZeRO-1 ranks step together also inside `no_sync`, where `LocalSGD` means each to step alone: "
            "gradients are averaged before every step, as without LocalSGD, which saves no communication then. Leave "
            "LocalSGD out (enabled=False), accumulate more micro-batches in each step, or train without ZeRO-1.",
            stacklevel=3,
        )

    def _heed_weights(self) -> None:
        for shard in self.shards:
            shard.sync_user_weights()

    def gather_weights(self) -> None:
        """Gives every rank the weights that all ranks have updated."""
        self.take_over()
        for finish in [shard.send_weights() for shard in self.shards]:
            finish()

    # ---- state -------------------------------------------------------------------------------------------------------
    def state_pieces(self) -> list[StatePiece]:
        """What this rank holds, in terms of the original model's parameters."""
        return state_pieces(self)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """State of this rank's shards, and which these are, with the master weights where they are separate from the
        parameters; options as they are now."""
        self.take_over()
        self._heed_weights()
        copy_options(self.optimizer, self.inner)
        result = self.inner.state_dict()
        result["pieces"] = self._held()
        known = cast(dict[nn.Parameter, dict[str, Any]], self.optimizer.state)
        frozen = {self.record(p).fqn: dict(entries) for p, entries in known.items() if entries}
        if frozen:
            result["whole_state"] = frozen
        if self.options.save_master_weights and any(shard.has_masters for shard in self.shards):
            result["master_weights"] = [master.detach().clone() for master in self._masters()]
        return result

    def _held(self) -> list[list[tuple[str, int, int]]]:
        """Which elements of which parameters the inner optimizer updates, in the order of its groups."""
        places: dict[torch.Tensor, list[tuple[str, int, int]]] = {}
        for shard in self.shards:
            for master, pieces in shard.updated():
                places[master] = [_place(shard, piece) for piece in pieces]
        return [places[master] for master in self._masters()]

    def _lengths(self) -> dict[tuple[str, int, int], int]:
        """Elements of each piece, padding included."""
        return {_place(shard, piece): piece.place.length for shard in self.shards for piece in shard.pieces}

    def _masters(self) -> list[nn.Parameter]:
        return [master for group in self.inner.param_groups for master in group["params"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned on the same rank of the same mesh. Without master weights in it, they
        are taken from the model's parameters. Collective.

        Raises:
            UsageError: if it is the state of other shards than this rank holds.
        """
        self.take_over()
        self._heed_weights()
        own = ("master_weights", "pieces", "whole_state")
        given = {key: value for key, value in state_dict.items() if key not in own}
        held, masters = self._held(), state_dict.get("master_weights")
        saved = state_dict.get("pieces", held)
        if saved != held:
            held = self._divide_like(saved)
            given = _reordered(given, saved, held, self._lengths(), self.inner.state_dict())
        self.inner.load_state_dict(given)
        copy_options(self.inner, self.optimizer)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            entries = state_dict.get("whole_state", {}).get(self.record(parameter).fqn)
            if entries is not None and parameter not in self._sharded:
                self.optimizer.state[parameter] = dict(entries)
        if masters is None:
            self.reload_masters()
            return
        if saved != held:
            self.reload_masters()
        if "pieces" not in state_dict:  # written by a version that did not store them
            in_shards = [master for shard in self.shards for master, _ in shard.updated()]
            masters = [dict(zip(in_shards, masters, strict=True))[master] for master in self._masters()]
        lengths = self._lengths()
        known = [index for index, places in enumerate(saved) if tuple(places[0]) in lengths]
        values = _by_place([saved[index] for index in known], [{"": masters[index]} for index in known], lengths)
        with torch.no_grad():
            for master, places in zip(self._masters(), held, strict=True):
                if places[0] in values:
                    master.copy_(_joined([values[place] for place in places])[""])
        self.gather_weights()

    def _divide_like(self, saved: Sequence[Sequence[Sequence[Any]]]) -> list[list[tuple[str, int, int]]]:
        """Splits what the inner optimizer updates, such that each tensor belongs to one of ``saved``; the result."""
        index_of = {tuple(place): index for index, places in enumerate(saved) for place in places}
        for shard in self.shards:
            kinds = {piece.place.parameter: index_of.get(_place(shard, piece)) for piece in shard.pieces}
            self._follow(shard.split_by(kinds, self.inner.state))
        return self._held()

    @property
    def _sharded(self) -> set[torch.Tensor]:
        return {p for shard in self.shards for p in shard.parameters}

    def reload_masters(self) -> None:
        """Takes the model's weights as the new masters, after they were changed elsewhere."""
        self.take_over()
        self._heed_weights()
        for shard in self.shards:
            shard.reload()

    def close(self) -> None:
        """Stops watching backward passes, and drops gradients, which cannot be gathered any more."""
        self._watcher.close()
        for shard in self.shards:
            shard.drop_gradients()


def scale_parts(parts: Iterable[GradientPart], coefficient: torch.Tensor) -> None:
    """Multiplies this rank's shards of gradients in place."""
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if tensors:
        torch._foreach_mul_(tensors, coefficient.to(tensors[0].dtype.to_real()))


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError for an optimizer that cannot step without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} evaluates a closure inside its step, which ZeRO-1 does not support.",
            where="plugin 'zero1'",
            why="it runs forward and backward several times inside a step, and uses all parameters at once",
            fix="train without ZeRO-1",
        )


def _stand_in(piece: ParameterShard, updated: nn.Parameter) -> StandIn:
    """For what is updated in place of one piece: its master, or a tensor of its own."""
    return StandIn(updated, partial(_divide_entry, parameter=piece.parameter, piece=piece, like=updated))


def _place(shard: BucketShard, piece: ParameterShard) -> tuple[str, int, int]:
    return shard.bucket.records[piece.place.parameter].fqn, piece.place.start, piece.place.stop


def _divide_entry(value: Any, parameter: nn.Parameter, piece: ParameterShard, like: torch.Tensor | None = None) -> Any:
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
        where="plugin 'zero1'",
        fix="prepare the optimizer before its first step",
    )


def _reordered(
    given: dict[str, Any],
    saved: Sequence[Sequence[Sequence[Any]]],
    held: list[list[tuple[str, int, int]]],
    lengths: Mapping[tuple[str, int, int], int],
    present: dict[str, Any],
) -> dict[str, Any]:
    """A state dict of the shards ``saved`` as one of those that are ``held`` now, some of which began to train later,
    or are updated separately now.

    Args:
        lengths: elements of each piece.
        present: a state dict as it is now.

    Raises:
        UsageError: if some of ``saved`` are not held.
    """
    entries = _by_place([saved[index] for index in given["state"]], list(given["state"].values()), lengths)
    state = {index: _joined([entries[p] for p in places]) for index, places in enumerate(held) if places[0] in entries}
    groups = [
        {**mine, "params": now["params"], **({"param_names": now["param_names"]} if "param_names" in now else {})}
        for mine, now in zip(given["param_groups"], present["param_groups"], strict=True)
    ]
    return {**given, "state": state, "param_groups": groups}


def _by_place(
    saved: Sequence[Sequence[Sequence[Any]]],
    values: Sequence[Mapping[str, Any]],
    lengths: Mapping[tuple[str, int, int], int],
) -> dict[tuple[str, int, int], dict[str, Any]]:
    """What was kept of several pieces as one, by piece."""
    result = {}
    for places, entries in zip(saved, values, strict=True):
        for place in places:
            if tuple(place) not in lengths:
                raise UsageError(
                    f"The state of elements {place[1]} to {place[2]} of {place[0]!r} does not belong here.",
                    where="`load_state_dict` of an optimizer under ZeRO-1",
                    why="it was sharded in another way: other parameters trained when it was, or there were other "
                    "ranks",
                    fix="use `accelerator.save_state` and `load_state`, which load into any mesh",
                )
        sizes = [lengths[tuple(place)] for place in places]  # type: ignore[index]
        cut = [name for name, value in entries.items() if len(sizes) > 1 and _has_one_for_each(value, sum(sizes))]
        parts = {name: entries[name].split(sizes) for name in cut}
        for index, place in enumerate(places):
            result[tuple(place)] = {**entries, **{name: values[index] for name, values in parts.items()}}
    return result  # type: ignore[return-value]


def _has_one_for_each(value: Any, elements: int) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == (elements,)


def _joined(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of pieces that are updated as one, and were before, with a counter of their own."""

    def joined(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if len(entries) > 1 and value.dim():
            return torch.cat([mine[name] for mine in entries])
        return value if value.dim() else value.clone()

    return {name: joined(name, value) for name, value in entries[0].items()}


# ---- The state that ZeRO-1 keeps on this rank, for checkpoints -------------------------------------------------------
def state_pieces(optimizer: Zero1Optimizer) -> list[StatePiece]:
    """This rank's shards of every parameter of ``optimizer``."""
    groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    pieces = []
    for shard in optimizer.shards:
        store_of_pieces = shard.open(optimizer.inner.state)
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
                    master=piece.master.dtype != piece.parameter.dtype and optimizer.options.save_master_weights,
                    whole=key is not piece.master,
                    key=key,
                    store=store,
                )
            )
    sharded = {p for shard in optimizer.shards for p in shard.parameters}
    for parameter, group in groups.items():  # what never trained is unsharded on every rank, and so is its loaded state
        record = optimizer.record(parameter)
        if parameter not in sharded:
            pieces.append(
                StatePiece(
                    record=record,
                    parameter=parameter,
                    start=0,
                    stop=parameter.numel(),
                    group=group,
                    store=optimizer.optimizer.state,
                )
            )
    return pieces


# ---- Memory of the host ----------------------------------------------------------------------------------------------
def return_freed_memory() -> None:
    """Returns memory that was freed but kept by the C library to the system.

    glibc's allocator keeps freed memory below its limit for a mapping of its own (32 MiB once it has grown), and memory
    below something that is still in use. After the weights of a model have moved, that can be as much as the model.
    Does nothing with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
