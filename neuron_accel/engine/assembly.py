"""A whole tensor from the shards of several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from neuron_accel.engine.layout import Layout
    from neuron_accel.engine.run import Run


def full_tensor(local: torch.Tensor, layout: Layout, run: Run) -> torch.Tensor:
    """The whole of a tensor of which every rank holds the shard that ``layout`` says; collective over the cut axes.

    Returns:
        a tensor of ``layout.shape`` on the device of ``local``, or the CPU if that device is lazy: ``local`` itself
        where nothing is cut.
    """
    if not layout.cuts:
        return local
    group = run.group(*(cut.axis for cut in layout.cuts))
    shards = run.backend.all_gather(local.detach().contiguous().unsqueeze(0), group)
    if "lazy" in run.backend.capabilities:
        shards = run.backend.to_host(shards)  # put together on the host: no work for a compiler
    full = torch.empty(layout.shape, dtype=local.dtype, device=shards.device)
    for rank, shard in zip(group.ranks, shards, strict=True):
        layout.write(shard, full, run.mesh.coordinates(rank))
    return full
