# SPDX-License-Identifier: Apache-2.0
"""The mean over islands of a flat tensor, in float32, bfloat16 or int8 on the wire.

In int8 each block of :data:`BLOCK` elements has a scale, the largest absolute value in it divided by 127. Islands
exchange chunks by an all-to-all, average them in float32, and gather the means, encoded once more: as many messages as
a ring, and every island decodes the same bytes, so that their results are equal bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from neuron_accel.contract import Pending

if TYPE_CHECKING:
    from neuron_accel.contract import Backend, Group

BLOCK = 256
"""Number of elements that share a scale in int8."""


def start_mean(values: torch.Tensor, group: Group, backend: Backend, wire: str) -> Mean:
    """Starts the mean of ``values`` over the ranks of ``group``.

    Args:
        values: ``[n]``, float32; its memory may be reused.
        group: ranks with tensors of the same size.
        backend: of the run.
        wire: ``"float32"``, ``"bfloat16"`` or ``"int8"``.

    Returns:
        A :class:`Mean`, whose result is ``[n]``, float32, and equal on every rank.
    """
    if group.size == 1:
        return Mean(_Known(values), 1)
    if wire == "int8":
        return _Int8Mean(values, group, backend)
    return Mean(backend.start_all_reduce(values.to(getattr(torch, wire)), group), group.size)


class Mean(Pending):
    """A mean under way.

    Args:
        total: the sum over the ranks.
        ranks: their number.
    """

    def __init__(self, total: Pending, ranks: int) -> None:
        self._total, self._ranks = total, ranks

    def advance(self) -> None:
        """Starts what follows the first message, for which it waits. Collective."""

    def wait(self) -> torch.Tensor:
        return self._total.wait().float() / self._ranks


class _Known(Pending):
    def __init__(self, result: torch.Tensor) -> None:
        self._result = result

    def wait(self) -> torch.Tensor:
        return self._result


def known(values: torch.Tensor) -> Mean:
    """A mean whose result is available."""
    return Mean(_Known(values), 1)


class _Int8Mean(Mean):
    """The mean of tensors that are sent in int8, see the module's docstring."""

    def __init__(self, values: torch.Tensor, group: Group, backend: Backend) -> None:
        self._group, self._backend, self._size = group, backend, values.numel()
        values = F.pad(values, (0, -values.numel() % (group.size * BLOCK)))
        self._rows = [
            backend.start_all_to_all(part.reshape(group.size, -1), group) for part in encode(values.view(-1, BLOCK))
        ]
        self._means: list[Pending] = []

    def advance(self) -> None:
        if self._means:
            return
        payload, scales = (pending.wait() for pending in self._rows)
        received = decode(payload.view(-1, BLOCK), scales.view(-1, 1)).view(self._group.size, -1)
        encoded = encode(received.mean(0).view(-1, BLOCK))
        self._means = [self._backend.start_all_gather(part, self._group) for part in encoded]
        self._rows = []

    def wait(self) -> torch.Tensor:
        self.advance()
        payload, scales = (pending.wait() for pending in self._means)
        return decode(payload, scales).view(-1)[: self._size]


def encode(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds blocks to int8.

    Args:
        blocks: ``[blocks, BLOCK]``, float32.

    Returns:
        Integers of that shape, int8, and scales ``[blocks, 1]``, float32. The error of an element is at most half the
        scale of its block. A block with an infinity or NaN has such a scale, so that it is not hidden.
    """
    scales = blocks.abs().amax(1, keepdim=True) / 127
    payload = (blocks / torch.where(scales > 0, scales, 1.0)).round().nan_to_num(0.0).clamp(-127, 127)
    return payload.to(torch.int8), scales


def decode(payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`encode`."""
    return payload.float() * scales
