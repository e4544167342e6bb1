# SPDX-License-Identifier: Apache-2.0
"""The plugin: options, the axis of islands, and the hooks in which the outer loop acts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from neuron_accel.contract import AxisKind, AxisSpec, Phase, PlanContext, PluginSpec, StrategyPlugin, import_object
from neuron_accel.errors import ConfigurationError, PlanError, UsageError, did_you_mean
from neuron_accel_local_sgd.outer import AXIS, WHERE, OuterLoop, Schedule, check_steps_alone

if TYPE_CHECKING:
    from neuron_accel import NeuronAccelerator
    from neuron_accel.contract import PreparedModel, Run


@dataclass(frozen=True, kw_only=True)
class LocalSGDPlugin(StrategyPlugin):
    """Islands of ranks train independently, and synchronise every ``inner_steps`` steps.

    The difference between the weights after the last synchronisation and the current ones, averaged over islands, is
    then the gradient of one step of an outer optimizer, and all islands continue with the result. With the default, SGD
    with a learning rate of 1, that is the mean of their weights: local SGD. With Nesterov momentum it is DiLoCo.

    Args:
        islands: number of islands; the other ranks are divided among them.
        inner_steps: number of optimizer steps between two synchronisations.
        outer_optimizer: name of an optimizer of ``torch.optim``, or ``"package.module:Class"``.
        outer_options: its arguments, as a mapping; None: ``{"lr": 1.0}``, for SGD only.
        warmup_steps: number of first steps after each of which weights are averaged, as in post-local SGD.
        wire: dtype in which differences are sent: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        fragments: number of fragments of the model, which synchronise one after another, ``inner_steps / fragments``
            steps apart, so that less is sent at once.
        delay: number of inner steps between sending differences and using their mean, during which the exchange
            overlaps with training; less than ``inner_steps``.
        local_weight: fraction of an island's own weights in those with which it continues after an outer step, from 0
            to less than 1; the rest is that of the synchronised weights.

    Raises:
        ConfigurationError: if a value is not possible, or the outer optimizer cannot be created.

    Sources: Stich, "Local SGD Converges Fast and Communicates Little" (2018, arXiv:1805.09767); Lin et al., "Don't Use
    Large Mini-Batches, Use Local SGD" (2018, arXiv:1808.07217); Douillard et al., "DiLoCo: Distributed
    Low-Communication Training of Language Models" (2023, arXiv:2311.08105) and "Streaming DiLoCo with overlapping
    communication" (2025, arXiv:2501.18512).
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="local_sgd", api_version=4, phase=Phase.OPTIMIZER, after=frozenset({"zero1"})
    )

    islands: int
    inner_steps: int
    outer_optimizer: str = "SGD"
    outer_options: Mapping[str, Any] | None = None
    warmup_steps: int = 0
    wire: Literal["float32", "bfloat16", "int8"] = "float32"
    fragments: int = 1
    delay: int = 0
    local_weight: float = 0.0

    def __post_init__(self) -> None:
        for option in ("islands", "inner_steps", "fragments"):
            if getattr(self, option) < 1:
                raise ConfigurationError(f"{option} is {getattr(self, option)}; it must be at least 1.", where=WHERE)
        if self.warmup_steps < 0 or not 0 <= self.local_weight < 1:
            raise ConfigurationError(
                f"warmup_steps={self.warmup_steps} and local_weight={self.local_weight} are not possible.",
                where=WHERE,
                fix="choose at least 0 steps, and a weight from 0 to less than 1",
            )
        if not 0 <= self.delay < self.inner_steps or self.fragments > self.inner_steps:
            raise ConfigurationError(
                f"delay={self.delay} and fragments={self.fragments} are not possible with "
                f"inner_steps={self.inner_steps}.",
                where=WHERE,
                why="a fragment must arrive before it is sent again, and at most one is sent after each step",
                fix="choose a delay from 0 to less than inner_steps, and at most inner_steps fragments",
            )
        if self.outer_options is None and self.outer_optimizer != "SGD":
            raise ConfigurationError(
                f"{self.outer_optimizer} needs outer_options.",
                where=WHERE,
                why="a learning rate that suits gradients rarely suits differences of weights",
                fix='write outer_options={"lr": ...}',
            )
        check_steps_alone(self._make_outer([nn.Parameter(torch.zeros(2, 2))]))

    # ---- planning ----------------------------------------------------------------------------------------------------
    def axes(self) -> tuple[AxisSpec, ...]:
        return (AxisSpec(name=AXIS, degree=self.islands, kind=AxisKind.REPLICA),)

    def validate(self, context: PlanContext) -> None:
        """Refuses an overlap on devices without one."""
        if self.delay and "async" not in context.capabilities:
            raise PlanError(
                f"delay={self.delay} is not possible on this device.",
                where=WHERE,
                why="nothing overlaps with its collectives, so differences would be used later for nothing",
                fix="leave delay out",
            )

    # ---- a run -------------------------------------------------------------------------------------------------------
    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Adds an outer loop for this optimizer."""
        for model in run.models:  # creates the groups, in the same order on every rank, whatever parameters it holds
            for record in model.parameters:
                run.group(*record.reduction_axes(run.mesh))
        schedule = Schedule(
            inner_steps=self.inner_steps,
            fragments=self.fragments,
            delay=self.delay,
            local_weight=self.local_weight,
            warmup_steps=self.warmup_steps,
            wire=self.wire,
        )
        self.loops(run).append(OuterLoop(optimizer, self._make_outer, schedule, run))
        return optimizer

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Before the first step: takes the weights that all islands have as anchors. Synchronises what is due."""
        self._loop_of(optimizer, run).before_step()
        yield
        self._loop_of(optimizer, run).after_step()

    def reshape(self, model: PreparedModel, run: Run) -> Iterator[None]:
        """Refuses new shapes once anchors have the old ones."""
        if any(loop.steps for loop in self.loops(run)):
            raise UsageError(
                "Parameters cannot change their shapes here.",
                where=WHERE,
                why="the outer optimizer has state of the old shapes",
                fix="resize them before the first step",
            )
        yield

    def explain_model(self, model: PreparedModel, run: Run, *, tokens: int | None = None) -> str:
        every = f"every {self.inner_steps} steps" if self.inner_steps > 1 else "every step"
        parts = f", in {self.fragments} fragments" if self.fragments > 1 else ""
        text = f"local SGD: {self.islands} islands, an outer step of {self.outer_optimizer} {every}{parts}, {self.wire}"
        at = next((at for at, each in enumerate(run.models) if each is model), -1)
        return "\n".join([text, *(line for line in (loop.describe(at) for loop in self.loops(run)) if line)])

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def save(self, run: Run) -> dict[str, Any]:
        """Waits for what is under way; it is saved, and used when it is due."""
        for loop in self.loops(run):
            loop.wait()
        return {
            f"optimizer{at}.{key}": value
            for at, loop in enumerate(self.loops(run))
            for key, value in loop.state().items()
        }

    def load(self, state: dict[str, Any], run: Run) -> None:
        """Starts anew from the loaded weights, if the checkpoint has no state of an outer loop."""
        for at, loop in enumerate(self.loops(run)):
            prefix = f"optimizer{at}."
            mine = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            if mine:
                loop.load(mine)
            else:
                loop.restart()

    # ---- helpers -----------------------------------------------------------------------------------------------------
    def loops(self, run: Run) -> list[OuterLoop]:
        """The outer loops of a run, one for each prepared optimizer, in their order."""
        return run.state(self).setdefault("loops", [])

    def _loop_of(self, optimizer: torch.optim.Optimizer, run: Run) -> OuterLoop:
        return next(loop for loop in self.loops(run) if loop.optimizer is optimizer)

    def _make_outer(self, anchors: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
        options = {"lr": 1.0} if self.outer_options is None else dict(self.outer_options)
        try:
            return _optimizer_class(self.outer_optimizer)(anchors, **options)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{self.outer_optimizer} does not accept these outer_options: {error}",
                where=WHERE,
                fix="compare them with its arguments",
            ) from error


def synchronize(accelerator: NeuronAccelerator) -> None:
    """Makes all islands equal now: completes pending exchanges, and takes an outer step with the changes of islands
    since the last one. Does nothing if they are equal already. Call it at the end of training, before a model is
    evaluated or saved. Collective.

    Args:
        accelerator: the accelerator, with a :class:`LocalSGDPlugin`.

    Raises:
        UsageError: if the accelerator has no such plugin.
    """
    run = accelerator.run
    plugin = next((plugin for plugin in run.plan.plugins if isinstance(plugin, LocalSGDPlugin)), None)
    if plugin is None:
        raise UsageError("This accelerator has no LocalSGDPlugin.", where="synchronize", fix="pass one to it")
    for loop in plugin.loops(run):
        loop.synchronize()


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    if ":" in name:
        found = import_object(name, f"outer_optimizer {name!r}")
    else:
        found = getattr(torch.optim, name, None)
        if found is None:
            known = [each for each, value in vars(torch.optim).items() if isinstance(value, type)]
            raise ConfigurationError(
                f"There is no optimizer {name!r} in torch.optim.", where=WHERE, fix=did_you_mean(name, known)
            )
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigurationError(
            f"{name!r} is not a torch.optim.Optimizer.",
            where=WHERE,
            fix='name a class of torch.optim, or "package.module:Class"',
        )
    return found
