# SPDX-License-Identifier: Apache-2.0
"""Gathered parameters on a device that runs one compiled graph on all ranks.

Storage cannot be freed in a graph, and need not be: a value is in memory from the operation that computes it to the
last one that reads it. Between uses a parameter has no values at all (:meth:`Backend.placeholder`), so a graph neither
receives nor returns its full weight. A rank keeps only the master weights, from which weights are gathered in their own
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from neuron_accel.engine.shards.gathered_shard import GatheredShard
from neuron_accel.engine.shards.lazy_shard import HostCopy, LazyShard
from neuron_accel.engine.shards.shard import updated

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import nn

    from neuron_accel.backends.group import Group, Pending


class LazyGatheredShard(GatheredShard, LazyShard):
    """See :class:`GatheredShard`; a parameter without values is a placeholder."""

    def __init__(self, **common: Any) -> None:
        self._host: HostCopy | None = None  # this rank's weights, which may be written to
        self._host_full: Sequence[torch.Tensor] = []  # those of all ranks
        self._flat: torch.Tensor | None = None  # the values in one tensor
        super().__init__(**common)

    def _own_weights(self) -> torch.Tensor:
        return super()._own_weights() if self._given is None else self._given.to(self.optimizer_dtype)

    def _make_empty(self) -> None:
        self._empty = [self.run.backend.placeholder(parameter) for parameter in self.parameters]

    # ---- the values of the parameters --------------------------------------------------------------------------------
    def _own_weights_now(self) -> torch.Tensor:
        self._take_over_writes()
        return self._chunk().to(self.bucket.dtype)

    def _start(self, own: torch.Tensor, group: Group) -> Pending:
        return self.run.backend.start_all_gather(own, group)

    def _arrived(self, flat: torch.Tensor) -> Sequence[torch.Tensor]:
        self._flat = flat
        return [value.clone() for value in self._split(flat)]

    def _near_chunk(self) -> torch.Tensor | None:
        return None if self._flat is None else self.run.backend.chunk(self._flat, self._near)  # type: ignore[arg-type]

    def release(self, *, kept: bool = False) -> None:
        self._host_full = []
        super().release(kept=kept)

    def _free(self, *, kept: bool = False) -> None:
        self.is_gathered, self.values, self._flat = False, [], None
        for index, parameter in enumerate(self.parameters):
            if not self.run.backend.is_placeholder(self._empty[index]):  # a loop has written to it
                self._empty[index] = self.run.backend.placeholder(parameter)
        self._set(self._empty)

    # ---- what a loop writes ------------------------------------------------------------------------------------------
    def reload(self) -> None:
        """The master weights are the weights; :meth:`close` applies those that were written."""
        if not self.is_sharded:
            super().reload()

    def _take_written(self) -> None:
        written = [index for index, parameter in enumerate(self.parameters) if self._is_written(index, parameter)]
        for index in written:
            self._check_form(index)
            self._take(index, self.parameters[index])
        if written:
            self._take_over_writes()
            if not self.is_gathered:
                self._free()

    def _note_weights(self) -> None:
        if not self.is_sharded:
            super()._note_weights()

    def _is_written(self, index: int, parameter: nn.Parameter) -> bool:
        if not self.is_gathered:
            return not self.run.backend.is_placeholder(parameter)
        is_same = torch._C._is_alias_of(parameter, self.values[index])  # type: ignore[attr-defined]  # not in its stubs
        return not is_same or parameter._version != self._versions[index]

    def _take(self, index: int, parameter: nn.Parameter) -> None:
        self._flat = self.near_part = None
        span = self.pieces[index].span
        value = self.run.backend.to_host(parameter.detach()).reshape(-1)[span.start : span.stop]
        self._own_part(index).copy_(value)
        if self.is_gathered:
            self.values[index] = parameter.detach()  # type: ignore[index]  # a list
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

    def _own_part(self, index: int) -> torch.Tensor:
        self._keep_on_host()
        assert self._host is not None
        span = self.pieces[index].span
        return self._host.parts[index][: span.stop - span.start]

    def _full_values(self) -> Sequence[torch.Tensor]:
        if not self._host_full:
            self._keep_on_host()
            assert self._host is not None
            own = torch.cat(list(self._host.parts))
            self._host_full = self._split(self.run.backend.all_gather(own, self.group))
        return self._host_full

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """See :meth:`BucketShard.close`. Weights that were written become master weights, which keep the digits that a
        weight does not have unless it has changed."""
        host, self._host = self._host, None
        if host is not None and not host.is_still(host.parts):
            self.open(state)
            with torch.no_grad():
                for piece, new in zip(self.pieces, host.parts, strict=True):
                    piece.master.data.copy_(updated(piece.master.data, new))
        return super().close(state)
