"""Averaging a loss over items (tokens), however they are spread over ranks and micro-batches.

A mean of means is not the mean where micro-batches have different numbers of tokens. So each micro-batch enters with
its sum, its mean times its number of items, and the gradients of a step are divided, once they are complete, by the
number of items of all ranks and micro-batches of the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from neuron_accel.engine.plugin import Claim

if TYPE_CHECKING:
    from neuron_accel.engine.run import Run


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
