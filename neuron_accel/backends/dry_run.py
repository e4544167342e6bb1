# SPDX-License-Identifier: Apache-2.0
"""One rank of a run of any size, without the other ranks and without memory: collectives return shapes and are counted.

Tensors are on the meta device, so a step of a large model takes seconds on a laptop. A step does what it does on a
device: the same plan, the same modules, the same collectives in the same order. A tensor on the host, such as the
weights of a model that is not prepared yet, keeps its values, as if every rank held the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar, TypeVar

import torch

from neuron_accel.backends.base import Backend
from neuron_accel.backends.events import Collective, Unobserved
from neuron_accel.backends.group import Done, Group, Pending
from neuron_accel.backends.movement import ReduceOp, join_chunks, normalize_dim, split_chunks

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _imitates(method: _Method) -> _Method:
    """Marks a collective: the operations on tensors in it are those of other ranks and of the network."""

    @wraps(method)
    def imitating(self: DryRunBackend, *args: Any, **kwargs: Any) -> Any:
        before, self.imitating = self.imitating, True
        try:
            return method(self, *args, **kwargs)
        finally:
            self.imitating = before

    return imitating  # type: ignore[return-value]


class DryRunBackend(Backend):
    """Backend of one rank whose peers do not exist.

    Bytes are those of rings, as on devices: an all-reduce sends ``2 (n - 1) / n`` of its tensor, an all-gather
    ``n - 1`` times its shard, a reduce-scatter and an all-to-all ``(n - 1) / n`` of their tensor.

    Args:
        world_size: number of ranks of the run.
        rank: the rank that this process is.
    """

    name: ClassVar[str] = "dryrun"
    device = torch.device("meta")
    overlaps = has_point_to_point = True
    has_values = False

    def __init__(self, *, world_size: int, rank: int = 0) -> None:
        super().__init__()
        self.world_size, self.rank = world_size, rank

    def __deepcopy__(self, memo: dict[int, Any]) -> DryRunBackend:
        return self  # copies of a model communicate in the same groups

    @property
    def missing(self) -> Mapping[str, str]:
        return {
            "host-reads": "tensors of a dry run have shapes and no values",
        }

    # ---- groups ------------------------------------------------------------------------------------------------------
    def new_group(self, partition: Sequence[Sequence[int]], name: str) -> Group:
        """See :meth:`Backend.new_group`."""
        return Group.of(self.rank, partition, name, self.world_size)

    # ---- collectives on tensors --------------------------------------------------------------------------------------
    @_imitates
    def start_all_reduce(self, tensor: torch.Tensor, group: Group, op: ReduceOp = "sum") -> Pending:
        """See :meth:`Backend.all_reduce`."""
        if group.size == 1 or not tensor.numel():
            return Done(tensor)
        shared = tensor.detach().contiguous()
        if op == "sum" and shared.device.type != "meta" and shared.dtype != torch.bool:
            shared = shared * group.size
        return self._start("all_reduce", group, 2 * (group.size - 1) * shared.nbytes // group.size, shared, shared)

    @_imitates
    def start_all_gather(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """See :meth:`Backend.all_gather`. A tensor without dims is treated as one of shape ``[1]``."""
        if group.size == 1:
            return Done(tensor)
        tensor = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
        dim = normalize_dim(dim, tensor)
        rows = tensor.new_empty((group.size, *tensor.shape)).copy_(tensor)
        sent = (group.size - 1) * tensor.nbytes
        return self._start("all_gather", group, sent, tensor, rows, lambda: join_chunks(rows, dim))

    @_imitates
    def start_all_gather_into(self, out: torch.Tensor, tensor: torch.Tensor, group: Group) -> Pending:
        """See :meth:`Backend.start_all_gather_into`."""
        if group.size == 1:
            return Done(out.copy_(tensor.view(out.shape)))
        out.view(group.size, -1).copy_(tensor.detach().view(-1))
        return self._start("all_gather", group, (group.size - 1) * tensor.nbytes, tensor, out)

    @_imitates
    def start_reduce_scatter(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending:
        """See :meth:`Backend.reduce_scatter`."""
        if group.size == 1:
            return Done(tensor)
        rows = split_chunks(tensor.detach(), dim, group.size).contiguous()
        result = rows[group.index] * group.size
        return self._start("reduce_scatter", group, (group.size - 1) * rows.nbytes // group.size, rows, result)

    @_imitates
    def start_reduce_scatter_into(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        group: Group,
        *,
        scale: float = 1.0,
        scratch: torch.Tensor | None = None,
    ) -> Pending:
        """See :meth:`Backend.start_reduce_scatter_into`."""
        if group.size == 1 or not tensor.numel():
            return super().start_reduce_scatter_into(out, tensor, group, scale=scale, scratch=scratch)
        rows = tensor.detach().view(group.size, -1)
        out.copy_(rows[group.index]).mul_(group.size * scale)
        return self._start("reduce_scatter", group, (group.size - 1) * rows.nbytes // group.size, rows, out)

    @_imitates
    def start_all_to_all(self, tensor: torch.Tensor, group: Group, split_dim: int = 0, concat_dim: int = 0) -> Pending:
        """See :meth:`Backend.start_all_to_all`."""
        if group.size == 1:
            return Done(tensor)
        concat_dim = normalize_dim(concat_dim, tensor)
        rows = split_chunks(tensor.detach(), split_dim, group.size).contiguous()
        received = rows.clone()
        sent = (group.size - 1) * rows.nbytes // group.size
        return self._start("all_to_all", group, sent, rows, received, lambda: join_chunks(received, concat_dim))

    @_imitates
    def start_permute(self, tensor: torch.Tensor, group: Group, shift: int = 1) -> Pending:
        """See :meth:`Backend.start_permute`."""
        if shift % group.size == 0:
            return Done(tensor)
        tensor = tensor.detach()
        return self._start("permute", group, tensor.nbytes, tensor, tensor.clone(memory_format=torch.contiguous_format))

    @_imitates
    def broadcast(self, tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
        """See :meth:`Backend.broadcast`. On the source rank the result is the input."""
        if group.size == 1:
            return tensor
        tensor = tensor.detach()
        sends = group.index == source
        result = tensor if sends else tensor.clone(memory_format=torch.contiguous_format)
        return self._start("broadcast", group, tensor.nbytes if sends else 0, tensor, result).wait()

    def chunk(self, tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
        """See :meth:`Backend.chunk`. Returns a view."""
        return tensor if group.size == 1 else split_chunks(tensor, dim, group.size)[group.index]

    # ---- point to point ----------------------------------------------------------------------------------------------
    def start_send(self, tensor: torch.Tensor, group: Group, target: int) -> Pending:
        """See :meth:`Backend.start_send`."""
        shared = tensor.detach().contiguous()
        return self._start("send", group, shared.nbytes, shared, tensor)

    def start_receive(self, shape: Sequence[int], dtype: torch.dtype, group: Group, source: int) -> Pending:
        """See :meth:`Backend.start_receive`."""
        received = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._start("receive", group, 0, received, received)

    # ---- collectives on objects --------------------------------------------------------------------------------------
    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        """Returns ``value`` once for every rank of the group, as if all had the same."""
        if group.size > 1:
            with self.events.collective("all_gather_object", group):
                pass
        return [value] * group.size

    def broadcast_object(self, value: Any, group: Group, source: int = 0) -> Any:
        """Returns ``value``, as if the source had the same."""
        if group.size > 1:
            with self.events.collective("broadcast_object", group):
                pass
        return value

    def barrier(self) -> None:
        """Returns at once."""

    # ---- values ------------------------------------------------------------------------------------------------------
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor on the CPU, of zeros if ``tensor`` has no values."""
        if tensor.device.type != "meta":
            return super().to_host(tensor)
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    # ---- implementation ----------------------------------------------------------------------------------------------
    def _start(
        self,
        op: str,
        group: Group,
        sent: int,
        source: torch.Tensor,
        result: torch.Tensor,
        finish: Callable[[], torch.Tensor] | None = None,
    ) -> Pending:
        """Starts a collective.

        Args:
            op, group, sent: of the collective.
            source: what is sent, kept alive until the wait, as a device keeps it.
            result: the result, unless ``finish`` makes it.
            finish: called by the first ``wait()``; returns the result.
        """
        with self.events.collective(op, group, sent, source.dtype) as event:
            return _Recorded(source, result, finish, event)


class _Recorded(Pending):
    """A collective of a dry run. See :meth:`DryRunBackend._start`."""

    def __init__(
        self,
        source: torch.Tensor,
        result: torch.Tensor,
        finish: Callable[[], torch.Tensor] | None,
        event: Collective | Unobserved,
    ) -> None:
        self._source: torch.Tensor | None = source
        self._result, self._finish, self._event = result, finish, event

    def wait(self) -> torch.Tensor:
        if self._source is not None:
            with self._event.waiting():
                if self._finish is not None:
                    self._result = self._finish()
            self._source, self._finish = None, None  # and the memory they hold
        return self._result
