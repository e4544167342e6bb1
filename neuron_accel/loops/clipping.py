"""Clipping by whoever owns it, together with ranks that have run out of data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_accel.engine.plugin import Claim

if TYPE_CHECKING:
    import torch
    from torch import nn

    from neuron_accel.engine.plugin import StrategyPlugin
    from neuron_accel.engine.run import Run


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
