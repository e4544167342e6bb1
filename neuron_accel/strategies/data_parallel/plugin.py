# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: every rank trains the same parameters on its own samples, and gradients are averaged.

The plugin is the default owner of gradient reduction and clipping. The reduction is :class:`GradientReducer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from neuron_accel.contract import BufferBroadcast, Claim, GradientReducer, Gradients, Phase, PluginSpec, StrategyPlugin
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run


@dataclass(frozen=True, kw_only=True)
class DataParallelPlugin(StrategyPlugin):
    """Averages gradients over data-parallel ranks.

    Args:
        bucket_cap_mb: size of the buckets in MiB. The reduction of smaller buckets starts earlier; larger buckets need
            fewer messages.
        broadcast_buffers: whether buffers that change in training (running statistics) are broadcast from the first
            rank after every step, as in DistributedDataParallel; otherwise each rank keeps its own.
    """

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="data_parallel",
        api_version=4,
        phase=Phase.GRADIENTS,
        claims=frozenset({Claim.GRADIENT_REDUCTION}),
    )

    bucket_cap_mb: float = 25.0
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be positive.")

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Creates the buckets in which gradients are reduced."""
        if self.owns_reduction(run):
            run.state(self).setdefault("reducers", []).append(GradientReducer(model, run, self.bucket_cap_mb))
            if self.broadcast_buffers:
                run.state(self).setdefault("buffers", []).append(BufferBroadcast(model, run))

    def owns_reduction(self, run: Run) -> bool:
        return run.owner(Claim.GRADIENT_REDUCTION) is self

    def reshape(self, model: PreparedModel, run: Run) -> Iterator[None]:
        """Creates new buckets for the new shapes."""
        yield
        for reducer in self._reducers(run):
            reducer.restart()

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Reduces gradients as they arrive, and waits for the reduction."""
        if run.owner(Claim.BACKWARD) is None:
            for reducer in self._reducers(run):
                reducer.begin_backward()
        yield
        for reducer in self._reducers(run):
            reducer.end_backward()

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Reduces gradients accumulated without synchronisation; then broadcasts the first rank's buffers."""
        self._flush(run)
        yield
        for buffers in run.state(self).get("buffers", []):
            buffers.after_step()

    def gradients(self, run: Run) -> Gradients:
        """Completes the reduction."""
        return Gradients(run, partial(self._flush, run), partial(self._flush, run, in_step=False))

    def _flush(self, run: Run, *, in_step: bool = True) -> None:
        """Before gradients are used, for a step or otherwise."""
        for reducer in self._reducers(run):
            reducer.before_step() if in_step else reducer.flush()

    def _reducers(self, run: Run) -> list[GradientReducer]:
        return run.state(self).get("reducers", [])
