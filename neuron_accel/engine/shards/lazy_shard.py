# SPDX-License-Identifier: Apache-2.0
"""This rank's shard of a bucket on a device that runs one compiled graph on all ranks.

Parameter shards have equal sizes on all ranks (:mod:`neuron_accel.engine.shards.partition`) and are consecutive in
one tensor, which the optimizer updates: a step of Adam is then forty operations for any number of parameters, and each
operation costs compile time. Parameters without a gradient in some step are updated separately from then on, since an
optimizer has one step counter per tensor. The graph creates new tensors instead of writing into views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import xxhash
from torch import nn

from neuron_accel.engine.optim.buckets import check_dense
from neuron_accel.engine.optim.norms import GradientPart
from neuron_accel.engine.shards.partition import LazyPartition, Span
from neuron_accel.engine.shards.shard import BucketShard, ParameterShard, updated
from neuron_accel.engine.shards.sharded_grad import ShardedGrad

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group


@dataclass(eq=False)
class FlatMaster:
    """The master weights of parameters that have trained at the same steps, in one tensor, which the optimizer updates.

    Args:
        pieces: the parameter shards, in the order of the chunk.
        value: their concatenated master weights, ``[sum(self.lengths)]``, in the optimizer's dtype.
    """

    pieces: list[LazyParameterShard]
    value: nn.Parameter

    @property
    def lengths(self) -> list[int]:
        return [piece.span.length for piece in self.pieces]

    def entries(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns the entries of the optimizer's state that have the shape of the master weights, and the master
        weights under an empty name."""
        known = state.get(self.value, {})
        return {"": self.value.detach(), **{name: value for name, value in known.items() if self._is_like(value)}}

    def _is_like(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.value.shape

    def split(self, kinds: Sequence[Hashable], state: MutableMapping[torch.Tensor, dict[str, Any]]) -> list[FlatMaster]:
        """Splits the tensor into one for each kind, with their parts of the state and step counters of their own.

        Args:
            kinds: the kind of each parameter shard.
            state: the optimizer's state.
        """
        known, like = state.get(self.value, {}), self.entries(state)
        parts = {name: value.split(self.lengths) for name, value in like.items()}
        state.pop(self.value, None)
        result = []
        for kind in dict.fromkeys(kinds):
            chosen = [index for index, other in enumerate(kinds) if other == kind]
            mine = {name: torch.cat([values[index] for index in chosen]) for name, values in parts.items()}
            master = FlatMaster([self.pieces[index] for index in chosen], nn.Parameter(mine.pop("")))
            vars(master.value).update(vars(self.value))
            if known:
                state[master.value] = {
                    name: mine[name] if name in mine else value.clone() if isinstance(value, torch.Tensor) else value
                    for name, value in known.items()
                }
            result.append(master)
        return result


@dataclass
class LazyParameterShard(ParameterShard):
    """A parameter shard that is a slice of a larger tensor. ``master`` is empty unless the shard is open; then it is a
    copy on the CPU."""

    shard: LazyShard

    @property
    def grad(self) -> torch.Tensor | None:
        return self.shard.gradient_of(self.span)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise ValueError("the gradient of a parameter in a lazy shard is that of the shard")


class LazyShard(BucketShard):
    """The shard of a bucket in one tensor, or in several if some parameters have no gradient in a step: their weights,
    state and step counters are then not changed.

    Attributes:
        masters: the tensors that the optimizer updates.
    """

    joins: ClassVar[bool] = True
    partition: LazyPartition
    pieces: list[LazyParameterShard]  # type: ignore[assignment]  # a list is not covariant

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        self.pieces = [
            LazyParameterShard(
                parameter=self.parameters[span.parameter],
                span=span,
                master=nn.Parameter(torch.empty(0, dtype=self.optimizer_dtype)),
                shard=self,
            )
            for span in self.partition.spans(self.group.index)
        ]
        weights = self._own_weights()
        with torch.no_grad():
            self.masters = [
                FlatMaster(pieces, nn.Parameter(self._at(pieces, weights).to(self._device)))
                for pieces in ([[piece] for piece in self.pieces] if self._apart else [self.pieces])
            ]
        self._opened: dict[nn.Parameter, dict[str, Any]] | None = None
        self._copies: dict[FlatMaster, dict[str, HostCopy]] = {}
        self._note_weights()

    def updated(self) -> list[tuple[nn.Parameter, Sequence[ParameterShard]]]:
        return [(master.value, master.pieces) for master in self.masters]

    def _at(self, pieces: Sequence[LazyParameterShard], chunk: torch.Tensor) -> torch.Tensor:
        """Returns the elements of a chunk that belong to ``pieces``, concatenated."""
        if len(pieces) == len(self.pieces):
            return chunk
        return torch.cat([self._part(chunk, piece) for piece in pieces])

    def _own_weights(self) -> torch.Tensor:
        """Returns this rank's chunk of the weights, on the CPU. Slicing on the device would add a graph to the first
        step."""
        values = [self.run.backend.to_host(parameter) for parameter in self.parameters]
        flat = self.partition.join(values, self.bucket.dtype, torch.device("cpu"))
        return flat.chunk(self.partition.degree)[self.group.index].to(self.optimizer_dtype)

    # ---- gradients ---------------------------------------------------------------------------------------------------
    def take_gradient(self, index: int) -> None:
        """Nothing: gradients are concatenated in the graph."""

    def send_gradients(self) -> None:
        gradients, kept = [], []
        for index, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is not None:
                check_dense(gradient, self.bucket.records[index])
            kept.append(gradient is not None and gradient is self._visible[index])
            gradients.append(gradient.take_waiting() if isinstance(gradient, ShardedGrad) else gradient)
            parameter.grad = None
        self.before_change()
        self._forget_all_but(kept)
        self.used = [gradient is not None for gradient in gradients]
        flat = self.partition.join(gradients, self.reduce_dtype, self._device)
        self._pending = self.run.backend.start_reduce_scatter(flat, self.group)

    def _scaled_sum(self, scale: float, partial: Group) -> torch.Tensor:
        self.complete()
        assert self._reduced is not None
        gradient, self._reduced = self._reduced, None
        if partial.size > 1:
            gradient = self.run.backend.all_reduce(gradient, partial)
        gradient = gradient.to(self.optimizer_dtype)
        return gradient * scale if scale != 1.0 else gradient

    def _hand_out(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient
        self._gathered = []

    def drop_gradients(self) -> None:
        self._gradient = None
        super().drop_gradients()

    def _forget_all_but(self, kept: Sequence[bool]) -> None:
        before = self.used_anywhere
        super()._forget_all_but(kept)
        if self._gradient is None:
            return
        for piece in self.pieces:
            index = piece.span.parameter
            if before[index] and not self.used_anywhere[index]:
                self._part(self._gradient, piece).zero_()

    def gradient_of(self, span: Span) -> torch.Tensor | None:
        """Returns the elements of the reduced gradient in ``span``, a view, or None."""
        if self._gradient is None or not self.used_anywhere[span.parameter]:
            return None
        return span.of_chunk(self._gradient)

    def gradient_parts(self, wanted: Collection[nn.Parameter]) -> list[GradientPart]:
        """See :meth:`BucketShard.gradient_parts`. Neighbouring shards with equal axes are one part."""
        self.before_change()
        if self._gradient is None:
            return []

        def kind(piece: ParameterShard) -> tuple[bool, tuple[str, ...], int]:
            index = piece.span.parameter
            return piece.parameter in wanted and self.used_anywhere[index], *self.norm_axes[index]

        parts = []
        for (counts, axes, replicas), neighbours in groupby(self.pieces, kind):
            spans = [piece.span for piece in neighbours]
            begin, end = spans[0].offset, spans[-1].offset + spans[-1].length
            if counts:
                is_all = begin == 0 and end == len(self._gradient)
                parts.append(GradientPart(self._gradient if is_all else self._gradient[begin:end], axes, replicas))
        return parts

    # ---- updates ---------------------------------------------------------------------------------------------------
    def _split_masters(
        self,
        kinds: Mapping[FlatMaster, Sequence[Hashable]],
        state: MutableMapping[torch.Tensor, dict[str, Any]],
    ) -> dict[torch.Tensor, list[nn.Parameter]]:
        replaced: dict[torch.Tensor, list[nn.Parameter]] = {}
        masters: list[FlatMaster] = []
        for master in self.masters:
            if len(set(kinds[master])) < 2:
                masters.append(master)
                continue
            with torch.no_grad():
                parts = master.split(kinds[master], state)
            replaced[master.value] = [part.value for part in parts]
            masters += parts
        self.masters = masters
        return replaced

    def before_update(
        self, state: MutableMapping[torch.Tensor, dict[str, Any]], *, by_gradients: bool
    ) -> dict[torch.Tensor, list[nn.Parameter]]:
        kinds = {m: [self.used_anywhere[piece.span.parameter] for piece in m.pieces] for m in self.masters}
        replaced = self._split_masters(kinds, state) if by_gradients else {}
        for master in self.masters:
            is_used = self._gradient is not None and self.used_anywhere[master.pieces[0].span.parameter]
            master.value.grad = self._at(master.pieces, self._gradient) if is_used else None  # type: ignore[arg-type]
        return replaced

    def after_update(self) -> None:
        for master in self.masters:
            master.value.grad = None

    def _chunk(self) -> torch.Tensor:
        """Returns the master weights in the order of the buffer, ``[partition.chunk]``."""
        if len(self.masters) == 1:
            return self.masters[0].value.detach()
        parts = {
            piece.span.offset: part
            for master in self.masters
            for piece, part in zip(master.pieces, master.value.detach().split(master.lengths), strict=True)
        }
        return torch.cat([parts[piece.span.offset] for piece in self.pieces])

    def send_weights(self) -> Callable[[], None]:
        pending = self.run.backend.start_all_gather(self._chunk().to(self.bucket.dtype), self.group)

        def finish() -> None:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, self._split(pending.wait()), strict=True):
                    parameter.copy_(value)
            self._note_weights()

        return finish

    def reload(self) -> None:
        weights = self._own_weights()
        with torch.no_grad():
            for master in self.masters:
                master.value.copy_(self._at(master.pieces, weights))
        self._note_weights()

    def sync_user_weights(self) -> None:
        """Takes weights that the user has assigned or written to into the master weights, which keep the digits that a
        weight does not have unless it has changed. A step before which nothing was written has the same graph as
        ever."""
        if not self._is_any_written():
            return
        with torch.no_grad():
            flat = self.partition.join([p.detach() for p in self.parameters], self.bucket.dtype, self._device)
            own = self.run.backend.chunk(flat, self.group)
            for master in self.masters:
                master.value.copy_(updated(master.value, self._at(master.pieces, own)))
        self._note_weights()

    def _note_weights(self) -> None:
        """What is written to the parameters from now on is the user's."""
        aliases = [parameter.detach() for parameter in self.parameters]
        self._noted = [(alias, _writes(alias)) for alias in aliases]

    def _is_any_written(self) -> bool:
        return any(
            not torch._C._is_alias_of(parameter, alias) or _writes(alias) != writes  # type: ignore[attr-defined]
            for parameter, (alias, writes) in zip(self.parameters, self._noted, strict=True)
        )

    # ---- masters and state by parameter ------------------------------------------------------------------------------
    def open(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> MutableMapping[Any, dict[str, Any]]:
        """See :meth:`BucketShard.open`. Copies to the CPU, where slices are not compiled. Collective, because it reads
        the device."""
        if self._opened is None:
            self._opened = {}
            for master in self.masters:
                self._open_master(master, state, self._opened)
        return self._opened  # type: ignore[return-value]

    def _open_master(
        self,
        master: FlatMaster,
        state: Mapping[torch.Tensor, dict[str, Any]],
        opened: dict[nn.Parameter, dict[str, Any]],
    ) -> None:
        copies = {
            name: HostCopy(self.run.backend.to_host(value.detach()), master.lengths)
            for name, value in master.entries(state).items()
        }
        self._copies[master] = copies
        entries = state.get(master.value, {})
        for index, piece in enumerate(master.pieces):
            piece.master.data = copies[""].parts[index]
            if entries:
                opened[piece.master] = {
                    name: copies[name].parts[index] if name in copies else value for name, value in entries.items()
                }

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> dict[torch.Tensor, list[nn.Parameter]]:
        """See :meth:`BucketShard.close`. Values that were not written are not copied to the device: this would cost a
        transfer, and the next step would be a graph of its own."""
        if self._opened is None:
            return {}
        opened, self._opened = self._opened, None
        copies, self._copies = self._copies, {}

        def entries(master: FlatMaster) -> list[Mapping[str, Any]]:
            return [opened.get(piece.master, {}) for piece in master.pieces]

        kinds = {master: _kinds(entries(master), self.run.backend.to_host) for master in self.masters}
        replaced = self._split_masters(kinds, state)
        is_loaded = False
        for master in self.masters:
            is_loaded |= self._take_over(master, entries(master), copies.get(master, {}), state)
        for piece in self.pieces:
            piece.master.data = torch.empty(0, dtype=self.optimizer_dtype)
        if is_loaded:  # so were the weights
            self._note_weights()
        return replaced

    def _take_over(
        self,
        master: FlatMaster,
        entries: Sequence[Mapping[str, Any]],
        copies: Mapping[str, HostCopy],
        state: MutableMapping[torch.Tensor, dict[str, Any]],
    ) -> bool:
        """Applies values that were written to the parameter shards of one tensor, and to their ``entries`` of the
        state. Returns whether master weights were written."""
        values: list[Any] = [piece.master.detach() for piece in master.pieces]
        is_written = not copies or not copies[""].is_still(values)
        if is_written:
            with torch.no_grad():
                master.value.data = torch.cat(values).to(self._device)
        before, after = state.pop(master.value, {}), {}
        for name in dict.fromkeys(name for mine in entries for name in mine):
            values = [mine.get(name) for mine in entries]
            if name in copies:
                unchanged = copies[name].is_still(values)
            else:  # a step counter, which is the same object for all parameters
                unchanged = name in before and all(value is before[name] for value in values)
            after[name] = before[name] if unchanged else self._joined(values, master.lengths)
        if after:
            state[master.value] = after
        return is_written

    def _joined(self, values: Sequence[Any], lengths: Sequence[int]) -> Any:
        """Returns one entry of all shards: concatenated if it has dims, else the one counter, which is equal for
        all."""
        present = [value for value in values if value is not None]
        if isinstance(present[0], torch.Tensor) and present[0].dim():
            dtype = present[0].dtype
            parts = [
                torch.zeros(n, dtype=dtype) if v is None else v.cpu() for v, n in zip(values, lengths, strict=True)
            ]
            return torch.cat(parts).to(self._device)
        return present[0].cpu() if isinstance(present[0], torch.Tensor) else present[0]


def _kinds(entries: Sequence[Mapping[str, Any]], to_host: Callable[[torch.Tensor], torch.Tensor]) -> list[Hashable]:
    """Returns a kind for each parameter shard; shards of one kind all have state with equal step counters, or none."""
    counters: list[list[Hashable]] = [[bool(mine)] for mine in entries]
    for name in dict.fromkeys(name for mine in entries for name in mine):
        values = [mine.get(name) for mine in entries]
        if any(isinstance(value, torch.Tensor) and value.dim() for value in values):
            continue
        if len({id(value) for value in values}) > 1:  # the same object need not be read
            for mine, value in zip(counters, values, strict=True):
                mine.append(repr(float(to_host(value))) if isinstance(value, torch.Tensor) else repr(value))
    return [tuple(mine) for mine in counters]


def _writes(tensor: torch.Tensor) -> int:
    """How often the storage was written to, by any alias of it. Unlike ``_version`` this counts ``.data``."""
    return torch._functionalize_mutation_counter(tensor) if torch._is_functional_tensor(tensor) else tensor._version


class HostCopy:
    """A copy of a tensor on the CPU, in slices that the caller may write to or replace.

    Args:
        full: the copy, ``[sum(lengths)]``.
        lengths: lengths of the slices, which are views of it.
    """

    def __init__(self, full: torch.Tensor, lengths: Sequence[int]) -> None:
        self.parts = full.split(list(lengths))
        self._gathered, self._digest = full, _digest(full)

    def is_still(self, values: Sequence[Any]) -> bool:
        """Returns whether ``values`` are the slices and were not written to. Contents are compared, since writes may
        bypass autograd's version counter."""
        same = all(
            isinstance(v, torch.Tensor) and _memory(v) == _memory(p) for v, p in zip(values, self.parts, strict=True)
        )
        return same and _digest(self._gathered) == self._digest


def _memory(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def _digest(tensor: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(tensor.contiguous().view(torch.uint8).numpy().data))
