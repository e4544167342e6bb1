# SPDX-License-Identifier: Apache-2.0
"""The gradients of a run whose optimizers shard them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from neuron_accel.engine.optim.norms import GradientPart, Gradients, gradient_parts

if TYPE_CHECKING:
    import torch

    from neuron_accel.engine.optim.reducer import GradientReducer
    from neuron_accel.engine.runtime.run import Run
    from neuron_accel.engine.shards.optimizer import ShardedOptimizer


class ShardedGradients(Gradients):
    """Gradients that optimizers shard, and those of parameters that none of them holds.

    Args:
        run: the run.
        reducers: reduce those that no optimizer shards.
        optimizers: shard the others.
    """

    def __init__(self, run: Run, reducers: Sequence[GradientReducer], optimizers: Sequence[ShardedOptimizer]) -> None:
        def flush() -> None:
            for reducer in reducers:
                reducer.flush()
            for optimizer in optimizers:
                optimizer.flush()

        super().__init__(run, flush)
        self._optimizers = optimizers

    def parts(self, parameters: Iterable[torch.nn.Parameter]) -> list[GradientPart]:
        self._complete()
        parameters = list(parameters)
        sharded = {p for optimizer in self._optimizers for p in optimizer.sharded_parameters}
        others = gradient_parts([p for p in parameters if p not in sharded], self._run)
        return [part for optimizer in self._optimizers for part in optimizer.gradient_parts(parameters)] + others

    def full(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        self._flush()
        for optimizer in self._optimizers:
            if parameter in optimizer.sharded_parameters:
                return optimizer.full_gradient(parameter)
        return parameter.grad
