"""This rank's share of a bucket on a device that runs one compiled graph on all ranks.

Every rank's pieces look the same there (:mod:`neuron_accel.strategies.zero1.partition`), and lie one after another in
one tensor, which the optimizer updates as a whole: a step of Adam is forty operations, whatever the number of
parameters, and a compiler takes its time for each. The graph makes tensors anew rather than write into views of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import xxhash
from torch import nn

from neuron_accel.contract import GradientPart
from neuron_accel.strategies.zero1.partition import LazyPartition, Span
from neuron_accel.strategies.zero1.shard import BucketShard
from neuron_accel.strategies.zero1.sharded_grad import ParameterShard


@dataclass
class LazyParameterShard(ParameterShard):
    """A piece that lies in its shard's tensor. ``master`` is empty unless the shard is open; then it is a copy on the
    host."""

    shard: LazyShard

    @property
    def grad(self) -> torch.Tensor | None:
        return self.shard.gradient_of(self.place)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise ValueError("the gradient of a joined piece is that of its shard")


class LazyShard(BucketShard):
    """The share of a bucket in one tensor.

    A parameter that has no gradient in a step is left as it is, with its state; only counters of steps, of which there
    is one for the whole share, count it.

    Attributes:
        flat: the masters, ``[partition.chunk]``.
    """

    partition: LazyPartition

    def __init__(self, **common: Any) -> None:
        super().__init__(**common)
        with torch.no_grad():
            self.flat = nn.Parameter(self._own_weights().to(self._device))
        self.pieces = [
            LazyParameterShard(
                parameter=self.parameters[place.parameter],
                place=place,
                master=nn.Parameter(torch.empty(0, dtype=self.optimizer_dtype)),
                shard=self,
            )
            for place in self.partition.pieces(self.group.index)
        ]
        self._opened: dict[nn.Parameter, dict[str, Any]] | None = None
        self._copies: dict[str, _HostCopy] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._masks: dict[tuple[bool, ...], torch.Tensor] = {}

    @property
    def has_masters(self) -> bool:
        return True

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device

    def updated(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [(self.parameters[0], self.flat)]

    def _own_weights(self) -> torch.Tensor:
        """This rank's chunk, on the host: cut on the device, it would make another graph of the first step."""
        values = [self.run.backend.to_host(parameter) for parameter in self.parameters]
        flat = self.partition.join(values, self.bucket.dtype, torch.device("cpu"))
        return flat.chunk(self.partition.degree)[self.group.index].to(self.optimizer_dtype)

    # ---- gradients -------------------------------------------------------------------------------------------------
    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        parts = self.partition.split(flat)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def _join(self, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
        return self.partition.join(values, self.reduce_dtype, self._device)

    @staticmethod
    def _scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
        return gradient * scale if scale != 1.0 else gradient

    def _hand_out(self, gradient: torch.Tensor) -> None:
        self._gradient = gradient
        self._gathered.forget()

    def drop_gradients(self) -> None:
        self._gradient = None
        super().drop_gradients()

    def _forget_all_but(self, kept: Sequence[bool]) -> None:
        before = self.used_anywhere
        super()._forget_all_but(kept)
        if self._gradient is None:
            return
        for piece in self.pieces:
            index = piece.place.parameter
            if before[index] and not self.used_anywhere[index]:
                self._part(self._gradient, piece).zero_()

    def _part(self, chunk: torch.Tensor, piece: ParameterShard) -> torch.Tensor:
        return chunk[piece.place.offset : piece.place.offset + piece.place.length]

    def gradient_of(self, place: Span) -> torch.Tensor | None:
        """The part of the reduced gradient at a piece; a view."""
        if self._gradient is None or not self.used_anywhere[place.parameter]:
            return None
        return self._gradient[place.offset : place.offset + place.length]

    def gradient_parts(self, wanted: Collection[nn.Parameter]) -> list[GradientPart]:
        """Neighbours that count alike in a norm are one part."""
        self.before_change()
        if self._gradient is None:
            return []

        def kind(piece: ParameterShard) -> tuple[bool, tuple[str, ...], int]:
            index = piece.place.parameter
            record = self.bucket.records[index]
            return piece.parameter in wanted and self.used_anywhere[index], self._axes_of(record), record.replicas

        parts = []
        for (counts, axes, replicas), neighbours in groupby(self.pieces, kind):
            places = [piece.place for piece in neighbours]
            begin, end = places[0].offset, places[-1].offset + places[-1].length
            if counts:
                is_all = begin == 0 and end == len(self._gradient)
                parts.append(GradientPart(self._gradient if is_all else self._gradient[begin:end], axes, replicas))
        return parts

    # ---- updates ---------------------------------------------------------------------------------------------------
    def before_update(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self.flat.grad = self._gradient if any(self.used_anywhere) else None
        if any(self.used_anywhere) and not all(self.used_anywhere):
            self._before = {name: value.clone() for name, value in self._like_flat(state).items()}

    def after_update(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        self.flat.grad = None
        if not any(self.used_anywhere) or all(self.used_anywhere):
            return
        before, self._before = self._before, {}
        mask = self._mask()
        with torch.no_grad():
            for name, value in self._like_flat(state).items():
                value.copy_(torch.where(mask, value, before.get(name, 0.0)))

    def _like_flat(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> dict[str, torch.Tensor]:
        """The masters, under an empty name, and the entries that have an element for each of theirs."""
        entries = {name: value for name, value in state.get(self.flat, {}).items() if self._is_like_flat(value)}
        return {"": self.flat.detach(), **entries}

    def _is_like_flat(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.flat.shape

    def _mask(self) -> torch.Tensor:
        """Which elements belong to parameters that have a gradient: bool ``[partition.chunk]``, device data."""
        key = tuple(self.used_anywhere)
        if key not in self._masks:
            parts = [torch.full((p.place.length,), self.used_anywhere[p.place.parameter]) for p in self.pieces]
            self._masks[key] = torch.cat(parts).to(self._device)
        return self._masks[key]

    def send_weights(self) -> Callable[[], None]:
        pending = self.run.backend.start_all_gather(self.flat.detach().to(self.bucket.dtype), self.group)

        def finish() -> None:
            with torch.no_grad():
                for parameter, value in zip(self.parameters, self._split(pending.wait()), strict=True):
                    parameter.copy_(value)

        return finish

    def reload(self) -> None:
        with torch.no_grad():
            self.flat.copy_(self._own_weights())

    # ---- masters and state by pieces -------------------------------------------------------------------------------
    def open(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> MutableMapping[Any, dict[str, Any]]:
        """Copies on the host, so that no graphs are made of parts. Collective, as reading the device is."""
        if self._opened is None:
            self._copies = {name: self._copied(value) for name, value in self._like_flat(state).items()}
            entries = state.get(self.flat, {})
            self._opened = {}
            for index, piece in enumerate(self.pieces):
                piece.master.data = self._copies[""].parts[index]
                if entries:
                    self._opened[piece.master] = {
                        name: self._copies[name].parts[index] if name in self._copies else value
                        for name, value in entries.items()
                    }
        return self._opened  # type: ignore[return-value]

    def close(self, state: MutableMapping[torch.Tensor, dict[str, Any]]) -> None:
        """What was not written stays as it is on the device: new data would cost a transfer, and the next step a graph
        of its own."""
        if self._opened is None:
            return
        opened, self._opened = self._opened, None
        copies, self._copies = self._copies, {}
        masters = [piece.master.detach() for piece in self.pieces]
        if not copies[""].is_still(masters):
            with torch.no_grad():
                self.flat.data = torch.cat(masters).to(self._device)
        entries = [opened.get(piece.master, {}) for piece in self.pieces]
        before, after = state.pop(self.flat, {}), {}
        for name in dict.fromkeys(name for mine in entries for name in mine):
            values = [mine.get(name) for mine in entries]
            if name in copies:
                unchanged = copies[name].is_still(values)
            else:  # a counter, which is the same object for all pieces
                unchanged = name in before and all(value is before[name] for value in values)
            after[name] = before[name] if unchanged else self._joined(values)
        if after:
            state[self.flat] = after
        for piece in self.pieces:
            piece.master.data = torch.empty(0, dtype=self.optimizer_dtype)

    def _copied(self, value: torch.Tensor) -> _HostCopy:
        host = self.run.backend.to_host(value.detach())
        return _HostCopy(host, [self._part(host, piece) for piece in self.pieces])

    def _joined(self, values: Sequence[Any]) -> Any:
        """One entry of all pieces: put together where it has elements of its own; a counter is that of the piece that
        has counted most."""
        present = [value for value in values if value is not None]
        lengths = [piece.place.length for piece in self.pieces]
        if isinstance(present[0], torch.Tensor) and present[0].dim():
            dtype = present[0].dtype
            parts = [
                torch.zeros(n, dtype=dtype) if v is None else v.cpu() for v, n in zip(values, lengths, strict=True)
            ]
            return torch.cat(parts).to(self._device)
        if isinstance(present[0], torch.Tensor):
            return max((value.cpu() for value in present), key=float)
        return present[0]


class _HostCopy:
    """A tensor of the shard on the host, in parts that others may write to or replace.

    Args:
        whole: ``[partition.chunk]``.
        parts: views of it, one for each piece.
    """

    def __init__(self, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        self.parts = parts
        self._gathered, self._digest = whole, _digest(whole)

    def is_still(self, values: Sequence[Any]) -> bool:
        """Whether ``values`` are the parts, and were not written to. Writing past autograd leaves no trace but
        in the contents."""
        same = all(
            isinstance(v, torch.Tensor) and _place(v) == _place(p) for v, p in zip(values, self.parts, strict=True)
        )
        return same and _digest(self._gathered) == self._digest


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype, torch.Size]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape


def _digest(tensor: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(tensor.contiguous().view(torch.uint8).numpy().data))
