# SPDX-License-Identifier: Apache-2.0
"""This rank's shard of parameters whose values are gathered only while the model uses them.

When they are gathered and freed, and what a rank keeps meanwhile, is the same on every device. Devices differ in how
memory is freed, and in how it is seen that a loop has written to a parameter:
:class:`~neuron_accel.engine.shards.eager_gathered_shard.EagerGatheredShard` frees the storage of a flat buffer,
:class:`~neuron_accel.engine.shards.lazy_gathered_shard.LazyGatheredShard` leaves values to the graph.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from neuron_accel.engine.sharding.parameters import WeightShard
from neuron_accel.engine.shards.shard import BucketShard
from neuron_accel.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group, Pending


class GatheredShard(BucketShard):
    """The shard of a bucket of one unit (:class:`~neuron_accel.engine.shards.unit.Unit`).

    Args:
        read: called with this shard before one of its parameters is read in full: frees the one that was read before.
        take_over: applies what was written to this shard by parameter (:meth:`close`).
        loaded: this rank's weights, ``[partition.chunk]``, if the parameters have no values yet.
        near: the ranks between which parameters are gathered again after :meth:`reshard`; None for all.

    Attributes:
        is_gathered: whether the parameters have their values.
        is_held: whether they keep them, and may be written to, until they are no longer held.
        values: these values, one for each parameter, while they are gathered.
        near_part: what this rank keeps of them since they were resharded, ``[partition.numel / near.size]``.
    """

    can_hold: ClassVar[bool] = False
    """Whether :meth:`hold` is available."""

    values: Sequence[torch.Tensor]
    _empty: list[torch.Tensor]
    """What the parameters are while they have no values, each in the parameter's shape and dtype."""

    def __init__(
        self,
        *,
        read: Callable[[GatheredShard], None],
        take_over: Callable[[], None],
        loaded: torch.Tensor | None = None,
        near: Group | None = None,
        **common: Any,
    ) -> None:
        self._read, self._take_over_writes, self._near, self._given = read, take_over, near, loaded
        self.near_part: torch.Tensor | None = None
        self._arriving: Pending | None = None
        self.is_gathered, self.is_held = True, False
        super().__init__(**common)
        self._given = None
        self._versions = [parameter._version for parameter in self.parameters]
        if self.is_sharded:
            self._make_empty()
            self._describe()
            self._free()

    def _describe(self) -> None:
        """Records which elements of each parameter this rank keeps."""
        spans = {piece.span.parameter: piece.span for piece in self.pieces}
        for index, record in enumerate(self.bucket.records):
            span = spans.get(index)
            record.weights = WeightShard(
                read=partial(self._own_part, index),
                start=0 if span is None else span.start,
                stop=0 if span is None else span.stop,
                axes=self.bucket.reduction_axes,
                gather=partial(self._full_weight, index),
                changed=self.release,
                hold=self.hold if self.can_hold else None,
            )

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks keep a part of the parameters."""
        return self.group.size > 1

    @property
    def is_arriving(self) -> bool:
        """Whether the values are being gathered."""
        return self._arriving is not None

    # ---- what a device does ------------------------------------------------------------------------------------------
    @abstractmethod
    def _make_empty(self) -> None:
        """Sets what the parameters are while they have no values."""

    @abstractmethod
    def _own_weights_now(self) -> torch.Tensor:
        """Returns this rank's weights in the parameters' dtype, ``[partition.chunk]``."""

    @abstractmethod
    def _own_part(self, index: int) -> torch.Tensor:
        """Returns this rank's elements of one parameter, which may be written to; none if it has none."""

    @abstractmethod
    def _start(self, own: torch.Tensor, group: Group) -> Pending:
        """Starts to gather what each rank of ``group`` has."""

    @abstractmethod
    def _arrived(self, flat: Any) -> Sequence[torch.Tensor]:
        """Returns the values of the parameters, when what :meth:`_start` returned is complete."""

    @abstractmethod
    def _near_chunk(self) -> torch.Tensor | None:
        """Returns this rank's part of the values among the near ranks; None if they are to be gathered from all."""

    @abstractmethod
    def _free(self, *, kept: bool = False) -> None:
        """Takes the values from the parameters."""

    @abstractmethod
    def _full_values(self) -> Sequence[torch.Tensor]:
        """Returns the values of all parameters, to be read. Collective."""

    @abstractmethod
    def _take_written(self) -> None:
        """Takes values that a loop has assigned, ``parameter.data = ...``, or written into a parameter, into the
        shard."""

    # ---- the values of the parameters --------------------------------------------------------------------------------
    def _set(self, tensors: Iterable[torch.Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor
        self._versions = [parameter._version for parameter in self.parameters]

    def own(self) -> torch.Tensor:
        """Returns what this rank sends, in the parameters' dtype: ``[partition.chunk]``, or :attr:`near_part`."""
        self.sync_user_weights()
        return self._own_weights_now() if self.near_part is None else self.near_part

    def start_gather(self, own: torch.Tensor | None = None) -> None:
        """Starts to gather, unless that is under way or done. Collective.

        Args:
            own: :meth:`own`, behind a barrier; None to begin at any time.
        """
        if self.is_gathered or self._arriving is not None:
            return
        with torch.no_grad():
            own = self.own() if own is None else own
        group = self.group if self._near is None or self.near_part is None else self._near
        self._arriving = self._start(own, group)

    def gather(self) -> None:
        """The parameters have their values when this returns. Collective."""
        self.start_gather()
        if self._arriving is None:
            return
        with torch.no_grad():
            self.values = self._arrived(self._arriving.wait())
        self._arriving = self.near_part = None
        self._set(self.values)
        self.is_gathered = True

    def reshard(self) -> None:
        """Frees the gathered values, but for this rank's part among the near ranks."""
        part = None
        if self._near is not None and self.is_sharded and self.is_gathered:
            self.sync_user_weights()
            with torch.no_grad():
                part = self._near_chunk()
        self.release()
        self.near_part = part

    def release(self, *, kept: bool = False) -> None:
        """Frees the gathered values, unless they are held. If the loop may have ``kept`` tensors of them, these keep
        their values."""
        if self.is_held:
            return
        self.near_part = None
        if not self.is_sharded or not (self.is_gathered or self.is_arriving):
            return
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
        self.sync_user_weights()
        self._free(kept=kept)

    def hold(self, held: bool) -> None:
        """Gathers the values, to be read and written, and keeps them; or takes what was written, and frees them.
        Collective."""
        if held:
            self.gather()
        elif self.is_held:
            self.sync_user_weights()
        was_held, self.is_held = self.is_held, held
        if not held:
            self.release(kept=was_held)

    def dissolve(self) -> None:
        """Gives the parameters their values in full, in memory of their own; this shard is not used any more.
        Collective."""
        self.sync_user_weights()
        self.release()  # a rank that has run out of data has not gathered them
        if self.is_sharded:
            self._set([value.clone().to(self._device) for value in self._full_values()])
            for record in self.bucket.records:
                record.weights = None
        self.is_gathered, self.values = False, []

    def _full_weight(self, index: int) -> torch.Tensor:
        self._read(self)
        return self._full_values()[index]

    # ---- what the optimizer does -------------------------------------------------------------------------------------
    def before_update(self, state: Any, *, by_gradients: bool) -> dict[torch.Tensor, list[torch.nn.Parameter]]:
        if self.is_held:
            raise UsageError(
                "The optimizer cannot step while the loop writes to the full weights.",
                where="`accelerator.full_weights`",
                why="the weights that it holds would be those before the step",
                fix="leave the context before `optimizer.step()`",
            )
        return super().before_update(state, by_gradients=by_gradients)

    def send_weights(self) -> Callable[[], Any]:
        """Nothing travels before the next forward pass."""
        if not self.is_sharded:
            return super().send_weights()  # type: ignore[safe-super]  # that of the device's shard
        self.release()
        return lambda: None

    def sync_user_weights(self) -> None:
        """Takes values that a loop has assigned or written into a parameter into the shard."""
        if self.is_sharded:
            self._take_written()
        else:
            super().sync_user_weights()  # type: ignore[safe-super]
