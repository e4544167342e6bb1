# SPDX-License-Identifier: Apache-2.0
"""The wrappers of optimizers and schedulers that ``prepare`` returns: Accelerate's, extended for a run of plugins."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import ReduceLROnPlateau

from neuron_accel.engine.optim.state import HasStatePieces, each_optimizer
from neuron_accel.errors import ParameterError, UsageError
from neuron_accel.loop.lazy_step import LazyStep
from neuron_accel.loop.methods import weakly

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


class PreparedOptimizer(AcceleratedOptimizer):
    """An optimizer that calls the hooks of the run's plugins before and after it updates weights.

    It does not reduce gradients, which a plugin does. (Accelerate's wrapper reduces them over all ranks on XLA devices
    at every call, also while gradients accumulate.)

    Args:
        optimizer: the user's optimizer, as transformed by the plugins.
        run: the run.
        scaler: the gradient scaler of fp16 training, or None.
        given: the optimizer that the user prepared, with which schedulers may have been built.
        gradients_complete: called before gradients are used; collective.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        scaler: Any = None,
        *,
        given: torch.optim.Optimizer,
        gradients_complete: Callable[[], None],
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        _move_state(optimizer)
        self._run, self._gradients_complete = run, gradients_complete
        self.given = given
        self.released = False
        self._unheld: list[ParameterRecord] | None = None  # None before the first step
        # Accelerate determines these at every step. LOMO optimizers update weights in the backward pass.
        self._is_plain = scaler is None and self.accelerator_state.distributed_type != DistributedType.XLA
        self._is_lomo = type(optimizer).__module__.partition(".")[0] == "lomo_optim"
        self._can_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        self._take_part()

    def _take_part(self) -> None:
        run = self._run
        self.lazy = LazyStep(self.optimizer, run.backend, self.gradient_state) if run.backend.is_lazy else None
        self._stepping = run.join.register("an optimizer step", weakly(self._step_along), flushes=True)
        self._zeroing = run.join.register("zeroing gradients", weakly(self._zero_along))

    def step(self, closure: Any = None) -> None:
        self.gradient_state.is_xla_gradients_synced = True
        if not self.gradient_state.sync_gradients:
            return
        if self._unheld is None or any(record.trains for record in self._unheld):
            self._check_not_released()
            self._unheld = check_every_parameter_is_held(self, self._run, later=self._unheld is not None)
        self._check_not_alone()
        if closure is not None and self._stepping.announced:
            raise UsageError(
                "An optimizer step with a closure is not possible here.",
                where="inside `join_uneven_inputs`",
                why="a rank without data cannot run the closure",
                fix="run forward and backward before `step()`",
            )
        run, lazy = self._run, self.lazy
        with run.events.open("optimizer step", "step", part="optimizer", optimizer=id(self)):
            self._gradients_complete()
            if self._stepping.announced:
                self._stepping()
            run.may_skip = closure is None and self.scaler is None
            with run.hooks.around("step", self.optimizer, run) as taken:
                if run.may_skip:
                    self._is_overflow = taken is False  # read by Accelerate's schedulers and `step_was_skipped`
                run.norm = None
                if taken is not False:
                    self._update(closure)
            if lazy is not None:
                lazy.before_boundary()
            run.backend.step_boundary()

    def _update(self, closure: Any) -> None:
        with nullcontext() if self.lazy is None else self.lazy.update(evaluates=closure is not None):
            if not self._is_plain:
                super().step(closure)
            elif not self._is_lomo:
                self.optimizer.step(closure)
        # A scheduler warns if the optimizer it was built with never steps; it checks this attribute.
        self.given._opt_called = True  # type: ignore[attr-defined]

    def _check_not_alone(self) -> None:
        """Checks that a step in `no_sync`, in which every rank updates its own replica, is possible.

        Raises:
            UsageError: on every rank, if a parameter is sharded over ranks that see different samples.
        """
        for record in (r for model in self._run.models if not model.sync_enabled for r in model.parameters):
            axes = [axis for axis in record.layout.axes if axis in self._run.mesh.data_axes]
            if axes:
                raise UsageError(
                    "An optimizer step inside `no_sync` is not possible here.",
                    where=f"{record.fqn!r}, sharded over {', '.join(axes)}",
                    why="every rank would update its own replica, but these ranks hold shards of one replica: their "
                    "replicated parameters would diverge, and LocalSGD would average different shards",
                    fix="disable LocalSGD (enabled=False), or step outside `no_sync`",
                )

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if not self.gradient_state.sync_gradients:
            return
        with self._run.events.open("zero_grad", "part", part="optimizer"):
            if self._zeroing.announced:
                self._zeroing(*([] if set_to_none is None else [set_to_none]))
            if set_to_none is None and self._can_set_to_none:
                self.optimizer.zero_grad(set_to_none=True)
            else:
                super().zero_grad(set_to_none)
            if self.lazy is not None:
                self.lazy.after_zero_grad()
            for watcher in self._run.watchers:
                watcher.has_begun = False

    def state_dict(self) -> dict[str, Any]:
        """The state on this process. Where others have shards of it, it can be loaded again, but not be written to a
        file: ``accelerator.get_optimizer_state_dict`` returns the full one."""
        state = self.optimizer.state_dict()
        return _ShardOfState(state) if self._is_sharded() else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` returned on this process, or a full state."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        is_part = isinstance(state_dict, _ShardOfState) or "pieces" in state_dict
        by_name = any(isinstance(key, str) for key in keys)
        if not is_part and (by_name or self._is_sharded() or isinstance(self.optimizer, HasStatePieces)):
            from neuron_accel.checkpoint.state.full_state import load_full_optimizer_state

            load_full_optimizer_state(self.optimizer, state_dict, self._run)
        else:
            super().load_state_dict(state_dict)

    def _is_sharded(self) -> bool:
        """Whether other processes have other parts of the state."""
        run, axes = self._run, getattr(self.optimizer, "shard_axes", ())
        records = (run.find_parameter(p) for group in self.param_groups for p in group["params"])
        return run.group(*axes).size > 1 or any(record is not None and record.axes for record in records)

    def release(self) -> None:
        """Marks this optimizer as unusable, since another accelerator has prepared its models."""
        self.released, self._unheld = True, None

    def _check_not_released(self) -> None:
        if self.released:
            raise UsageError(
                "Another accelerator has since prepared the model of this optimizer.",
                where=type(self.optimizer).__name__,
                why="that accelerator reduces the model's gradients and saves it now",
                fix="prepare the model and the optimizer with the same accelerator",
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps its optimizer, without references to other objects of the run."""
        left_out = dict.fromkeys(("_gradients_complete", "lazy", "_stepping", "_zeroing"))
        return _State({**super().__getstate__(), **left_out})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gradients_complete = _nothing
        self._take_part()

    def _step_along(self) -> None:
        """A step on a rank that has run out of data: as on the other ranks, and drops the gradients, which no loop does
        here."""
        self.gradient_state._set_sync_gradients(True)
        self.step()
        self.optimizer.zero_grad()

    def _zero_along(self, *set_to_none: bool) -> None:
        """As on the other ranks, on a rank that has run out of data."""
        self.optimizer.zero_grad(*set_to_none)


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Moves the state that an optimizer creates in its constructor (as Adagrad does) to the device of its parameters;
    0-dim tensors, such as step counters, stay on the host."""
    updating = [each for each in each_optimizer(optimizer) if not isinstance(each, HasStatePieces)]
    for parameter, entries in (item for each in updating for item in each.state.items()):
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if isinstance(value, torch.Tensor) and value.dim() and value.device.type == "cpu":
                entries[name] = value.to(parameter.device)


class _State(dict[str, Any]):
    """The pickled state of a prepared optimizer, which raises an error for `xm.optimizer_step`, since that reads
    "param_groups" from it to average their gradients."""

    def __missing__(self, key: str) -> Any:
        if key != "param_groups":
            raise KeyError(key)
        raise UsageError(
            "`xm.optimizer_step` cannot step a prepared optimizer.",
            why="it averages gradients over all ranks, but they are already reduced, over the ranks that hold the same "
            "parameters",
            fix="call `optimizer.step()`",
        )


class _ShardOfState(dict[str, Any]):
    """This process's part of an optimizer's state, which is not written to files: published loops write that of the
    main process."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _ShardOfState:
        return _ShardOfState(copy.deepcopy(dict(self), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "`optimizer.state_dict()` is the part of the state that this process keeps, and cannot be saved.",
            why="the optimizer or its parameters are sharded, and a file with one part could not be continued from",
            fix="save `accelerator.get_optimizer_state_dict(optimizer)`, which every process calls, and which "
            "`optimizer.load_state_dict` takes, or use `accelerator.save_state`",
        )


def _nothing() -> None:
    """``gradients_complete`` of a copy, whose gradients are not reduced."""


class Owner:
    """Refers to the accelerator that prepared a model, for as long as that exists; in a copy of the model to none.

    Args:
        accelerator: the accelerator, or None.

    Attributes:
        run: its run, or None.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = None if accelerator is None else weakref.ref(accelerator)
        self.run: Run | None = None if accelerator is None else accelerator.run

    @property
    def accelerator(self) -> Any:
        return None if self._accelerator is None else self._accelerator()

    def __reduce__(self) -> tuple[type[Owner], tuple[()]]:
        return Owner, ()


class PreparedScheduler(AcceleratedScheduler):
    """A scheduler that advances by the data-parallel size, not by the number of processes, when its optimizer steps.

    As in Accelerate, a schedule is written for one process, whose loader yields ``data_parallel_size`` times as many
    batches; so each step of the optimizer counts as that many.

    ``ReduceLROnPlateau``, whose steps count metrics and not batches, advances by one. If ranks pass different metrics
    it receives their mean, so that all ranks have the same learning rate. Such a call is collective.

    Args:
        scheduler: any scheduler of torch, or an object with the same interface.
        optimizers: the prepared optimizers with which it advances.
        run: the run.
        accumulating: returns whether the loop is inside ``accumulate``.
        steps_at_once: by how many steps it advances; the data-parallel size, or that of the run that is continued.
        kwargs: arguments of ``accelerate.scheduler.AcceleratedScheduler``.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        run: Run,
        *,
        accumulating: Callable[[], bool],
        steps_at_once: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(scheduler, optimizers, **kwargs)
        self._run, self._accumulating, self.steps_at_once = run, accumulating, steps_at_once
        self._takes_metric = isinstance(scheduler, ReduceLROnPlateau)
        self._stepping = run.join.register("a scheduler step", weakly(self._step_along))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of a {type(self.scheduler).__name__}>"

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps its scheduler and optimizers, without references to the training loop."""
        return {**self.__dict__, "_accumulating": None, "_stepping": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._accumulating = bool  # False
        self._stepping = self._run.join.register("a scheduler step", weakly(self._step_along))

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._takes_metric:
            self._step_with_metric(*args, **kwargs)
            return
        if self._stepping.announced and (not self.step_with_optimizer or self.gradient_state.sync_gradients):
            self._stepping(args, kwargs)
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                _count_call(self.scheduler)
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(1 if self.split_batches else self.steps_at_once):
            # OneCycleLR raises an error after its last step, which a shorter last batch can lead past.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def _step_with_metric(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        """Advances with a metric. Inside ``accumulate`` only the metric of a step's last micro-batch counts; outside,
        as after an evaluation, every metric does."""
        if self.step_with_optimizer and self._accumulating() and not self.gradient_state.sync_gradients:
            return
        metric = float(self._run.backend.to_host(metrics) if isinstance(metrics, torch.Tensor) else metrics)
        if self._stepping.announced:
            self._stepping((None, *args), kwargs)
        self.scheduler.step(self._agreed(metric), *args, **kwargs)

    def _agreed(self, metric: float | None) -> float:
        """The mean of the metrics that are not None over all ranks; collective."""
        world = self._run.world
        everyone = [metric] if world.size == 1 else self._run.backend.all_gather_object(metric, world)
        known = [value for value in everyone if value is not None]
        return known[0] if all(value == known[0] for value in known) else sum(known) / len(known)

    def _step_along(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step on a rank that has run out of data, and has no metric."""
        self.gradient_state._set_sync_gradients(True)
        if self._takes_metric:
            self.scheduler.step(self._agreed(None), *args[1:], **kwargs)
        else:
            self.step(*args, **kwargs)


def _count_call(scheduler: Any) -> None:
    """Counts a call that does not step, as Accelerate does. Schedulers that are composed of others have no
    ``_step_count``."""
    if hasattr(scheduler, "_step_count"):
        scheduler._step_count += 1


# ---- Trainable parameters that no optimizer holds, which would receive gradients and never change --------------------
def check_every_parameter_is_held(optimizer: torch.optim.Optimizer, run: Run, *, later: bool) -> list[ParameterRecord]:
    """Checks that every trainable parameter of the models that ``optimizer`` trains is held by an optimizer.

    Called at the first step of an optimizer, when all optimizers of the run exist, and again when a parameter that no
    optimizer holds is unfrozen. Models of which no optimizer holds a parameter are not checked.

    Args:
        optimizer: the optimizer that steps.
        run: the run.
        later: False at the first step.

    Returns:
        the frozen parameters (``requires_grad=False``) of these models that no optimizer holds.

    Raises:
        ParameterError: if one of these models has a trainable parameter that no prepared optimizer holds.
    """
    held = {p for each in (optimizer, *run.optimizers) for group in each.param_groups for p in group["params"]}
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    unheld: list[ParameterRecord] = []
    for model in run.models:
        if not any(record.current in mine for record in model.parameters):
            continue
        missing = [r for r in model.parameters if r.current is not None and r.current not in held]
        if later:  # the optimizer of another rank may hold these
            missing = [r for r in missing if not r.completed_late]
        unheld += missing
        unheld_names = [record.fqn for record in missing if record.trains]
        if unheld_names:
            shown = ", ".join(unheld_names[:3]) + (
                f" and {len(unheld_names) - 3} more" if len(unheld_names) > 3 else ""
            )
            raise ParameterError(
                f"No optimizer holds {shown}.",
                where=f"{type(model.original).__name__}, step of {type(optimizer.optimizer).__name__}"  # type: ignore[attr-defined]
                f", rank {run.backend.rank}",
                why="they require gradients, which would be computed and reduced at every step and never used",
                fix="pass them to an optimizer (`add_param_group` for those that are unfrozen later), prepare that "
                "optimizer before the first step, or freeze them with requires_grad_(False)",
            )
    return unheld
