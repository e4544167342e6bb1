"""The options of ZeRO-1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from neuron_accel.contract import ConfigurationError, StrategyPlugin


@dataclass(frozen=True, kw_only=True)
class Zero1Options(StrategyPlugin):
    """The options of ZeRO-1.

    Args:
        optimizer_dtype: dtype of master weights and optimizer state. They are at least as wide as their parameter:
            those of a float64 parameter are float64, those of a complex one complex. Parameters of another dtype keep
            it in the model.
        max_norm: global norm to which gradients are clipped at every step; None for no clipping other than the loop's.
        use_grad_acc_hook: whether gradients are reduced after every micro-batch and accumulate as this rank's shard, in
            ``optimizer_dtype``. A rank then never holds all accumulated gradients, but communicates after every
            micro-batch. Otherwise gradients accumulate unsharded and are reduced once per step, as they also
            do inside ``join_uneven_inputs``, where ranks may accumulate different numbers of micro-batches.
        higher_cc_precision: whether gradients are sent and summed in ``optimizer_dtype`` instead of their own dtype.
        bucket_cap_mb: largest size of a bucket in MiB, except for a larger parameter. Small models have smaller
            buckets.
        partition: ``"even"`` splits parameters between ranks, for element-wise optimizers; ``"parameters"`` keeps each
            parameter on one rank, for optimizers that use its norm or shape.
        save_master_weights: whether checkpoints contain the master weights if they are separate from the parameters.
            Without them, a resumed run starts from the rounded parameters.
        overlap: whether buckets are reduced while the backward pass still runs, or all at its end. Those of several
            optimizers are reduced at its end, since ranks could complete them in different orders.
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
