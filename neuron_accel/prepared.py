"""What ``prepare`` returns in place of optimizers and schedulers: Accelerate's own wrappers, told about the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType

from neuron_accel.engine.errors import UsageError
from neuron_accel.engine.hyperparameters import as_device_data
from neuron_accel.loops.blank import BlankGradients
from neuron_accel.loops.orphans import check_every_parameter_is_held

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.run import Run


class PreparedOptimizer(AcceleratedOptimizer):
    """An optimizer that tells the run's plugins before and after it updates weights.

    Accelerate's own reduces gradients over the world on XLA devices at every call, accumulating or not; here reduction
    has an owner in the plan, and the wrapper leaves it alone.

    Args:
        optimizer: what the plugins made of the user's optimizer.
        run: the run.
        scaler: the gradient scaler of fp16 training, or None.
        peers: every prepared optimizer of the run, this one included once it is there.
        gradients_complete: called before gradients are used; collective.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        run: Run,
        scaler: Any = None,
        *,
        peers: list[PreparedOptimizer],
        gradients_complete: Callable[[], None],
    ) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._run, self._peers, self._gradients_complete = run, peers, gradients_complete
        self._has_stepped = False
        # What Accelerate finds out anew at every step. LOMO optimizers update weights in the backward pass.
        self._is_plain = scaler is None and self.accelerator_state.distributed_type != DistributedType.XLA
        self._is_lomo = type(optimizer).__module__.partition(".")[0] == "lomo_optim"
        self._can_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        self.blank = BlankGradients(run.backend, lambda: self.gradient_state.num_steps > 1)
        self._stepping = run.company.register("an optimizer step", self._step_along, settles=True)
        self._zeroing = run.company.register("zeroing gradients", self.optimizer.zero_grad)

    def step(self, closure: Any = None) -> None:
        self.gradient_state.is_xla_gradients_synced = True
        if not self.gradient_state.sync_gradients:
            return
        if not self._has_stepped:
            check_every_parameter_is_held(self, self._peers, self._run)
            self._has_stepped = True
        if closure is not None and self._stepping.announced:
            raise UsageError(
                "An optimizer step with a closure is not possible here.",
                where="inside `join_uneven_inputs`",
                why="a rank without data cannot run the closure",
                fix="run forward and backward before `step()`",
            )
        self._gradients_complete()
        self._stepping()
        for plugin in self._run.plan.plugins:
            plugin.before_step(self.optimizer, self._run)
        with as_device_data(self.optimizer, self._run.backend):
            self._update(closure)
        for plugin in self._run.plan.plugins:
            plugin.after_step(self.optimizer, self._run)
        self.blank.prepare()
        self._run.backend.step_boundary()
        for plugin in self._run.plan.plugins:
            plugin.after_boundary(self._run)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._zeroing()
            if set_to_none is None and self._can_set_to_none:
                self.optimizer.zero_grad(set_to_none=True)
            else:
                super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self.blank.begin()

    def _update(self, closure: Any) -> None:
        if not self._is_plain:
            super().step(closure)
        elif not self._is_lomo:
            self.optimizer.step(closure)

    def _step_along(self) -> None:
        """A step of the others, on a rank without data. Their loop has its own way to drop gradients; here nobody else
        does."""
        self.gradient_state._set_sync_gradients(True)
        self.step()
        self.optimizer.zero_grad()


class PreparedScheduler(AcceleratedScheduler):
    """A scheduler that advances by the number of ranks that see different data, not by the number of processes.

    Accelerate's convention: a schedule is written for one process, whose loader yields ``data_parallel_size`` times as
    many batches; so each step of the optimizer counts for that many.
    """

    def __init__(self, scheduler: Any, optimizers: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(scheduler, optimizers, **kwargs)
        self._run = run
        self._stepping = run.company.register("a scheduler step", self._step_along)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer or self.gradient_state.sync_gradients:
            self._stepping(args, kwargs)
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                self.scheduler._step_count += 1
            return
        if any(optimizer.step_was_skipped for optimizer in self.optimizers):
            return
        for _ in range(1 if self.split_batches else self._run.data_parallel_size):
            # A one-cycle schedule refuses to go past its end, which a ragged last batch can make it do.
            if self.scheduler._step_count <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)

    def _step_along(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gradient_state._set_sync_gradients(True)
        self.step(*args, **kwargs)
