"""What ``prepare`` returns in place of optimizers and schedulers: Accelerate's own wrappers, told about the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch.optim.lr_scheduler import ReduceLROnPlateau

from neuron_accel.engine.optim.lazy_hyperparameters import as_device_data
from neuron_accel.errors import ParameterError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from neuron_accel.backends.base import Backend
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.sharding.parameters import ParameterRecord


# ---- What ``prepare`` returns in place of optimizers and schedulers: Accelerate's own wrappers, told about the run ---
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
        _move_state(optimizer)
        self._run, self._peers, self._gradients_complete = run, peers, gradients_complete
        self.released = False
        self._unheld: list[ParameterRecord] | None = None  # None before the first step
        # What Accelerate finds out anew at every step. LOMO optimizers update weights in the backward pass.
        self._is_plain = scaler is None and self.accelerator_state.distributed_type != DistributedType.XLA
        self._is_lomo = type(optimizer).__module__.partition(".")[0] == "lomo_optim"
        self._can_set_to_none = "set_to_none" in inspect.signature(optimizer.zero_grad).parameters
        self._take_part()

    def _take_part(self) -> None:
        run = self._run
        self.zero_grads = ZeroedGradients(run.backend, lambda: self.gradient_state.num_steps > 1)
        self._stepping = run.join.register("an optimizer step", self._step_along, settles=True)
        self._zeroing = run.join.register("zeroing gradients", self.optimizer.zero_grad)

    def step(self, closure: Any = None) -> None:
        self.gradient_state.is_xla_gradients_synced = True
        if not self.gradient_state.sync_gradients:
            return
        if self._unheld is None or any(record.trains for record in self._unheld):
            self._check_not_released()
            self._unheld = check_every_parameter_is_held(self, self._peers, self._run, later=self._unheld is not None)
        self._check_not_alone()
        if closure is not None and self._stepping.announced:
            raise UsageError(
                "An optimizer step with a closure is not possible here.",
                where="inside `join_uneven_inputs`",
                why="a rank without data cannot run the closure",
                fix="run forward and backward before `step()`",
            )
        self._gradients_complete()
        self._stepping()
        if closure is not None or self._may_step():
            for before_step in self._run.hooks["before_step"]:
                before_step(self.optimizer, self._run)
            with as_device_data(self.optimizer, self._run.backend):
                self._update(closure)
            for after_step in self._run.hooks["after_step"]:
                after_step(self.optimizer, self._run)
        self.zero_grads.prepare()
        self._run.backend.step_boundary()
        for after_boundary in self._run.hooks["after_boundary"]:
            after_boundary(self._run)

    def _check_not_alone(self) -> None:
        """Inside `no_sync` each rank steps by itself, which those that hold one model between them cannot.

        Raises:
            UsageError: on every rank.
        """
        for record in (r for model in self._run.models if not model.sync_enabled for r in model.parameters):
            axes = [axis for axis in record.layout.axes if axis in self._run.mesh.data_axes]
            if axes:
                raise UsageError(
                    "An optimizer step inside `no_sync` is not possible here.",
                    where=f"{record.fqn!r}, sharded over {', '.join(axes)}",
                    why="ranks would step each alone, and those along an axis of samples hold shards of one model: the "
                    "parameters that they have in common would drift apart, and LocalSGD would average the shards",
                    fix="leave LocalSGD out (enabled=False), or step outside of `no_sync`",
                )

    def _may_step(self) -> bool:
        """Whether no plugin wants this step skipped. A gradient scaler decides by itself."""
        if self.scaler is not None:
            return True
        allowed = [should_step(self.optimizer, self._run) for should_step in self._run.hooks["should_step"]]
        self._is_overflow = not all(allowed)  # read by Accelerate's schedulers and `step_was_skipped`
        return not self._is_overflow

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if self.gradient_state.sync_gradients:
            self._zeroing(*([] if set_to_none is None else [set_to_none]))
            if set_to_none is None and self._can_set_to_none:
                self.optimizer.zero_grad(set_to_none=True)
            else:
                super().zero_grad(set_to_none)
        if self.gradient_state.sync_gradients:
            self.zero_grads.begin()

    def release(self) -> None:
        """Another accelerator has taken the models over."""
        self.released, self._unheld = True, None

    def _check_not_released(self) -> None:
        if self.released:
            raise UsageError(
                "This optimizer's model has been prepared by another accelerator since.",
                where=type(self.optimizer).__name__,
                why="that one synchronises and saves the model now",
                fix="prepare model and optimizer again, with one accelerator",
            )

    def __getstate__(self) -> dict[str, Any]:
        """A copy knows its optimizer, and nothing of the run's other objects."""
        left_out = dict.fromkeys(("_peers", "_gradients_complete", "zero_grads", "_stepping", "_zeroing"))
        return _State({**super().__getstate__(), **left_out})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._peers, self._gradients_complete = [self], _nothing
        self._take_part()

    def _update(self, closure: Any) -> None:
        if not self._is_plain:
            super().step(closure)
        elif not self._is_lomo:
            self.optimizer.step(closure)

    def _step_along(self) -> None:
        """A step of the others, on a rank without data. Their loop has its own way to drop gradients; here the
        wrapper does it."""
        self.gradient_state._set_sync_gradients(True)
        self.step()
        self.optimizer.zero_grad()


def _move_state(optimizer: torch.optim.Optimizer) -> None:
    """Moves the state that an optimizer has from the start (Adagrad) to where its parameters are now; counters stay on
    the host."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if isinstance(value, torch.Tensor) and value.dim() and value.device.type == "cpu":
                entries[name] = value.to(parameter.device)


class _State(dict[str, Any]):
    """The state of a prepared optimizer. `xm.optimizer_step` looks for the groups in it, to average their gradients."""

    def __missing__(self, key: str) -> Any:
        if key != "param_groups":
            raise KeyError(key)
        raise UsageError(
            "`xm.optimizer_step` cannot step a prepared optimizer.",
            why="it averages gradients over all ranks, and these are reduced already, over those ranks that hold the "
            "same parameters",
            fix="write `optimizer.step()`",
        )


def _nothing() -> None:
    """Of a copy, whose gradients are not reduced."""


class Owner:
    """Who prepared a model. A copy of the model was not prepared.

    Args:
        accelerator: the accelerator.
    """

    def __init__(self, accelerator: Any = None) -> None:
        self.accelerator = accelerator

    def __reduce__(self) -> tuple[type[Owner], tuple[()]]:
        return Owner, ()


class PreparedScheduler(AcceleratedScheduler):
    """A scheduler that advances by the number of ranks that see different data, not by the number of processes.

    Accelerate's convention: a schedule is written for one process, whose loader yields ``data_parallel_size`` times as
    many batches; so each step of the optimizer counts for that many.

    A scheduler that is given a metric (``ReduceLROnPlateau``) counts metrics, not batches: a call is one of them on
    however many ranks, and it is the mean over ranks where theirs differ, so that all have the same learning rate.
    Such a call is collective.

    Args:
        scheduler: any scheduler of torch, or one with its interface.
        optimizers: the prepared optimizers it advances with.
        run: the run.
        accumulating: whether the loop is inside ``accumulate``.
        kwargs: of Accelerate's.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, run: Run, *, accumulating: Callable[[], bool], **kwargs: Any
    ) -> None:
        super().__init__(scheduler, optimizers, **kwargs)
        self._run, self._accumulating = run, accumulating
        self._takes_metric = isinstance(scheduler, ReduceLROnPlateau)
        self._stepping = run.join.register("a scheduler step", self._step_along)

    def __getstate__(self) -> dict[str, Any]:
        """A copy knows its scheduler and optimizers, and no loop."""
        return {**self.__dict__, "_accumulating": None, "_stepping": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._accumulating = bool  # False
        self._stepping = self._run.join.register("a scheduler step", self._step_along)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._takes_metric:
            self._step_with_metric(*args, **kwargs)
            return
        if not self.step_with_optimizer or self.gradient_state.sync_gradients:
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
        for _ in range(1 if self.split_batches else self._run.data_parallel_size):
            # A one-cycle schedule refuses to go past its end, which a ragged last batch can make it do.
            total = getattr(self.scheduler, "total_steps", None)
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def _step_with_metric(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        """Inside ``accumulate`` a metric counts where the optimizer steps; elsewhere, after an evaluation for one,
        each counts."""
        if self.step_with_optimizer and self._accumulating() and not self.gradient_state.sync_gradients:
            return
        metric = float(metrics)
        self._stepping((None, *args), kwargs)
        self.scheduler.step(self._agreed(metric), *args, **kwargs)

    def _agreed(self, metric: float | None) -> float:
        """The mean over the ranks that have one; collective."""
        world = self._run.world
        everyone = [metric] if world.size == 1 else self._run.backend.all_gather_object(metric, world)
        known = [value for value in everyone if value is not None]
        return known[0] if all(value == known[0] for value in known) else sum(known) / len(known)

    def _step_along(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A step of the others, on a rank without data, and so without a metric of its own."""
        self.gradient_state._set_sync_gradients(True)
        if self._takes_metric:
            self.scheduler.step(self._agreed(None), *args[1:], **kwargs)
        else:
            self.step(*args, **kwargs)


def _count_call(scheduler: Any) -> None:
    """Counts a call that leads to no step, as Accelerate does, where a scheduler counts its calls: those that consist
    of others do not, but the others may."""
    if hasattr(scheduler, "_step_count"):
        scheduler._step_count += 1


# ---- Gradients that begin as zeros, where micro-batches accumulate on a device that compiles -------------------------
# The first micro-batch of a step finds no gradients and the second finds some: two graphs, and another for the step
# at the end of an epoch that consists of one micro-batch. With zeros in their place every micro-batch adds to what is
# there, and all are one graph. The zeros of a step are made in the graph of the step before, so they cost no
# execution; only the first ones are sent to the device.
class ZeroedGradients:
    """Zeros for the parameters of one optimizer. Does nothing on eager devices, and without accumulation.

    Args:
        backend: of the run.
        accumulates: says whether steps consist of several micro-batches.
    """

    def __init__(self, backend: Backend, accumulates: Callable[[], bool]) -> None:
        self._lazy, self._accumulates = backend.is_lazy, accumulates
        self._zeros: dict[nn.Parameter, torch.Tensor] = {}
        self._arrived: set[torch.Tensor] = set()
        self._watched: dict[nn.Parameter, torch.utils.hooks.RemovableHandle] = {}

    def first(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before a backward pass: those that have no gradient and never had zeros get some."""
        if not self._on:
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived.add)
                if parameter.grad is None:
                    parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype).to(parameter.device)

    def complete(self) -> None:
        """After a backward pass: a parameter that was not used has no gradient, rather than zeros."""
        for parameter in self._watched:
            if parameter not in self._arrived:
                parameter.grad = None

    def prepare(self) -> None:
        """At the end of a step, before its graph is executed: zeros for the next one."""
        if self._on:
            self._zeros = {p: torch.zeros_like(p, requires_grad=False) for p in self._watched}

    def begin(self) -> None:
        """Gradients were dropped."""
        for parameter, zeros in self._zeros.items():
            parameter.grad = zeros
        self._zeros = {}
        self._arrived.clear()

    def close(self) -> None:
        for handle in self._watched.values():
            handle.remove()
        self._watched.clear()

    @property
    def _on(self) -> bool:
        return self._lazy and self._accumulates()


# ---- Parameters that train and that no optimizer holds: they would receive gradients but never change -------
def check_every_parameter_is_held(
    optimizer: torch.optim.Optimizer, others: Iterable[torch.optim.Optimizer], run: Run, *, later: bool
) -> list[ParameterRecord]:
    """Checks the models that ``optimizer`` trains, at its first step, when every optimizer of the run is known, and
    again when a parameter that no optimizer held begins to train.

    Frozen parameters (``requires_grad=False``) need no optimizer, and models of which no optimizer holds a
    parameter are not checked.

    Args:
        later: whether this is not the first step.

    Returns:
        the frozen parameters of these models that no optimizer holds.

    Raises:
        ParameterError: if one of these models has a trainable parameter that no prepared optimizer holds.
    """
    held = {p for each in (optimizer, *others) for group in each.param_groups for p in group["params"]}
    mine = {p for group in optimizer.param_groups for p in group["params"]}
    unheld: list[ParameterRecord] = []
    for model in run.models:
        if not any(record.current in mine for record in model.parameters):
            continue
        missing = [r for r in model.parameters if r.current is not None and r.current not in held]
        if later:  # one that is unfrozen under the name that another rank has for it is stepped there
            missing = [r for r in missing if not r.completed_late]
        unheld += missing
        orphans = [record.fqn for record in missing if record.trains]
        if orphans:
            shown = ", ".join(orphans[:3]) + (f" and {len(orphans) - 3} more" if len(orphans) > 3 else "")
            raise ParameterError(
                f"No optimizer holds {shown}.",
                where=f"{type(model.original).__name__}, step of {type(optimizer.optimizer).__name__}"  # type: ignore[attr-defined]
                f", rank {run.backend.rank}",
                why="they require gradients, which would be computed and sent at every step and never used",
                fix="give them to an optimizer (`add_param_group` for those that are unfrozen later), prepare that "
                "optimizer before the first step, or freeze them with requires_grad_(False)",
            )
    return unheld
