# SPDX-License-Identifier: Apache-2.0
"""This rank's shard of a bucket: gradients are reduce-scattered to it, it is updated, and weights are all-gathered.

There are two kinds. :class:`~neuron_accel.engine.shards.eager_shard.EagerShard` keeps parameters as views of one
flat buffer, so that they are gathered in place. :class:`~neuron_accel.engine.shards.lazy_shard.LazyShard` is for
devices that run one compiled graph on all ranks. ``parameter.grad`` is defined in ``sharded_grad``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from neuron_accel.engine.optim.buckets import Bucket, check_dense
from neuron_accel.engine.shards.partition import Partition
from neuron_accel.engine.shards.sharded_grad import ParameterShard, ReducedGradients, ShardedGrad

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group, Pending
    from neuron_accel.engine.runtime.run import Run


class BucketShard(ReducedGradients):
    """This rank's shard of one bucket, with the reduction of its gradients and the gathering of its weights.

    Args:
        bucket: the parameters.
        partition: their positions in the buffer.
        run: the run.
        group: the ranks over which optimizer state is sharded, which hold the same parameters.
        samples: number of ranks over which gradients are averaged; more than the size of ``group`` if the parameters
            are sharded over some of them.
        optimizer_dtype: dtype of the master weights.
        reduce_dtype: dtype in which gradients are sent and summed.

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

    def __repr__(self) -> str:
        place = self.partition
        parameters = f"{type(self).__name__} of {len(self.parameters)} parameters"
        return f"<{parameters}: {place.chunk} elements, as many on each of {place.degree} ranks>"

    @property
    @abstractmethod
    def has_masters(self) -> bool:
        """Whether the master weights are separate from the parameters."""

    def updated(self) -> list[tuple[nn.Parameter, Sequence[ParameterShard]]]:
        """Returns the tensors that the optimizer updates, each with the parameter shards that it consists of."""
        return [(piece.master, [piece]) for piece in self.pieces]

    def regroup(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """Called before a step: splits updated tensors of which only some parameters have a gradient.

        Args:
            state: the optimizer's state, which is split too.

        Returns:
            The tensors that are no longer updated, each with those that are updated instead.
        """
        return {}

    def split_by(
        self, kinds: Mapping[int, Hashable], state: MutableMapping[torch.Tensor, dict[str, Any]]
    ) -> dict[torch.Tensor, list[nn.Parameter]]:
        """Splits updated tensors whose parameters are of different kinds; ``kinds`` has the kind of each parameter by
        its index. Arguments and result are as for :meth:`regroup`."""
        return {}

    def before_update(self) -> None:
        """Called before the optimizer's step."""

    def after_update(self) -> None:
        """Called after the optimizer's step."""

    def open(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> MutableMapping[Any, dict[str, Any]]:
        """Returns the optimizer's state by the master weights of parameter shards. State and master weights can be read
        and written until :meth:`close`."""
        return state

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """Applies values that were written since :meth:`open`. Returns the same as :meth:`regroup`."""
        return {}

    def _join_to_send(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Concatenates gradients in the dtype in which they are sent."""
        return self._join(gradients)

    @abstractmethod
    def send_weights(self) -> Callable[[], None]:
        """Starts to gather the updated weights; returns a function that completes it."""

    def sync_user_weights(self) -> None:
        """Applies weights that the user has assigned or written to, in whatever way."""

    @abstractmethod
    def reload(self) -> None:
        """Sets the master weights from the model's weights, after these were changed."""

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def take_gradient(self, index: int) -> None:
        """Called when the gradient of a parameter has arrived, before :meth:`send_gradients`."""

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
        """Waits for the pending reduce-scatter, if there is one."""
        if self._pending is not None:
            self._reduced, self._pending = self._pending.wait(), None

    def receive_gradients(self, used: Sequence[bool], scale: float, partial: Group) -> None:
        """Waits for the reduced gradients and adds them to those of each parameter shard.

        Args:
            used: for each parameter of the bucket, whether any rank had a gradient.
            scale: factor of the sum.
            partial: the group over which the gradients are still partial sums.
        """
        gradient = self._scaled_sum(scale, partial)
        if self._gradient is not None:
            gradient = self._own_gradient() + gradient
            used = [a or b for a, b in zip(used, self.used_anywhere, strict=True)]
        self.used_anywhere = list(used)
        self._hand_out(gradient)
        self._show([index for index, is_used in enumerate(used) if is_used])

    def _scaled_sum(self, scale: float, partial: Group) -> torch.Tensor:
        """Returns the reduced gradients, ``[partition.chunk]``, in the optimizer's dtype."""
        self.complete()
        assert self._reduced is not None
        gradient, self._reduced = self._reduced, None
        if partial.size > 1:
            gradient = self.run.backend.all_reduce(gradient, partial)
        return self._scaled(gradient.to(self.optimizer_dtype), scale)

    @staticmethod
    def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
        return gradient.mul_(scale) if scale != 1.0 else gradient
