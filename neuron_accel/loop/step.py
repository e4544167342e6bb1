"""What one step needs beside the plugins: averages over items (tokens), and clipping by its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from neuron_accel.engine.plan.plugin import Claim

if TYPE_CHECKING:
    import torch
    from torch import nn

    from neuron_accel.engine.plan.plugin import StrategyPlugin
    from neuron_accel.engine.runtime.run import Run


# ---- Averaging a loss over items (tokens), however they are spread over ranks and micro-batches ----------------------
# A mean of means is not the mean where micro-batches have different numbers of tokens. So each micro-batch enters
# with its sum, its mean times its number of items, and the gradients of a step are divided, once they are complete,
# by the number of items of all ranks and micro-batches of the step.
class ItemCount:
    """The items that the gradients of the next step stand for.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._count: torch.Tensor | None = None
        self._action = run.company.register("the average over items", self._divide, settles=True)

    def add(self, items: int | torch.Tensor) -> torch.Tensor:
        """Counts the items of a micro-batch; returns their number, 0-dim int64 on the run's device."""
        count = torch.as_tensor(items, device=self._run.device).detach().to(torch.int64).reshape(())
        self._count = count if self._count is None else self._count + count
        return count

    def settle(self) -> None:
        """A step begins: divides what has accumulated, unless that is done or losses came without items. Collective."""
        if self._count is not None:
            self._action()
            self._divide()

    def _divide(self) -> None:
        run = self._run
        group = run.group(*run.mesh.gradient_axes)
        mine = torch.zeros((), dtype=torch.int64, device=run.device) if self._count is None else self._count
        self._count = None
        total = run.backend.all_reduce(mine.clone(), group)
        owner = run.owner(Claim.GRADIENT_REDUCTION)
        assert owner is not None  # the planner sees to it
        parameters = [r.current for m in run.models for r in m.parameters if r.current is not None]
        # Gradients are averages over the group; no items at all means no gradients either.
        owner.scale_gradients(parameters, group.size / total.clamp(min=1).to(torch.float32), run)


# ---- Clipping by whoever owns it, together with ranks that have run out of data --------------------------------------
class Clipping:
    """Calls the owner of clipping.

    Args:
        run: the run.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._clip_norm = run.company.register("clipping to a norm", self._norm_along, settles=True)
        self._clip_value = run.company.register("clipping values", self._value_along, settles=True)

    def norm(self, owner: StrategyPlugin, parameters: list[nn.Parameter], *limits: float) -> torch.Tensor:
        """``limits`` are the largest norm and its type; see :meth:`StrategyPlugin.clip_grad_norm`."""
        if self._clip_norm.announced:
            self._clip_norm(self._positions(parameters), *limits)
        return owner.clip_grad_norm(parameters, *limits, self._run)

    def value(self, owner: StrategyPlugin, parameters: list[nn.Parameter], limit: float) -> None:
        """See :meth:`StrategyPlugin.clip_grad_value`."""
        if self._clip_value.announced:
            self._clip_value(self._positions(parameters), limit)
        owner.clip_grad_value(parameters, limit, self._run)

    def _norm_along(self, positions: list[int], *limits: float) -> None:
        self._owner.clip_grad_norm(self._at(positions), *limits, self._run)

    def _value_along(self, positions: list[int], limit: float) -> None:
        self._owner.clip_grad_value(self._at(positions), limit, self._run)

    @property
    def _owner(self) -> StrategyPlugin:
        owner = self._run.owner(Claim.GRADIENT_CLIPPING)
        assert owner is not None  # somebody has announced that it clips
        return owner

    def _all(self) -> list[nn.Parameter | None]:
        return [record.current for model in self._run.models for record in model.parameters]

    def _positions(self, parameters: list[nn.Parameter]) -> list[int]:
        wanted = set(parameters)
        return [position for position, parameter in enumerate(self._all()) if parameter in wanted]

    def _at(self, positions: list[int]) -> list[nn.Parameter]:
        parameters = self._all()
        return [p for p in (parameters[position] for position in positions) if p is not None]
