"""The optimizer that ``prepare`` returns under ZeRO-1.

Outwardly it is the user's optimizer: the same groups with the model's parameters, which schedulers edit. Inwardly, a
twin of it, of the same class and with the same hyper-parameters, updates this rank's pieces only (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, stage 1).
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from neuron_accel.engine.optim.buckets import BackwardWatcher, Bucket, make_buckets, used_anywhere
from neuron_accel.engine.optim.elementwise import is_elementwise
from neuron_accel.engine.optim.full_parameter import WholeParameters
from neuron_accel.engine.optim.norms import GradientPart, clip_coefficient, elsewhere, global_norm
from neuron_accel.engine.optim.twin import StatePiece, copy_options, recipe_of, twin
from neuron_accel.errors import ParameterError, UsageError
from neuron_accel.strategies.zero1.eager_shard import BufferShard, SendBuffers, suitable_cap
from neuron_accel.strategies.zero1.lazy_shard import JoinedShard
from neuron_accel.strategies.zero1.partition import alike, even, whole
from neuron_accel.strategies.zero1.shard import BucketShard, ShardPiece

if TYPE_CHECKING:
    from neuron_accel.engine.optim.twin import StatePiece
    from neuron_accel.engine.runtime.run import PreparedModel, Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


@dataclass(frozen=True, kw_only=True)
class Zero1Options:
    """How to divide and when to reduce; see :class:`~neuron_accel.strategies.zero1.plugin.Zero1Plugin`."""

    optimizer_dtype: torch.dtype = torch.float32
    max_norm: float | None = None
    use_grad_acc_hook: bool = False
    higher_cc_precision: bool = False
    bucket_cap_mb: float = 25.0
    whole_parameters: bool = False
    save_master_weights: bool = True
    overlap: bool = True


class Zero1Optimizer(torch.optim.Optimizer):
    """Steps this rank's share of an optimizer's parameters.

    Args:
        optimizer: the user's optimizer, holding the rewritten parameters.
        run: the run.
        options: how.
        synchronises: whether a backward pass that runs now is the last before a step; by default what the models say.

    Attributes:
        optimizer: the user's optimizer.
        inner: its twin, which updates the pieces.
        shards: this rank's share of every bucket.
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
        self._synchronises = synchronises or self._models_synchronise
        self.shards: list[BucketShard] = []
        self._pieces: dict[nn.Parameter, list[ShardPiece]] = defaultdict(list)
        self._updated: dict[nn.Parameter, list[nn.Parameter]] = defaultdict(list)
        self._watchers: list[BackwardWatcher] = []
        self._watched: list[list[BucketShard]] = []
        self._models: list[PreparedModel] = []
        self._divide(optimizer.param_groups)
        state = self._divided_state()
        self.inner = twin(optimizer, [self._inner_group(g) for g in optimizer.param_groups], state)
        layouts = {p.master: s.bucket.records[p.place.parameter].layout for s in self.shards for p in s.pieces}
        cut = self.options.whole_parameters and any(layout.axes for layout in layouts.values())
        if cut and not is_elementwise(optimizer):  # what is whole on this rank is a part of the original
            self.inner = WholeParameters(self.inner, layouts, run)
        self._let_go()

    # ---- construction ----------------------------------------------------------------------------------------------
    def _divide(self, groups: Iterable[dict[str, Any]]) -> None:
        buffers = SendBuffers()
        shards = [self._shard(bucket, buffers) for bucket in self._buckets(groups)]
        for shard in shards:
            for piece in shard.pieces:
                self._pieces[piece.parameter].append(piece)
            for parameter, updated in shard.updated():
                self._updated[parameter].append(updated)
        self.shards += shards
        if not self._lazy:  # the weights have moved
            return_freed_memory()
        self._models = [
            m
            for m in self._run.models
            if any(m.parameters.find(p) is not None for s in self.shards for p in s.parameters)
        ]
        index = len(self._watchers)
        self._watched.append(shards)
        self._watchers.append(
            BackwardWatcher(
                [shard.bucket for shard in shards],
                synchronises=lambda: self.options.use_grad_acc_hook or self._synchronises(),
                driven=lambda: any(model.in_backward for model in self._models),
                ready=lambda bucket: shards[bucket].send_gradients(),
                done=lambda: self._receive(shards),
                overlap=self.options.overlap and not self._lazy,
                take=None if self._lazy else lambda bucket, index: shards[bucket].take_gradient(index),
                action=self._run.company.register(
                    "a backward pass", lambda: self._watchers[index].take_part(), settle=self.flush
                ),
            )
        )

    def _buckets(self, groups: Iterable[dict[str, Any]]) -> list[Bucket]:
        cap = int(self.options.bucket_cap_mb * (1 << 20))
        of_groups = [[self._record(p) for p in group["params"] if p.requires_grad] for group in groups]
        if not self._lazy:
            everything = self._in_model_order([r for records in of_groups for r in records])
            return make_buckets(everything, suitable_cap(everything, cap))
        # A share is updated as a whole: what is in a bucket has one set of options. Neighbours count alike in norms.
        buckets = []
        for records in of_groups:
            ordered = self._in_model_order(records)
            buckets += make_buckets(sorted(ordered, key=lambda r: (r.axes, r.replicas)), cap)
        return buckets

    def _shard(self, bucket: Bucket, buffers: SendBuffers) -> BucketShard:
        options, sizes = self.options, [p.numel() for p in bucket.parameters]
        common: dict[str, Any] = {
            "bucket": bucket,
            "run": self._run,
            "group": self._group,
            "optimizer_dtype": options.optimizer_dtype,
            "reduce_dtype": options.optimizer_dtype if options.higher_cc_precision else bucket.dtype,
        }
        if self._lazy:
            return JoinedShard(partition=alike(sizes, self._group.size), **common)
        partition = (whole if options.whole_parameters else even)(sizes, self._group.size)
        return BufferShard(partition=partition, buffers=buffers, keep_shapes=options.whole_parameters, **common)

    @property
    def _lazy(self) -> bool:
        return self._run.backend.is_lazy

    def _record(self, parameter: nn.Parameter) -> ParameterRecord:
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

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [updated for p in group["params"] for updated in self._updated.get(p, ())]}

    def _divided_state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """State that the user's optimizer has from the start, or from steps before, in pieces."""
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for shard in self.shards if self.optimizer.state else ():
            entries_of = shard.open(state)
            for piece in shard.pieces:
                for name, value in self.optimizer.state.get(piece.parameter, {}).items():
                    divided = _divide_entry(value, piece.parameter, piece)
                    entries_of.setdefault(piece.master, {})[name] = divided
            shard.close(state)
        return state

    def _let_go(self) -> None:
        """The user's optimizer is a face from now on: what it holds per parameter would be held twice."""
        self.optimizer.state = defaultdict(dict)
        if recipe_of(self.optimizer) is not None:
            del self.optimizer._neuron_accel_recipe  # type: ignore[attr-defined]

    # ---- the face of an optimizer ----------------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of this rank's share."""
        return self.inner.state

    def take_over(self) -> None:
        """Takes over what was written to masters and state by pieces (:meth:`state_pieces`)."""
        for shard in self.shards:
            shard.close(self.inner.state)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Divides further parameters, of models that are prepared already."""
        self.optimizer.add_param_group(param_group)
        group = self.optimizer.param_groups[-1]
        self._divide([group])
        self.inner.add_param_group(self._inner_group(group))
        self.optimizer.state = defaultdict(dict)

    def __repr__(self) -> str:
        return f"Zero1Optimizer({self.optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients. They are always set to None: the memory behind them is not kept between steps."""
        for shard in self.shards:
            shard.drop_gradients()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for watcher in self._watchers:
            watcher.unsynchronised = False

    # ---- gradients -------------------------------------------------------------------------------------------------
    def _receive(self, shards: list[BucketShard]) -> None:
        used = iter(used_anywhere([flag for s in shards for flag in s.used], self._run, self._group))
        for shard in shards:
            partial = self._run.group(*shard.bucket.partial_axes)
            shard.receive_gradients([next(used) for _ in shard.used], 1.0 / self._group.size, partial)

    def finish_backward(self) -> None:
        """A backward pass is over."""
        for watcher in self._watchers:
            watcher.finish()

    def flush(self) -> None:
        """Completes the reduction of gradients that wait for it, and takes over what the loop did to reduced ones."""
        self.finish_backward()
        if any(watcher.unsynchronised for watcher in self._watchers):
            for watcher in self._watchers:
                watcher.flush()
        for shard in self.shards:
            shard.heed_the_loop()

    def gradient_parts(self, parameters: Iterable[nn.Parameter]) -> list[GradientPart]:
        """This rank's pieces of the reduced gradients of ``parameters``, those of other optimizers left out; the caller
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

    # ---- the step --------------------------------------------------------------------------------------------------
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Updates this rank's pieces and gathers everybody's.

        A rank has only its share of the optimizer's state, so none can step alone. Inside ``no_sync`` gradients stay
        where they are until a step, which reduces them first; a warning says once that nothing was saved.

        Args:
            closure: runs forward and backward and returns the loss; called once, before the update.
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
        self.take_over()
        for shard in self.shards:
            shard.before_update(self.inner.state)
        self.inner.step()
        for shard in self.shards:
            shard.after_update(self.inner.state)
        copy_options(self.inner, self.optimizer)
        self.gather_weights()
        # A scheduler warns if the optimizer it was built with never steps; it looks at this attribute.
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
            shard.heed_weights()

    def gather_weights(self) -> None:
        """Gives every rank the weights that the pieces of all ranks stand for."""
        self.take_over()
        for finish in [shard.send_weights() for shard in self.shards]:
            finish()

    # ---- state -----------------------------------------------------------------------------------------------------
    def state_pieces(self) -> list[StatePiece]:
        """What this rank holds, in terms of the original model's parameters."""
        return state_pieces(self, self._run.mesh.gradient_axes)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """State of this rank's pieces, with the master weights where they are kept beside the parameters."""
        self.take_over()
        self._heed_weights()
        result = self.inner.state_dict()
        if self.options.save_master_weights and any(shard.has_masters for shard in self.shards):
            result["master_weights"] = [master.detach().clone() for master in self._masters()]
        return result

    def _masters(self) -> list[nn.Parameter]:
        return [master for shard in self.shards for _, master in shard.updated()]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` gave on the same rank of the same mesh. Without master weights in it, they are
        taken from the model's parameters. Collective."""
        self.take_over()
        self._heed_weights()
        masters = state_dict.get("master_weights")
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "master_weights"})
        copy_options(self.inner, self.optimizer)
        if masters is None:
            self.reload_masters()
            return
        with torch.no_grad():
            for master, value in zip(self._masters(), masters, strict=True):
                master.copy_(value)
        self.gather_weights()

    def reload_masters(self) -> None:
        """Takes the model's weights as the new masters, after somebody else has changed them."""
        self.take_over()
        self._heed_weights()
        for shard in self.shards:
            shard.reload()

    def close(self) -> None:
        """Stops watching backward passes, and lets go of gradients, which nobody could gather any more."""
        for watcher in self._watchers:
            watcher.close()
        for shard in self.shards:
            shard.drop_gradients()


def scale_parts(parts: Iterable[GradientPart], coefficient: torch.Tensor) -> None:
    """Multiplies this rank's pieces of gradients in place."""
    tensors = [part.tensor for part in parts if part.tensor is not None]
    if tensors:
        torch._foreach_mul_(tensors, coefficient.to(tensors[0].dtype))


def refuse_closures(optimizer: torch.optim.Optimizer) -> None:
    """Raises UsageError for an optimizer that cannot step without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"{type(optimizer).__name__} cannot step without a closure.",
            where="plugin 'zero1'",
            why="it runs forward and backward several times inside a step, and looks at all parameters at once",
            fix="train without ZeRO-1",
        )


def _divide_entry(value: Any, parameter: nn.Parameter, piece: ShardPiece) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape == parameter.shape and parameter.dim() > 0:
        part = value.reshape(-1)[piece.place.start : piece.place.stop]
        part = F.pad(part, (0, piece.place.padding)) if piece.place.padding else part
        return (
            part.clone().view(piece.master.shape).to(piece.master.dtype if value.is_floating_point() else value.dtype)
        )
    if value.numel() == 1 or piece.master.shape == parameter.shape:
        return value.clone()
    raise UsageError(
        f"State of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)} cannot be divided.",
        where="plugin 'zero1'",
        fix="prepare the optimizer before its first step",
    )


# ---- Whose state ZeRO-1 keeps on this rank, for checkpoints ----------------------------------------------------------
def state_pieces(optimizer: Zero1Optimizer, axes: tuple[str, ...]) -> list[StatePiece]:
    """This rank's pieces of every parameter of ``optimizer``, whose state is divided along ``axes``."""
    groups = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    pieces = []
    for shard in optimizer.shards:
        store_of_pieces = shard.open(optimizer.inner.state)
        for piece in shard.pieces:
            store, key = store_of_pieces, piece.master
            if isinstance(optimizer.inner, WholeParameters):
                store, key = optimizer.inner.place_of_state(piece.master)
            pieces.append(
                StatePiece(
                    record=shard.bucket.records[piece.place.parameter],
                    parameter=piece.master,
                    start=piece.place.start,
                    stop=piece.place.stop,
                    group=groups[piece.parameter],
                    axes=axes,
                    master=piece.master.dtype != piece.parameter.dtype and optimizer.options.save_master_weights,
                    whole=key is not piece.master,
                    key=key,
                    store=store,
                )
            )
    return pieces


# ---- Memory of the host ----------------------------------------------------------------------------------------------
def return_freed_memory() -> None:
    """Gives back to the system what the C library keeps of memory that was freed.

    glibc's allocator keeps freed memory below its limit for a mapping of its own (32 MiB once it has grown), and memory
    below something that is still in use. After the weights of a model have moved, that can be as much as the model.
    Does nothing with other C libraries.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
