"""The options of ZeRO-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from neuron_accel.contract import ConfigurationError, StrategyPlugin


@dataclass(frozen=True, kw_only=True)
class Zero1Options(StrategyPlugin):
    """What is sharded and when it is reduced.

    Args:
        optimizer_dtype: dtype of master weights and optimizer state, which are at least as wide as their parameter:
            those of a float64 parameter are float64, those of a complex one complex. Parameters of another dtype
            keep it in the model.
        max_norm: gradients are clipped to this global norm at every step; None: only where the loop clips.
        use_grad_acc_hook: gradients are reduced after every micro-batch and accumulate as this rank's shard, in
            ``optimizer_dtype``: a rank never holds all accumulated gradients, at the price of communication each
            time. Otherwise they accumulate unsharded and are sent once per step.
        higher_cc_precision: gradients travel and are summed in ``optimizer_dtype`` instead of their own dtype.
        bucket_cap_mb: largest size of a bucket in MiB, but for a parameter that is larger. A small model's are smaller.
        partition: "even" splits parameters between ranks, for optimizers that treat elements alike; "parameters"
            keeps each on one rank, for those that use a parameter's norm or shape.
        save_master_weights: whether checkpoints contain the master weights where these are not the parameters
            themselves; without them, a resumed run starts from the rounded parameters.
        overlap: whether buckets are sent while the backward pass still runs, or all at its end. Those of several
            optimizers are sent at its end: ranks could complete them in different orders.
        broadcast_buffers: whether buffers that change in training (running statistics) are broadcast from the first
            rank after every step, as in DistributedDataParallel; else each rank keeps its own.
    """

    optimizer_dtype: torch.dtype = torch.float32
    max_norm: float | None = None
    use_grad_acc_hook: bool = False
    higher_cc_precision: bool = False
    bucket_cap_mb: float = 25.0
    partition: Literal["even", "parameters"] = "even"
    save_master_weights: bool = True
    overlap: bool = True
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.max_norm is not None and self.max_norm <= 0:
            raise ConfigurationError(
                f"max_norm is {self.max_norm}; it must be positive.", fix="leave it out to disable clipping"
            )
        if self.bucket_cap_mb <= 0:
            raise ConfigurationError(f"bucket_cap_mb is {self.bucket_cap_mb}; it must be positive.")
        if self.partition not in ("even", "parameters"):
            raise ConfigurationError(f"partition is {self.partition!r}; expected 'even' or 'parameters'.")
        if not self.optimizer_dtype.is_floating_point:
            raise ConfigurationError(f"optimizer_dtype is {self.optimizer_dtype}; it must be a floating-point dtype.")
