"""The ZeRO-1 strategy: configuration, and the responsibilities that it owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import nn

from neuron_accel.contract import (
    Claim,
    ConfigurationError,
    GradientReducer,
    Phase,
    PlanError,
    PluginSpec,
    StrategyPlugin,
    UsageError,
    clip_coefficient,
    global_norm,
    is_separable,
    unsharded_gradients,
    why_not_elementwise,
)
from neuron_accel.strategies.zero1.optimizer import Zero1Optimizer, refuse_closures, scale_parts

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run


@dataclass(frozen=True, kw_only=True)
class Zero1Plugin(StrategyPlugin):
    """Divides optimizer state and master weights over data-parallel ranks.

    Gradients are reduce-scattered in flat buckets, each rank updates its share, weights are gathered.

    To a loop, ``parameter.grad`` is the reduced gradient from the end of the backward pass until gradients are zeroed,
    to be read, changed, replaced or dropped as under plain data parallelism. Its values are gathered when they are
    read, which costs a message and the memory, and is collective: every rank reads the same ones in the same order.

    Args:
        optimizer_dtype: dtype of master weights and optimizer state, which are at least as wide as their parameter:
            those of a float64 parameter are float64, those of a complex one complex. Parameters of another dtype
            keep it in the model.
        max_norm: gradients are clipped to this global norm at every step; None: only where the loop says so.
        use_grad_acc_hook: gradients are reduced after every micro-batch and accumulate as this rank's share, in
            ``optimizer_dtype``: a rank never holds all accumulated gradients, at the price of sending each time. Off,
            they accumulate whole and are sent once per step.
        higher_cc_precision: gradients travel and are summed in ``optimizer_dtype`` instead of their own dtype.
        bucket_cap_mb: largest size of a bucket in MiB, but for a parameter that is larger. A small model's are smaller.
        partition: "even" cuts through parameters, for optimizers that treat elements alike; "parameters" keeps each
            whole, for those that look at a parameter's norm or shape.
        save_master_weights: whether checkpoints contain the master weights where these are not the parameters
            themselves; without them, a resumed run starts from the rounded parameters.
        overlap: whether buckets are sent while the backward pass still runs, or all at its end. Those of several
            optimizers are sent at its end: ranks could complete them in different orders.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="zero1",
        phase=Phase.OPTIMIZER,
        claims=frozenset({Claim.GRADIENT_REDUCTION, Claim.GRADIENT_CLIPPING, Claim.OPTIMIZER_STATE}),
    )

    optimizer_dtype: torch.dtype = torch.float32
    max_norm: float | None = None
    use_grad_acc_hook: bool = False
    higher_cc_precision: bool = False
    bucket_cap_mb: float = 25.0
    partition: Literal["even", "parameters"] = "even"
    save_master_weights: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.max_norm is not None and self.max_norm <= 0:
            raise ConfigurationError(
                f"max_norm is {self.max_norm}; it must be positive.", fix="leave it out not to clip"
            )
        if self.bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be positive.")
        if self.partition not in ("even", "parameters"):
            raise ConfigurationError(f"partition is {self.partition!r}; it is 'even' or 'parameters'.")
        if not self.optimizer_dtype.is_floating_point:
            raise ConfigurationError(f"optimizer_dtype is {self.optimizer_dtype}; it must be a floating-point dtype.")

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Averages the gradients that no optimizer shards."""
        averager = GradientReducer(model, run, self.bucket_cap_mb)
        run.state(self).setdefault("averagers", []).append(averager)

    def before_reshape(self, model: PreparedModel | None, run: Run) -> None:
        """Refuses new shapes once optimizer state is sharded."""
        if self._optimizers(run):
            raise UsageError(
                "Parameters cannot get other shapes now.",
                where="plugin 'zero1'",
                why="an optimizer was prepared, whose state is divided over ranks by their shapes",
                fix="resize the model between its `prepare` and that of the optimizer",
            )

    def after_reshape(self, model: PreparedModel | None, run: Run) -> None:
        """Makes buckets for the new shapes."""
        for averager in run.state(self).get("averagers", []):
            averager.restart()

    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Shards optimizer state and master weights."""
        refuse_closures(optimizer)
        if self.partition == "parameters" and run.backend.is_lazy:
            raise PlanError(
                "Ranks that hold different parameters run different graphs.",
                where=f"plugin 'zero1', partition='parameters', backend {run.backend.name!r}",
                why="this device compiles one graph for all ranks",
                fix="use partition='even', with an optimizer that treats the elements of a parameter alike",
            )
        if not is_separable(optimizer):
            raise PlanError(
                f"{type(optimizer).__name__} looks at all parameters together (or draws random numbers), and under "
                "ZeRO-1 each rank updates some of them only.",
                where="plugin 'zero1'",
                why="a norm over all of them, or an estimate of the best learning rate, would differ between ranks",
                fix="train without ZeRO-1, or choose an optimizer that updates every parameter by itself",
            )
        reason = why_not_elementwise(optimizer) if self.partition == "even" else None
        if reason is not None:
            raise PlanError(
                f"{type(optimizer).__name__} does not treat the elements of a parameter alike, and ZeRO-1 would cut "
                "parameters in pieces.",
                where="plugin 'zero1', partition='even'",
                why=reason,
                fix="use Zero1Plugin(partition='parameters')",
            )
        sharded = Zero1Optimizer(
            optimizer,
            run,
            self,
            others=[averager.leave for averager in self._averagers(run)],
        )
        run.state(self).setdefault("optimizers", []).append(sharded)
        for averager in self._averagers(run):
            averager.leave(p for group in sharded.param_groups for p in group["params"])
        return sharded

    def after_backward(self, run: Run) -> None:
        """Waits for gradients to be reduce-scattered."""
        for averager in self._averagers(run):
            averager.end_backward()
        for optimizer in self._optimizers(run):
            optimizer.finish_backward()

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        """Takes over state that was written from outside."""
        for sharded in self._optimizers(run):
            sharded.take_over()

    def clip_grad_norm(
        self, parameters: list[nn.Parameter], max_norm: float, norm_type: float, run: Run
    ) -> torch.Tensor:
        """Scales this rank's shards by the global norm."""
        parts = [part for optimizer in self._flushed(run) for part in optimizer.gradient_parts(parameters)]
        parts += unsharded_gradients(self._undivided(parameters, run), run)  # of models that no optimizer divides
        norm = global_norm(parts, run, norm_type)
        scale_parts(parts, clip_coefficient(norm, max_norm))
        return norm

    def clip_grad_value(self, parameters: list[nn.Parameter], clip_value: float, run: Run) -> None:
        """Clamps the elements of this rank's shards."""
        parts = [part for optimizer in self._flushed(run) for part in optimizer.gradient_parts(parameters)]
        for part in (*parts, *unsharded_gradients(self._undivided(parameters, run), run)):
            if part.tensor is not None:
                part.tensor.clamp_(-clip_value, clip_value)

    def scale_gradients(self, parameters: list[nn.Parameter], factor: torch.Tensor, run: Run) -> None:
        """Multiplies this rank's shards."""
        parts = [part for optimizer in self._flushed(run) for part in optimizer.gradient_parts(parameters)]
        for part in (*parts, *unsharded_gradients(self._undivided(parameters, run), run)):
            if part.tensor is not None:
                part.tensor.mul_(factor)

    def full_gradient(self, parameter: nn.Parameter, run: Run) -> torch.Tensor | None:
        """Gathers the gradient from its shards."""
        for optimizer in self._flushed(run):
            if any(parameter is candidate for shard in optimizer.shards for candidate in shard.parameters):
                return optimizer.full_gradient(parameter)
        return parameter.grad

    def teardown(self, run: Run) -> None:
        """Stops watching backward and drops gradients."""
        for averager in self._averagers(run):
            averager.close()
        for optimizer in self._optimizers(run):
            optimizer.close()
        run.state(self).clear()

    def _optimizers(self, run: Run) -> list[Zero1Optimizer]:
        return run.state(self).get("optimizers", [])

    def _averagers(self, run: Run) -> list[GradientReducer]:
        """What averages the gradients that no optimizer divides: of a model prepared without one, say."""
        return run.state(self).get("averagers", [])

    def _undivided(self, parameters: list[nn.Parameter], run: Run) -> list[nn.Parameter]:
        divided = {p for optimizer in self._optimizers(run) for shard in optimizer.shards for p in shard.parameters}
        return [p for p in parameters if p not in divided]

    def _flushed(self, run: Run) -> list[Zero1Optimizer]:
        for averager in self._averagers(run):
            averager.flush()
        for optimizer in self._optimizers(run):
            optimizer.flush()
        return self._optimizers(run)
