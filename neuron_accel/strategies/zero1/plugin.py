# SPDX-License-Identifier: Apache-2.0
"""The plugin of ZeRO-1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from neuron_accel.contract import BufferBroadcast, Claim, GradientReducer, Phase, PluginSpec, StrategyPlugin
from neuron_accel.contract.sharded import ShardedGradients, ShardedOptimizer
from neuron_accel.errors import ConfigurationError, UsageError

if TYPE_CHECKING:
    from neuron_accel.contract import PreparedModel, Run


@dataclass(frozen=True, kw_only=True)
class Zero1Plugin(StrategyPlugin):
    """Shards optimizer state and master weights over data-parallel ranks.

    Gradients are reduce-scattered in flat buckets, each rank updates its shard, and weights are all-gathered.

    From the end of the backward pass until gradients are zeroed, ``parameter.grad`` is the reduced gradient, which can
    be read, changed, replaced or dropped as with plain data parallelism. Its values are gathered when they are read.
    Reading is therefore collective: every rank must read the same gradients in the same order.

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

    spec: ClassVar[PluginSpec] = PluginSpec(
        name="zero1",
        api_version=4,
        phase=Phase.OPTIMIZER,
        claims=frozenset({Claim.GRADIENT_REDUCTION, Claim.OPTIMIZER_STATE}),
        shards=frozenset({"optimizer state"}),
    )

    removed_options: ClassVar[Mapping[str, str]] = {
        "overlap_gather": "FullyShardedPlugin(reshard_after_forward=False) gathers a block while others compute",
    }

    title: ClassVar[str] = "ZeRO-1"
    """Name of the strategy in messages."""

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
        super().__post_init__()
        where = f"plugin {self.spec.name!r}"
        for option in ("max_norm", "bucket_cap_mb"):
            value = getattr(self, option)
            if value is not None and value <= 0:
                raise ConfigurationError(
                    f"{option} is {value}; it must be positive.",
                    where=where,
                    fix="leave it out to clip nothing" if option == "max_norm" else "leave it out for 25 MiB",
                )
        if self.partition not in ("even", "parameters"):
            raise ConfigurationError(
                f"partition is {self.partition!r}; expected 'even' or 'parameters'.",
                where=where,
                fix="choose 'parameters' for optimizers that use norms or shapes of parameters",
            )
        if not self.optimizer_dtype.is_floating_point:
            raise ConfigurationError(
                f"optimizer_dtype is {self.optimizer_dtype}; it must be a floating-point dtype.",
                where=where,
                fix="choose torch.float32, or leave it out",
            )

    def transform_model(self, model: PreparedModel, run: Run) -> None:
        """Averages the gradients that no optimizer shards."""
        averager = GradientReducer(model, run, self.bucket_cap_mb)
        run.state(self).setdefault("averagers", []).append(averager)
        if self.broadcast_buffers:
            run.state(self).setdefault("buffers", []).append(BufferBroadcast(model, run))

    def reshape(self, model: PreparedModel, run: Run) -> Iterator[None]:
        """Raises an error if optimizer state is already sharded; creates buckets for the new shapes."""
        if self._optimizers(run):
            raise UsageError(
                "Parameters cannot change their shapes now.",
                where=f"plugin {self.spec.name!r}",
                why="an optimizer was prepared, whose state is sharded over ranks by their shapes",
                fix="resize the model between its `prepare` and that of the optimizer",
            )
        yield
        for averager in run.state(self).get("averagers", []):
            averager.restart()

    def transform_optimizer(self, optimizer: torch.optim.Optimizer, run: Run) -> torch.optim.Optimizer:
        """Shards optimizer state and master weights. An earlier optimizer of the same parameters steps no more."""
        for earlier in self._optimizers(run):
            earlier.retire(optimizer)
        run.state(self)["optimizers"] = [earlier for earlier in self._optimizers(run) if not earlier.retired]
        sharded = self._sharded(optimizer, run)
        run.state(self).setdefault("optimizers", []).append(sharded)
        for averager in self._averagers(run):
            averager.leave(p for group in sharded.param_groups for p in group["params"])
        return sharded

    def _sharded(self, optimizer: torch.optim.Optimizer, run: Run) -> ShardedOptimizer:
        return ShardedOptimizer(
            optimizer, run, **self.optimizer_options(), others=[averager.leave for averager in self._averagers(run)]
        )

    def optimizer_options(self) -> dict[str, Any]:
        """The arguments of :class:`ShardedOptimizer` that are options of this plugin, its name and title."""
        names = ("optimizer_dtype", "max_norm", "use_grad_acc_hook", "higher_cc_precision", "bucket_cap_mb")
        more = ("partition", "save_master_weights", "overlap")
        return {"plugin": self.spec.name, **{name: getattr(self, name) for name in ("title", *names, *more)}}

    def backward_pass(self, loss: torch.Tensor, run: Run) -> Iterator[None]:
        """Waits for gradients to be reduce-scattered."""
        yield
        self._end_backward(run)

    def _end_backward(self, run: Run) -> None:
        for averager in self._averagers(run):
            averager.end_backward()
        for optimizer in self._optimizers(run):
            optimizer.finish_backward()

    def step(self, optimizer: torch.optim.Optimizer, run: Run) -> Iterator[None]:
        """Applies state that other plugins have written; then broadcasts the first rank's buffers."""
        for sharded in self._optimizers(run):
            sharded.take_over()
        yield
        for buffers in run.state(self).get("buffers", []):
            buffers.after_step()

    def save(self, run: Run) -> None:
        """Takes weights that the loop has written."""
        for optimizer in self._optimizers(run):
            optimizer.take_user_weights()

    def gradients(self, run: Run) -> ShardedGradients:
        """Completes the reduction, and finds this rank's shards."""
        return ShardedGradients(run, self._averagers(run), self._optimizers(run))

    def _optimizers(self, run: Run) -> list[ShardedOptimizer]:
        return run.state(self).get("optimizers", [])

    def _averagers(self, run: Run) -> list[GradientReducer]:
        """The reducers of gradients that no optimizer shards, for example of a model prepared without one."""
        return run.state(self).get("averagers", [])
