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
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import nn

from neuron_accel.engine.optim.buckets import Bucket, used_anywhere
from neuron_accel.engine.optim.elementwise import is_separable, needs_closure, why_not_elementwise
from neuron_accel.engine.optim.norms import GradientPart, Gradients, clip_by_norm, gradient_parts, parts_of_others
from neuron_accel.engine.optim.own_methods import OwnMethods, TensorWatch
from neuron_accel.engine.optim.reducer import BackwardWatcher, GradientReducer
from neuron_accel.engine.optim.state import StateByParameter, StatePiece
from neuron_accel.engine.shards.build import ShardBuilder
from neuron_accel.engine.shards.shard import BucketShard
from neuron_accel.engine.shards.shard_twin import ShardTwin
from neuron_accel.engine.shards.state_dict import load_state_of_rank, state_of_rank
from neuron_accel.errors import ParameterError, PlanError, UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord

T = TypeVar("T")


class ShardedOptimizer(ShardBuilder, OwnMethods, torch.optim.Optimizer):
    """Updates this rank's shards of an optimizer's parameters.

    Args:
        optimizer: the user's optimizer, with the rewritten parameters; an attribute, too.
        run: the run.
        plugin: name of the plugin, for messages.
        title: what the plugin does, as messages say it: "train without ...".
        optimizer_dtype, max_norm, use_grad_acc_hook, higher_cc_precision: see :class:`~neuron_accel.Zero1Plugin`.
        bucket_cap_mb, partition, save_master_weights, overlap: see there, too.
        synchronises: returns whether a backward pass that runs now reduces gradients; by default, whether one of the
            models synchronises.
        others: functions that are called with the parameters of an added group, whose gradients this optimizer then
            reduces.

    Attributes:
        inner: the twin of the user's optimizer, which updates the shards.
        shards: this rank's shard of every bucket.
        saves_masters: whether checkpoints contain the master weights.
        grad_norm: norm of the last step's gradients before clipping, 0-dim; None if ``max_norm`` is not set.
        retired: whether an optimizer that was prepared later has its parameters.

    Raises:
        UsageError: if the optimizer cannot step without a closure.
        PlanError: if the update of a shard by itself would differ from that of all parameters, or the device cannot do
            what an option asks for.
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
        synchronises: Callable[[], bool] | None = None,
        others: Sequence[Callable[[Iterable[torch.Tensor]], None]] = (),
    ) -> None:
        # Like Accelerate's wrapper, this has the interface of an optimizer but does not call its constructor, which
        # would create groups, state and defaults of its own.
        _check_device(run, plugin, partition=partition)
        _check_optimizer(optimizer, plugin, title, partition)
        ShardBuilder.__init__(
            self, optimizer, run, plugin, title, optimizer_dtype, higher_cc_precision, bucket_cap_mb, partition
        )
        self._max_norm, self._every_micro_batch = max_norm, use_grad_acc_hook
        self.saves_masters, self._others = save_master_weights, others
        self._synchronises = synchronises or self._models_synchronise
        self.grad_norm: torch.Tensor | None = None
        self.retired = False
        self._has_warned = False
        self._sent: list[BucketShard] = []
        self._twin = ShardTwin(optimizer, run, plugin, keeps_parameters=self._keeps_parameters)
        self.shards = self._twin.shards
        overlap = overlap and (not self._lazy or not self.by_arrival)
        self._watcher = BackwardWatcher(self, self._records(optimizer.param_groups), run, overlap=overlap)
        closing = weakref.WeakMethod(self.close)  # the run keeps no optimizer that is prepared anew
        run.undo(lambda: (close := closing()) and close())
        self._own_call = run.join.register("a method of the optimizer", self.call_own)
        self._twin.create()
        self.inner = self._twin.inner

    # ---- the interface of an optimizer -------------------------------------------------------------------------------
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of this rank's shards, by the model's parameters, see :class:`StateByParameter`."""
        return StateByParameter(self, self._twin.piece_of)

    @state.setter
    def state(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
        self.state.replace(state)

    @property
    def shard_state(self) -> Any:
        """The same by the tensors that are updated, for code that only reads."""
        return self._twin.state

    def take_over(self) -> None:
        """Applies values that were written to master weights and state by parameter (:meth:`state_pieces`)."""
        self._twin.take_over()

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
        self._twin.add_group(group)

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
    def admit(self, records: list[ParameterRecord]) -> list[Bucket]:
        """Shards parameters that begin to train, and returns their buckets. Until then parameters have no master
        weights, and state that was loaded for them is unsharded."""
        shards = self._build(records)
        self._twin.add(shards)
        if not self._lazy:  # the weights were copied to new memory
            return_freed_memory()
        return [shard.bucket for shard in shards]

    @property
    def reduces_now(self) -> bool:
        """Whether gradients that arrive now are reduced: those of every micro-batch, if they accumulate as shards. With
        uneven inputs none but the last of a step is then: a rank whose last batch completes a step early would reduce
        once where others reduce several times."""
        return (self._every_micro_batch and not self._run.join.is_uneven) or self._synchronises()

    def _models_synchronise(self) -> bool:
        for model in self._models:
            if model.synchronises:
                return True
        return not self._models

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
        anywhere = used_anywhere([*flags, *chain.from_iterable(s.used for s in shards)], self._run, self._group)
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
        return [*parts, *parts_of_others(self._run, self.shard_axes)]

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
        if self.retired:
            raise UsageError(
                f"This {type(self.optimizer).__name__} cannot step: an optimizer of its parameters was prepared later.",
                where=f"plugin {self._plugin!r}, optimizer.step()",
                why="a parameter's gradient and state are sharded for one optimizer, the last one that was prepared",
                fix="step the other one, or use one optimizer and change its options or its state",
            )
        self._warn_inside_no_sync()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.flush()
        self.take_over()  # of a checkpoint, whose weights are not the user's
        self._sync_user_weights()
        if self._max_norm is not None:
            parts = self.gradient_parts(p for group in self.param_groups for p in group["params"])
            self.grad_norm = clip_by_norm(parts, self._max_norm, 2.0, self._run)
        with self._twin.updating():
            self.inner.step(**options)
        self.gather_weights()
        # A scheduler warns if the optimizer it was built with never steps; it checks this attribute.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return loss

    def call_own(self, name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Calls ``train`` or ``eval`` of the user's optimizer for this rank's shards, as a schedule-free optimizer has
        them, and gathers the weights if they were written to. Collective. Other methods must not use tensors.

        Raises:
            UsageError: if another method does.
        """
        method = getattr(self.inner, name)
        if name not in ("train", "eval"):
            with TensorWatch(self._refusal(name)):
                return method(*arguments, **options)
        self._own_call(name, arguments, options)
        self.take_over()
        self._sync_user_weights()
        with self._twin.updating(by_gradients=False), TensorWatch() as watch:
            result = method(*arguments, **options)
        if any(self._everyone(watch.has_seen)):
            self.gather_weights()
            self._run.backend.step_boundary()
        return result

    def _refusal(self, name: str) -> UsageError:
        return UsageError(
            f"{type(self._twin.of_shards).__name__}.{name} cannot be called with {self._title}.",
            where=f"plugin {self._plugin!r}, optimizer.{name}()",
            why="each rank has some elements of the tensors that it uses, and what it does with them is not known",
            fix="do it in the optimizer's `step`, or in its `train` and `eval`, which are tested for shards, or train "
            f"without {self._title}",
        )

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
        """Takes weights that the loop has assigned or written to, before a checkpoint is written. Collective."""
        for shard in self.shards:
            shard.before_save()

    def gather_weights(self) -> None:
        """Gathers the updated weights on every rank."""
        self.take_over()
        for finish in [shard.send_weights() for shard in self.shards]:
            finish()

    # ---- state -------------------------------------------------------------------------------------------------------
    def state_pieces(self) -> list[StatePiece]:
        """Returns this rank's state, one :class:`StatePiece` for each shard of a parameter of the original model."""
        return self._twin.state_pieces(masters=self.saves_masters)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Returns the state of this rank's shards, their places in the parameters, the current options, and the master
        weights if they are separate from the parameters."""
        self.take_over()
        self._sync_user_weights()
        return state_of_rank(self._twin, masters=self.saves_masters)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of :meth:`state_dict` on the same rank of the same mesh. If it has no master weights, they
        are set from the model's parameters. Collective.

        Raises:
            UsageError: if it is the state of other shards than those of this rank.
        """
        self.take_over()
        self._sync_user_weights()
        if not load_state_of_rank(self._twin, state_dict):
            self.reload_masters()
            return
        self.gather_weights()

    def reload_masters(self) -> None:
        """Sets the master weights from the model's weights, after these were changed."""
        self.take_over()
        self._sync_user_weights()
        for shard in self.shards:
            shard.reload()

    def retire(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the parameters up to an optimizer that is being prepared, with their weights and gradients. Collective.

        Raises:
            UsageError: if that does not hold all of them.
        """
        theirs = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        mine = {parameter for group in self.param_groups for parameter in group["params"]}
        if mine.isdisjoint(theirs) or self.retired:
            return
        if not mine <= theirs:
            raise UsageError(
                f"{type(optimizer).__name__} holds {len(mine & theirs)} of the {len(mine)} parameters of a "
                f"{type(self.optimizer).__name__} that was prepared before.",
                where=f"plugin {self._plugin!r}, prepare(optimizer)",
                why="a parameter's gradient and state are sharded for one optimizer, and the other parameters would be "
                "left without one",
                fix="let it hold all of them, which replaces the earlier optimizer, or none, or use one optimizer with "
                "parameter groups",
            )
        self.take_over()
        self.flush()
        self.take_user_weights()
        used = [(shard, index) for shard in self.shards for index, used in enumerate(shard.used_anywhere) if used]
        gradients = [(shard.parameters[index], shard.full_gradient(index).clone()) for shard, index in used]
        self.close()
        self._watcher.retire()
        self._run.join.drop(self._own_call)  # which would keep the state until the end of the run
        self._dissolve()
        for parameter, gradient in gradients:
            parameter.grad = gradient
        self.shards.clear()
        self.retired = True

    def _dissolve(self) -> None:
        """Gives parameters that are shards their full values. Collective."""

    def close(self) -> None:
        """Removes the hooks of backward passes, and drops gradients, which cannot be gathered afterwards."""
        self._watcher.close()
        for shard in self.shards:
            shard.drop_gradients()


def _check_device(run: Run, plugin: str, *, partition: str) -> None:
    if run.backend.is_lazy and partition == "parameters":
        raise PlanError(
            "Ranks that hold different parameters run different graphs.",
            where=f"plugin {plugin!r}, partition='parameters', backend {run.backend.name!r}",
            why="this device compiles one graph for all ranks",
            fix="use partition='even', with an element-wise optimizer",
        )


class ShardedGradients(Gradients):
    """Gradients that optimizers shard, and those of parameters that none of them holds.

    Args:
        run: the run.
        reducers: reduce those that no optimizer shards.
        optimizers: shard the others.
    """

    def __init__(self, run: Run, reducers: Sequence[GradientReducer], optimizers: Sequence[ShardedOptimizer]) -> None:
        def flush() -> None:
            for reducer in reducers:
                reducer.flush()
            for optimizer in optimizers:
                optimizer.flush()

        super().__init__(run, flush)
        self._optimizers = optimizers

    def parts(self, parameters: Iterable[nn.Parameter]) -> list[GradientPart]:
        self._complete()
        parameters = list(parameters)
        sharded = {p for optimizer in self._optimizers for p in optimizer.sharded_parameters}
        others = gradient_parts([p for p in parameters if p not in sharded], self._run)
        return [part for optimizer in self._optimizers for part in optimizer.gradient_parts(parameters)] + others

    def full(self, parameter: nn.Parameter) -> torch.Tensor | None:
        self._flush()
        for optimizer in self._optimizers:
            if parameter in optimizer.sharded_parameters:
                return optimizer.full_gradient(parameter)
        return parameter.grad


def _check_optimizer(optimizer: torch.optim.Optimizer, plugin: str, title: str, partition: str) -> None:
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        raise UsageError(
            f"{name} evaluates a closure inside its step, which sharded state does not support.",
            where=f"plugin {plugin!r}",
            why="it runs forward and backward several times inside a step, and uses all parameters at once",
            fix="train without sharding the optimizer's state",
        )
    if not is_separable(optimizer):
        raise PlanError(
            f"{name} uses all parameters together (or draws random numbers), but with {title} each rank updates only "
            "some of them.",
            where=f"plugin {plugin!r}",
            why="a norm over all of them, or an estimate of the best learning rate, would differ between ranks",
            fix=f"train without {title}, or choose an optimizer that updates each parameter independently",
        )
    reason = why_not_elementwise(optimizer) if partition == "even" else None
    if reason is not None:
        raise PlanError(
            f"{name} is not element-wise, but with {title} each rank updates shards of parameters.",
            where=f"plugin {plugin!r}, partition='even'",
            why=reason,
            fix="use NeuronAccelerator with the option partition='parameters' of the plugin",
        )


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
