"""Equal weights on every rank before anything is cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group
    from neuron_accel.engine.run import Run

_CHUNK_BYTES = 8 << 20


def broadcast_tensors(tensors: Iterable[torch.Tensor], run: Run, group: Group, source: int = 0) -> None:
    """Gives every rank of ``group`` the values of the one at position ``source``, in place, a few large messages at a
    time."""
    if group.size == 1:
        return
    with torch.no_grad():
        for batch in _batches(tensors):
            flat = torch.cat([t.reshape(-1) for t in batch])
            flat = run.backend.broadcast(flat, group, source)
            for tensor, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _batches(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for members in by_dtype.values():
        batch: list[torch.Tensor] = []
        size = 0
        for tensor in members:
            batch.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _CHUNK_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def state_tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    """Parameters and persistent buffers, each once; what a state dict holds. Tensors without storage are left out."""
    seen: dict[torch.Tensor, None] = {}
    for value in model.state_dict(keep_vars=True).values():
        if isinstance(value, torch.Tensor) and value.device.type != "meta":
            seen.setdefault(value)
    return [tensor.detach() for tensor in seen]
