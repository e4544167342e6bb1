"""Data parallelism of our own: averages gradients over the samples of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from neuron_accel.contract import (
    BufferBroadcast,
    Claim,
    GradientReducer,
    Phase,
    PluginSpec,
    PreparedModel,
    Run,
    StrategyPlugin,
    clip_by_norm,
    clip_by_value,
    gradient_parts,
)


@dataclass(frozen=True, kw_only=True)
class AveragingPlugin(StrategyPlugin):
    """Averages gradients, clips them, and broadcasts buffers.

    Args:
        bucket_mb: size of the buckets in MiB.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="averaging",
        phase=Phase.GRADIENTS,
        claims=frozenset({Claim.GRADIENT_REDUCTION, Claim.GRADIENT_CLIPPING}),
    )

    bucket_mb: float = 25.0

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        run.state(self).setdefault("reducers", []).append(GradientReducer(model, run, self.bucket_mb))
        run.state(self).setdefault("buffers", []).append(BufferBroadcast(model, run))

    def before_backward(self, loss: torch.Tensor, run: Run) -> torch.Tensor:
        if run.owner(Claim.BACKWARD) is None:  # else a pipeline has run the backward pass already
            for reducer in self.reducers(run):
                reducer.begin_backward()
        return loss

    def after_backward(self, run: Run) -> None:
        for reducer in self.reducers(run):
            reducer.end_backward()

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        self.finish(run)

    def after_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        for buffers in run.state(self).get("buffers", []):
            buffers.after_step()

    def clip_grad_norm(self, parameters, max_norm: float, norm_type: float, run: Run) -> torch.Tensor:
        self.finish(run)
        return clip_by_norm(gradient_parts(parameters, run), max_norm, norm_type, run)

    def clip_grad_value(self, parameters, clip_value: float, run: Run) -> None:
        self.finish(run)
        clip_by_value(gradient_parts(parameters, run), clip_value)

    def scale_gradients(self, parameters, factor: torch.Tensor, run: Run) -> None:
        self.finish(run)
        super().scale_gradients(parameters, factor, run)

    def full_gradient(self, parameter: torch.nn.Parameter, run: Run) -> torch.Tensor | None:
        for reducer in self.reducers(run):
            reducer.flush()
        return parameter.grad

    def after_reshape(self, model: PreparedModel, run: Run) -> None:
        for reducer in self.reducers(run):
            reducer.restart()

    def teardown(self, run: Run) -> None:
        for each in (*self.reducers(run), *run.state(self).get("buffers", [])):
            each.close()
        run.state(self).clear()

    def finish(self, run: Run) -> None:
        """Reduces what earlier passes have left, before gradients are used."""
        for reducer in self.reducers(run):
            reducer.before_step()

    def reducers(self, run: Run) -> list[GradientReducer]:
        return run.state(self).get("reducers", [])
