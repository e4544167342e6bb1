"""An observer: it measures how noisy gradients are while a model trains, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from neuron_accel.contract import (
    Claim,
    ParameterRecord,
    Phase,
    PluginSpec,
    PreparedModel,
    Run,
    StrategyPlugin,
    global_norm,
    gradient_parts,
)


@dataclass(frozen=True, kw_only=True)
class GradientNoise(StrategyPlugin):
    """Estimates the gradient noise scale: the number of samples in a batch up to which a larger one pays off.

    The mean gradient of n micro-batches has a squared norm of G + S / n on average, S being their variance. That of one
    micro-batch and that of a step, in which n = data-parallel ranks x accumulated micro-batches, give both.

    Args:
        micro_batch_size: samples in a micro-batch of one rank.
        decay: weight of the earlier estimates of S and G in their moving averages.

    Source: McCandlish et al., "An Empirical Model of Large-Batch Training" (2018, arXiv:1812.06162), appendix A.1.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="gradient_noise",
        api_version=4,
        phase=Phase.OPTIMIZER,
        after=frozenset({"zero1", "fully_sharded"}),  # which have then reduced the gradients
        refines=frozenset({Claim.GRADIENT_REDUCTION}),  # its owner knows their norm
        provides=frozenset({"gathered-weights"}),  # works with fully sharded weights: it reads none
        conflicts=frozenset({"axis:cp", "axis:ep"}),  # a rank's gradient is not that of its own samples there
    )

    micro_batch_size: int
    decay: float = 0.95

    def setup(self, run: Run) -> None:
        moments = torch.zeros(2, device=run.device)  # of S and G; here, so that the first step has the graph of all
        run.state(self).update(moments=moments, squares={})

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        state = run.state(self)
        for record in model.parameters:
            if record.current is not None and record.trains:
                state["squares"][record.current] = []
                run.undo(record.current.register_hook(partial(self.observe, record, run)).remove)

    def observe(self, record: ParameterRecord, run: Run, gradient: torch.Tensor) -> None:
        """The gradient of one micro-batch, before it is accumulated and reduced."""
        if record.partial_axes:
            gradient = run.backend.all_reduce(gradient.clone(), run.group(*record.partial_axes))
        run.state(self)["squares"][record.current].append(gradient.detach().float().square().sum())

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        yield
        state, ranks = run.state(self), run.group(*run.mesh.gradient_axes)
        if not all(model.synchronises for model in run.models):
            return  # more micro-batches follow
        run.join.collective_only("GradientNoise")  # says so if a rank has run out of data
        count = max((len(squares) for squares in state["squares"].values()), default=1)
        zero = torch.zeros((), device=run.device)
        norms = {p: torch.stack(squares).sum().sqrt() if squares else zero for p, squares in state["squares"].items()}
        for squares in state["squares"].values():
            squares.clear()
        parts = gradient_parts(norms, run, norms)
        # Each was divided by `count`, the number of micro-batches of a step.
        one = run.backend.all_reduce(global_norm(parts, run) ** 2 * count, ranks) / ranks.size
        mean, n = run.gradients.norm(state["squares"]) ** 2, count * ranks.size
        estimates = torch.stack([(one - mean) * n / max(n - 1, 1), (n * mean - one) / max(n - 1, 1)])
        state["moments"] = self.decay * state["moments"] + (1 - self.decay) * estimates

    def noise_scale(self, run: Run) -> float:
        """In samples; NaN before the first step, and for steps of one micro-batch on one rank."""
        variance, square = run.backend.to_host(run.state(self)["moments"]).tolist()
        return self.micro_batch_size * variance / square if square and variance else math.nan

    def save(self, run: Run) -> dict[str, torch.Tensor]:
        return {"moments": run.backend.to_host(run.state(self)["moments"])}

    def load(self, state: dict[str, torch.Tensor], run: Run) -> None:
        if state:
            run.state(self)["moments"] = state["moments"].to(run.device)
