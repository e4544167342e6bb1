# SPDX-License-Identifier: Apache-2.0
"""Detects gradients with NaN or infinity, and raises an error, skips the step or warns."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from neuron_accel.contract import Phase, PlanContext, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError, NonFiniteError, PlanError

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run

ACTIONS = ("raise", "skip", "warn")
_SHOWN = 4


class NonFiniteWarning(UserWarning):
    """A step whose gradients contained NaN or infinity."""


@dataclass(frozen=True, kw_only=True)
class FiniteGuard(StrategyPlugin):
    """Detects gradients that contain NaN or infinity, names the ranks, the step and the first parameter, and raises a
    :class:`~neuron_accel.errors.NonFiniteError` on every rank, skips the step on every rank, or only warns.

    Each rank checks the gradients of its own backward passes before they are summed over ranks: afterwards every rank
    has the NaN, and after clipping every parameter. The first parameter is the first in the order of the backward pass,
    which is closest to the cause. Changes that a loop makes to gradients after the backward pass are not checked. For
    each step ranks all-reduce one number.

    A skipped step leaves weights, optimizer state and learning-rate schedules as they are
    (``optimizer.step_was_skipped`` is true); :meth:`skipped` counts them, and checkpoints store the count. The guard
    does nothing with a gradient scaler (fp16), which itself decides whether to step, nor if ``step`` receives a
    closure, which computes the gradients only then.

    On a lazy device (XLA) the check is part of the step's graph and its result is read once, after the step has been
    executed: the reported step, ranks and parameter are exact, but ``"raise"`` comes after the weights were updated, so
    continue from a checkpoint. ``"skip"`` would need the result before, and raises an error there. On other devices the
    result is read before the update; on an accelerator this is one synchronisation in each step.

    Args:
        action: ``"raise"``, ``"skip"`` or ``"warn"`` (a :class:`NonFiniteWarning` on the first rank, and the step is
            taken). ``"skip"`` warns, too.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="finite_guard",
        api_version=4,
        phase=Phase.OPTIMIZER,
        provides=frozenset({"looks-at-values", "weights-in-passes"}),
    )

    action: Literal["raise", "skip", "warn"] = "raise"

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigurationError(f"action is {self.action!r}.", fix="give 'raise', 'skip' or 'warn'")

    def skipped(self, run: Run) -> int:
        """Number of steps skipped so far."""
        return self._watch(run).skipped

    def validate(self, context: PlanContext) -> None:
        if self.action == "skip" and "lazy" in context.capabilities:
            raise PlanError(
                "Steps cannot be skipped on this device.",
                where="plugin 'finite_guard', action='skip'",
                why="the step is one graph, which is executed before the check that is part of it can be read",
                fix="use action='raise' and continue from a checkpoint, or action='warn'",
            )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Watches the gradients of trained parameters."""
        watch = self._watch(run)

        def follow(*_: Any) -> None:  # a parameter can be unfrozen at any time
            watch.follow(record.current for record in model.parameters if record.current is not None)

        follow()
        run.undo(model.module.register_forward_pre_hook(follow).remove)

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Checks the loss."""
        self._watch(run).losses.append(_is_bad(loss.detach()))
        yield

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[bool | None]:
        """Checks that loss and gradients are finite on all ranks; on a lazy device once it has computed them."""
        if run.may_skip:
            check = self._watch(run).check(optimizer, run)
            if run.backend.is_lazy:
                run.backend.after_step(partial(self._decide, check, run), reads_graph=True)
            elif not self._decide(check, run):
                yield False
        yield None

    def save(self, run: Run) -> dict[str, Any]:
        """Saves the numbers of steps taken and skipped."""
        watch = self._watch(run)
        return {"skipped": watch.skipped, "steps": list(watch.steps.values())}

    def load(self, state: dict[str, Any], run: Run) -> None:
        """Restores the numbers of steps taken and skipped."""
        watch = self._watch(run)
        if state:
            watch.skipped, watch.loaded = int(state["skipped"]), [int(count) for count in state["steps"]]
            watch.steps.clear()

    def _watch(self, run: Run) -> GradientWatch:
        state = run.state(self)
        if "watch" not in state:
            state["watch"] = GradientWatch(run.backend.is_lazy, run.backend.number(0.0), run.undo)
        return state["watch"]

    def _decide(self, check: Check, run: Run) -> bool:
        """Reads the result of the check and returns whether the step is taken. Collective."""
        if not float(run.backend.to_host(check.result)):
            return True
        error = describe(check, run)
        if self.action == "raise":
            raise error
        watch = self._watch(run)
        watch.skipped += self.action == "skip"
        done = f"The step is skipped, {watch.skipped} so far." if self.action == "skip" else "The step is taken."
        if run.backend.rank == 0:
            warnings.warn(
                f"{error.what} {done}\n  where: {error.where}\n  fix: {error.fix}", NonFiniteWarning, stacklevel=4
            )
        return self.action != "skip"


@dataclass(frozen=True)
class Check:
    """The gradients of one step.

    Args:
        step: number of the step of this optimizer, from 1.
        result: above 0 if a gradient on any rank is not finite; 0-dim.
        parameters: the parameters of this rank that received a gradient, in the order of the backward pass.
        flags: for each of them, 1.0 if its gradient is not finite, else 0.0, [len(parameters)]; None if there are none.
        losses: above 0 if a loss of this rank since the last step is not finite; 0-dim; None if there was no loss.
    """

    step: int
    result: torch.Tensor
    parameters: list[nn.Parameter]
    flags: torch.Tensor | None
    losses: torch.Tensor | None


@dataclass
class GradientWatch:
    """Checks the gradients of one rank in hooks of its parameters.

    Args:
        lazy: whether the device is lazy; then steps with the same number of micro-batches must be the same graph.
        zero: 0.0 on the device, as an input of the graph rather than a constant; 0-dim.
    """

    lazy: bool
    zero: torch.Tensor
    undo: Callable[[Callable[[], object]], None]
    skipped: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    """Steps of each optimizer, by its identity, in the order of their first steps."""
    loaded: list[int] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    _watched: set[nn.Parameter] = field(default_factory=set)
    _flags: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Registers hooks on parameters that train and have none yet."""
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._watched:
                self._watched.add(parameter)
                self.undo(parameter.register_hook(self._looker(parameter)).remove)

    def _looker(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        # A tensor hook receives the added gradient before hooks of the accumulated gradient, which may move it.
        def look(gradient: torch.Tensor) -> None:
            flag = _is_bad(gradient.detach())
            before = self._flags.pop(parameter, self.zero if self.lazy else None)
            if parameter.grad is not None and before is not None:  # it accumulates
                flag = torch.maximum(flag, before)
            self._flags[parameter] = flag

        return look

    def check(self, optimizer: torch.optim.Optimizer, run: Run) -> Check:
        """Returns the check of an optimizer's gradients since its last step; its result is equal on all ranks.
        Collective."""
        mine = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        parameters = [parameter for parameter in self._flags if parameter in mine]
        flags = torch.stack([self._flags.pop(parameter) for parameter in parameters]) if parameters else None
        result = self.zero.clone() if flags is None else flags.max()
        if run.world.size > 1:
            result = run.backend.all_reduce(result, run.world, "max")
        losses, self.losses = self.losses, []
        step = self.steps.get(id(optimizer))
        if step is None:
            step = self.loaded[len(self.steps)] if len(self.steps) < len(self.loaded) else 0
        self.steps[id(optimizer)] = step + 1
        return Check(step + 1, result, parameters, flags, torch.stack(losses).max() if losses else None)


def describe(check: Check, run: Run) -> NonFiniteError:
    """Returns the error for a step with gradients that are not finite, the same on every rank. Collective."""
    names = []
    if check.flags is not None:
        flags = run.backend.to_host(check.flags).tolist()
        names = [_name(p, run) for p, flag in zip(check.parameters, flags, strict=True) if flag]
    is_loss_bad = check.losses is not None and bool(run.backend.to_host(check.losses))
    everyone = run.backend.all_gather_object((names[:1], len(names), len(check.parameters), is_loss_bad), run.world)
    guilty = [(rank, *found) for rank, found in enumerate(everyone) if found[0]]
    where = [
        f"rank {rank}: first {first!r}, in all {count} of {total} parameters"
        + (", and the loss" if loss_too else "; its loss is finite")
        for rank, (first,), count, total, loss_too in guilty[:_SHOWN]
    ]
    more = f"; and {len(guilty) - _SHOWN} more ranks" if len(guilty) > _SHOWN else ""
    ranks = ", ".join(str(rank) for rank, *_ in guilty[:_SHOWN])
    return NonFiniteError(
        f"Gradients of step {check.step} are not finite on rank{'s' if len(guilty) > 1 else ''} {ranks}: first that of "
        f"{guilty[0][1][0]!r}.",
        where="; ".join(where) + more,
        why="summed over ranks and clipped, one NaN makes every weight of every rank NaN",
        fix="check that rank's batch of this step (a log or a root of 0, a mean over no elements, an overflow), or "
        "lower the learning rate; FiniteGuard(action='skip') skips such steps",
    )


def _is_bad(values: torch.Tensor) -> torch.Tensor:
    """Returns 1.0 if some of ``values`` are NaN or infinite, else 0.0; 0-dim, without reading a value on a device."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    if values.device.type == "cpu" and bool(torch.isfinite(values.sum())):  # ten times faster, and enough if finite
        return torch.zeros(())
    return torch.isfinite(values).all().logical_not().float()


def _name(parameter: nn.Parameter, run: Run) -> str:
    record = run.find_parameter(parameter)
    return record.fqn if record is not None else f"a parameter of shape {tuple(parameter.shape)}"
