"""This rank's shard of a bucket: gradients are scattered to it, it is updated, and weights are gathered from it.

There are two kinds. :class:`~neuron_accel.strategies.zero1.eager_shard.EagerShard` keeps parameters as views of one
flat buffer, so that nothing is copied; :class:`~neuron_accel.strategies.zero1.lazy_shard.LazyShard` is for devices
that run one compiled graph on all ranks. What a loop sees of the gradients is in ``sharded_grad``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.contract import Bucket, check_dense
from neuron_accel.strategies.zero1.partition import Partition
from neuron_accel.strategies.zero1.sharded_grad import ParameterShard, ReducedGradients, ShardedGrad

if TYPE_CHECKING:
    from neuron_accel.contract import Group, Pending, Run


class BucketShard(ReducedGradients):
    """This rank's shard of one bucket, and how gradients and weights travel to and from it.

    Args:
        bucket: the parameters.
        partition: their positions in the buffer.
        run: the run.
        group: the ranks over which the optimizer's state is sharded: those that hold the same parameters.
        samples: number of ranks that see different samples, over which gradients are averaged; more than ``group`` has
            where the parameters are sharded over some of them.
        optimizer_dtype: dtype of the masters.
        reduce_dtype: dtype in which gradients travel and are summed.

    Attributes:
        used: for each parameter, whether this rank had a gradient in the last backward pass.
    """

    def __init__(
        self,
        *,
        bucket: Bucket,
        partition: Partition,
        run: Run,
        group: Group,
        samples: int,
        optimizer_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        super().__init__(bucket=bucket, run=run, group=group, optimizer_dtype=optimizer_dtype)
        self.partition, self.samples, self.reduce_dtype = partition, samples, reduce_dtype
        self.used = [False] * len(bucket.parameters)
        self._pending: Pending | None = None
        self._reduced: torch.Tensor | None = None

    @property
    @abstractmethod
    def has_masters(self) -> bool:
        """Whether the masters are separate from the parameters."""

    def updated(self) -> list[tuple[nn.Parameter, Sequence[ParameterShard]]]:
        """What the optimizer updates, each with the pieces that it consists of."""
        return [(piece.master, [piece]) for piece in self.pieces]

    def regroup(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """Before a step: what the optimizer updates as one has a gradient for all of it, or for nothing.

        Args:
            state: the optimizer's, which follows.

        Returns:
            what the optimizer does not update any more, each with what it updates instead.
        """
        return {}

    def split_by(
        self, kinds: Mapping[int, Hashable], state: MutableMapping[torch.Tensor, dict[str, Any]]
    ) -> dict[torch.Tensor, list[nn.Parameter]]:
        """The same, such that what the optimizer updates as one is of one kind; ``kinds`` are those of parameters, by
        their index."""
        return {}

    def before_update(self) -> None:
        """The optimizer is going to step."""

    def after_update(self) -> None:
        """The optimizer has stepped."""

    def open(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> MutableMapping[Any, dict[str, Any]]:
        """The optimizer's state by the masters of parameter shards, which can be read and written until
        :meth:`close`."""
        return state

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """Takes over what was written since :meth:`open`. Returns the same as :meth:`regroup`."""
        return {}

    def _join_to_send(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Joins gradients in the dtype in which gradients travel."""
        return self._join(gradients)

    @abstractmethod
    def send_weights(self) -> Callable[[], None]:
        """Starts to gather the updated weights; what it returns finishes that."""

    def sync_user_weights(self) -> None:
        """Applies weights that a loop has assigned to a parameter: ``parameter.data = ...``."""

    @abstractmethod
    def reload(self) -> None:
        """Takes the model's weights as the new masters, after they were changed elsewhere."""

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def send_gradients(self) -> None:
        """Starts the reduce-scatter of the bucket's gradients and releases them."""
        gradients, kept = [], []
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None:
                check_dense(gradient, self.bucket.records[index])
            kept.append(self._is_visible(gradient))
            gradients.append(gradient.take_waiting() if isinstance(gradient, ShardedGrad) else gradient)
            parameter.grad = None
        self.before_change()
        self._forget_all_but(kept)
        self.used = [gradient is not None for gradient in gradients]
        self._pending = self.run.backend.start_reduce_scatter(self._join_to_send(gradients), self.group)

    def complete(self) -> None:
        """Waits for the reduce-scatter that is under way, if any."""
        if self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None

    def receive_gradients(self, used: Sequence[bool], scale: float, partial: Group) -> None:
        """Waits for the reduced gradients and adds them to each parameter shard.

        Args:
            used: for each parameter of the bucket, whether any rank had a gradient.
            scale: what the sum is multiplied by.
            partial: the group over which they still are partial sums.
        """
        gradient = self._scaled_sum(scale, partial)
        if self._gradient is not None:
            gradient = self._own_gradient() + gradient
            used = [a or b for a, b in zip(used, self.used_anywhere, strict=True)]
        self.used_anywhere = list(used)
        self._hand_out(gradient)
        self._show([index for index, is_used in enumerate(used) if is_used])

    def _scaled_sum(self, scale: float, partial: Group) -> torch.Tensor:
        """The reduction of the sent gradients over all ranks, ``[partition.chunk]``, in the optimizer's dtype."""
        self.complete()
        assert self._reduced is not None
        gradient, self._reduced = self._reduced, None
        if partial.size > 1:
            gradient = self.run.backend.all_reduce(gradient, partial)
        return self._scaled(gradient.to(self.optimizer_dtype), scale)

    @staticmethod
    def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
        return gradient.mul_(scale) if scale != 1.0 else gradient
