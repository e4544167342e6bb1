"""What ``prepare`` returns in place of optimizers and schedulers: Accelerate's own wrappers, told about the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

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
    """

    def __init__(self, optimizer: torch.optim.Optimizer, run: Run, scaler: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._run = run

    def step(self, closure: Any = None) -> None:
        self.gradient_state.is_xla_gradients_synced = True
        if not self.gradient_state.sync_gradients:
            return
        for plugin in self._run.plan.plugins:
            plugin.before_step(self.optimizer, self._run)
        super().step(closure)
        for plugin in self._run.plan.plugins:
            plugin.after_step(self.optimizer, self._run)
        self._run.backend.step_boundary()


class PreparedScheduler(AcceleratedScheduler):
    """A scheduler that advances by the number of ranks that see different data, not by the number of processes.

    Accelerate's convention: a schedule is written for one process, whose loader yields ``data_parallel_size`` times as
    many batches; so each step of the optimizer counts for that many.
    """

    def __init__(self, scheduler: Any, optimizers: Any, run: Run, **kwargs: Any) -> None:
        super().__init__(scheduler, optimizers, **kwargs)
        self._run = run

    def step(self, *args: Any, **kwargs: Any) -> None:
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
