# SPDX-License-Identifier: Apache-2.0
"""This rank's shard of parameters whose values are gathered only while the model uses them, on a device that runs one
compiled graph on all ranks.

Storage cannot be freed in a graph, and need not be: a value is in memory from the operation that computes it to the
last one that reads it. Between uses a parameter has no values at all (:meth:`Backend.placeholder`), so a graph neither
receives nor returns its full weight. A rank keeps only the master weights, from which weights are gathered in their own
dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.engine.sharding.parameters import WeightShard
from neuron_accel.engine.shards.lazy_shard import HostCopy, LazyShard
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import nn

    from neuron_accel.backends.group import Group, Pending


class LazyGatheredShard(LazyShard):
    """The shard of a bucket of one unit (:class:`~neuron_accel.engine.shards.unit.Unit`).

    Args:
        read: called with this shard before one of its parameters is read in full: drops the one that was read before.
        take_over: applies what was written to this shard by parameter (:meth:`close`).
        plugin: its name, for messages.
        loaded: this rank's weights, ``[partition.chunk]``, on the CPU, if the parameters have no values yet.
        near: the ranks between which parameters are gathered again after :meth:`reshard`; None for all.

    Attributes:
        is_gathered: whether the parameters have their values.
        values: these values, one for each parameter, while they are gathered.
        is_held: False, see :class:`~neuron_accel.engine.shards.gathered_shard.GatheredShard`.
        near_part: what this rank keeps of them since they were resharded, ``[partition.numel / near.size]``.
    """

    is_held = False

    def __init__(
        self,
        *,
        read: Callable[[LazyGatheredShard], None],
        take_over: Callable[[], None],
        plugin: str,
        loaded: torch.Tensor | None = None,
        near: Group | None = None,
        **common: Any,
    ) -> None:
        self._loaded = loaded
        super().__init__(**common)
        self._loaded = None
        self._read, self._take_over_writes, self._plugin, self._near = read, take_over, plugin, near
        self._arriving: Pending | None = None
        self._host: HostCopy | None = None  # this rank's weights, which may be written to
        self._host_full: list[torch.Tensor] = []  # those of all ranks
        self.values: list[torch.Tensor] = []
        self._flat: torch.Tensor | None = None  # the same in one tensor
        self.near_part: torch.Tensor | None = None
        self.is_gathered = True
        if self.is_sharded:
            self._dtypes = [parameter.dtype for parameter in self.parameters]
            self._empty = [self.run.backend.placeholder(parameter) for parameter in self.parameters]
            self._versions = [parameter._version for parameter in self.parameters]
            self._describe()
            self._let_go()

    def _own_weights(self) -> torch.Tensor:
        return super()._own_weights() if self._loaded is None else self._loaded.to(self.optimizer_dtype)

    def _describe(self) -> None:
        """Records which elements of each parameter this rank keeps."""
        for index, (record, piece) in enumerate(zip(self.bucket.records, self.pieces, strict=True)):
            record.weights = WeightShard(
                read=partial(self._own_on_host, index),
                start=piece.span.start,
                stop=piece.span.stop,
                axes=self.bucket.reduction_axes,
                gather=partial(self._full_on_host, index),
                changed=self.release,
            )

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks keep a part of the parameters."""
        return self.group.size > 1

    @property
    def is_arriving(self) -> bool:
        """Whether the values are being gathered."""
        return self._arriving is not None

    # ---- the values of the parameters --------------------------------------------------------------------------------
    def own(self) -> torch.Tensor:
        """Returns what this rank sends, in the parameters' dtype: ``[partition.chunk]``, or :attr:`near_part`."""
        self.sync_user_weights()
        self._take_over_writes()
        if self.near_part is not None:
            return self.near_part
        return self._chunk().to(self.bucket.dtype)

    def start_gather(self, own: torch.Tensor | None = None) -> None:
        """Starts to gather, unless that is under way or done. Collective.

        Args:
            own: :meth:`own`, behind a barrier; None to begin at any time.
        """
        if not self.is_gathered and self._arriving is None:
            own = self.own() if own is None else own
            group = self.group if self._near is None or self.near_part is None else self._near
            self._arriving = self.run.backend.start_all_gather(own, group)

    def gather(self) -> None:
        """The parameters have their values when this returns. Collective."""
        self.start_gather()
        if self._arriving is None:
            return
        with torch.no_grad():
            self._flat = self._arriving.wait()
            self.values = [value.clone() for value in self._split(self._flat)]
        self._arriving = self.near_part = None
        for parameter, value in zip(self.parameters, self.values, strict=True):
            parameter.data = value
        self._versions = [parameter._version for parameter in self.parameters]
        self.is_gathered = True

    def reshard(self) -> None:
        """Drops the gathered values, but for this rank's part among the near ranks."""
        flat, near = self._flat, self._near
        self.release()
        if near is not None and flat is not None:
            with torch.no_grad():
                self.near_part = self.run.backend.chunk(flat, near)

    def release(self) -> None:
        """Drops the gathered values."""
        self._host_full, self.near_part = [], None
        self._arriving = None
        if self.is_sharded and self.is_gathered:
            self.sync_user_weights()
            self._let_go()

    def _let_go(self) -> None:
        self.is_gathered, self.values, self._flat = False, [], None
        for index, parameter in enumerate(self.parameters):
            if not self.run.backend.is_placeholder(self._empty[index]):  # a loop has written to it
                self._empty[index] = self.run.backend.placeholder(parameter)
            parameter.data = self._empty[index]
        self._versions = [parameter._version for parameter in self.parameters]

    def dissolve(self) -> None:
        """Gives the parameters their values in full; this shard is not used any more. Collective."""
        self.sync_user_weights()
        full = [self._full_on_host(index) for index in range(len(self.parameters))] if self.is_sharded else []
        for parameter, value, record in zip(self.parameters, full, self.bucket.records, strict=bool(full)):
            parameter.data = value.clone().to(self._device)
            record.weights = None
        self.is_gathered, self.values, self._flat = False, [], None

    # ---- what the optimizer does -------------------------------------------------------------------------------------
    def send_weights(self) -> Callable[[], None]:
        """Nothing travels before the next forward pass."""
        if not self.is_sharded:
            return super().send_weights()
        self.release()
        return lambda: None

    def reload(self) -> None:
        """The master weights are the weights; :meth:`close` applies those that were written."""
        if not self.is_sharded:
            super().reload()

    def sync_user_weights(self) -> None:
        """Takes values that a loop has assigned, ``parameter.data = ...``, or written into a parameter, into the
        shard."""
        if not self.is_sharded:
            super().sync_user_weights()
            return
        written = [index for index, parameter in enumerate(self.parameters) if self._is_written(index, parameter)]
        for index in written:
            self._take(index, self.parameters[index])
        if written:
            self._take_over_writes()
            if not self.is_gathered:
                self._let_go()

    def _note_weights(self) -> None:
        if not self.is_sharded:
            super()._note_weights()

    def _is_written(self, index: int, parameter: nn.Parameter) -> bool:
        if not self.is_gathered:
            return not self.run.backend.is_placeholder(parameter)
        is_same = torch._C._is_alias_of(parameter, self.values[index])  # type: ignore[attr-defined]  # not in its stubs
        return not is_same or parameter._version != self._versions[index]

    def _take(self, index: int, parameter: nn.Parameter) -> None:
        shape, dtype = self._empty[index].shape, self._dtypes[index]
        self._flat = self.near_part = None
        if parameter.shape != shape or parameter.dtype != dtype:
            raise UsageError(
                f"The weight {self.bucket.records[index].fqn!r} is {parameter.dtype} {tuple(parameter.shape)} now; "
                f"expected {dtype} {tuple(shape)}.",
                where=f"plugin {self._plugin!r}",
                why="its optimizer's state was sharded for the earlier tensor",
                fix="convert a model before `prepare`",
            )
        span = self.pieces[index].span
        value = self.run.backend.to_host(parameter.detach()).reshape(-1)[span.start : span.stop]
        self._own_on_host(index).copy_(value)
        if self.is_gathered:
            self.values[index] = parameter.detach()
            self._versions[index] = parameter._version

    # ---- the shard on the host, for checkpoints ----------------------------------------------------------------------
    def before_save(self) -> None:
        """Copies this rank's weights to the host. Collective, because it reads the device."""
        super().before_save()
        self._keep_on_host()

    def _keep_on_host(self) -> None:
        if self._host is not None:
            return
        parts: dict[int, torch.Tensor] = {}
        for master in self.masters:
            if self._opened is None:
                values = self.run.backend.to_host(master.value.detach()).split(master.lengths)
            else:
                values = tuple(piece.master.detach() for piece in master.pieces)
            parts |= {piece.span.parameter: v for piece, v in zip(master.pieces, values, strict=True)}
        lengths = [piece.span.length for piece in self.pieces]
        flat = torch.cat([parts[piece.span.parameter] for piece in self.pieces])
        self._host = HostCopy(flat.to(self.bucket.dtype), lengths)

    def _own_on_host(self, index: int) -> torch.Tensor:
        self._keep_on_host()
        assert self._host is not None
        span = self.pieces[index].span
        return self._host.parts[index][: span.stop - span.start]

    def _full_on_host(self, index: int) -> torch.Tensor:
        self._read(self)
        if not self._host_full:
            self._keep_on_host()
            assert self._host is not None
            own = torch.cat(list(self._host.parts))
            self._host_full = self._split(self.run.backend.all_gather(own, self.group))
        return self._host_full[index]

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """See :meth:`BucketShard.close`. Weights that were written become master weights, which keep the digits that a
        weight does not have unless it has changed."""
        host, self._host = self._host, None
        if host is not None and not host.is_still(host.parts):
            self.open(state)
            self._write_masters(host.parts)
        return super().close(state)

    def _write_masters(self, weights: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for piece, new in zip(self.pieces, weights, strict=True):
                master = piece.master.data
                master.copy_(torch.where(master.to(new.dtype) == new, master, new.to(master.dtype)))
