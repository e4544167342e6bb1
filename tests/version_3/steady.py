"""Skips training steps whose loss jumps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from neuron_accel.contract import Claim, ConfigurationError, Phase, PluginSpec, Run, StrategyPlugin

__all__ = ["SteadyPlugin"]


@dataclass(frozen=True, kw_only=True)
class SteadyPlugin(StrategyPlugin):
    """Skips the gradient of a step whose loss is more than ``factor`` times the running mean of losses.

    Args:
        factor: what counts as a jump; above 1.
        memory: weight of the old running mean in the new one; from 0 to less than 1.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="steady",
        phase=Phase.GRADIENTS,
        after=frozenset({"data_parallel"}),
        refines=frozenset({Claim.GRADIENT_REDUCTION}),
    )

    factor: float = 3.0
    memory: float = 0.9

    def __post_init__(self) -> None:
        if self.factor <= 1 or not 0 <= self.memory < 1:
            raise ConfigurationError(
                f"factor={self.factor} and memory={self.memory} are not possible.",
                fix="choose a factor above 1, and a memory from 0 to less than 1",
            )

    def before_backward(self, loss: torch.Tensor, run: Run) -> torch.Tensor:
        """Adds up the losses of a step's micro-batches."""
        state = run.state(self)
        part = loss.detach().float() * run.backward_scale()
        state["loss"] = state["loss"] + part if "loss" in state else part
        return loss

    def before_step(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        """Decides once per step, even with several optimizers."""
        state = run.state(self)
        if "loss" in state:
            self.decide(state, run)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owner = run.owner(Claim.GRADIENT_REDUCTION)
        owner.scale_gradients(parameters, state["keep"], run)

    def decide(self, state: dict[str, Any], run: Run) -> None:
        group = run.group(*run.mesh.data_axes)  # data-parallel ranks
        loss = run.backend.all_reduce(state.pop("loss"), group) / group.size
        mean = state.get("mean", loss)
        calm = loss <= self.factor * mean  # a tensor, not a bool: no host read on a lazy device
        state["keep"] = calm.float()
        state["mean"] = torch.where(calm, self.memory * mean + (1 - self.memory) * loss, mean)

    def checkpoint_state(self, run: Run) -> dict[str, Any]:
        state = run.state(self)
        return {"mean": run.backend.to_host(state["mean"])} if "mean" in state else {}

    def load_checkpoint_state(self, state: dict[str, Any], run: Run) -> None:
        run.state(self)["mean"] = state["mean"].to(run.device)

    def teardown(self, run: Run) -> None:
        run.state(self).clear()
