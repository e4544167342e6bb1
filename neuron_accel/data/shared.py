"""Loaders of ranks with the same samples: equal batches on all of them, which is checked.

Ranks along a model axis compute one forward pass together. If their batches differ, nothing fails: the loss is garbage
that falls a little. So they compare a checksum of the first batch of every epoch, which costs one small message.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import initialize_tensors
from torch.utils._pytree import tree_leaves

from neuron_accel.data.fixed_rows import has_fixed_rows
from neuron_accel.data.mixing import Mixin, mixed
from neuron_accel.errors import DesyncError

if TYPE_CHECKING:
    from neuron_accel.backends.base import Group
    from neuron_accel.engine.runtime.run import Run


def sharing_group(run: Run) -> Group:
    """The ranks that see the same samples as this one."""
    return run.group(*(axis.name for axis in run.mesh.axes if axis.name not in run.mesh.data_axes))


def checksum(batch: Any) -> int:
    """A number that differs between batches whose tensors differ; other values count by their ``repr``."""
    total = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            total = zlib.crc32(f"{tuple(leaf.shape)}{leaf.dtype}".encode(), total)
            flat = leaf.detach().contiguous().cpu().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            total = zlib.crc32(data, total)
        else:
            total = zlib.crc32(repr(leaf).encode(), total)
    return total


def check_same(batch: Any, run: Run) -> None:
    """Collective over the ranks with the same samples.

    Raises:
        DesyncError: on all of them, if ``batch`` is not the same everywhere.
    """
    group = sharing_group(run)
    sums = run.backend.all_gather_object(checksum(batch), group)
    different = [rank for rank, value in zip(group.ranks, sums, strict=True) if value != sums[0]]
    if different:
        raise DesyncError(
            f"Rank {different[0]} reads other samples than rank {group.ranks[0]}.",
            where=f"first batch of an epoch, ranks {list(group.ranks)} of group {group.name!r}",
            why="they hold shards of one model and must see the same data; their results would be meaningless",
            fix="build the dataset alike on every rank (seed what is random in it), or let the main process read for "
            "all: DataLoaderConfiguration(dispatch_batches=True)",
        )


class _Checked(Mixin):
    """Compares the first batch of every pass."""

    prefix = "Shared"
    run: Run

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(super().__iter__()):  # type: ignore[misc]
            if index == 0:
                check_same(batch, self.run)
            yield batch


class SharedShard(_Checked, DataLoaderShard):
    """A rank's own reading of its samples, which other ranks read as well."""


class SharedDispatcher(_Checked, DataLoaderDispatcher):
    """The main process reads for all ranks and each gets the samples of its data-parallel rank.

    Accelerate's gives every process its own samples; here what it knows about processes is replaced by what holds
    for data-parallel ranks.
    """

    state: Any
    """The :class:`DataPlace` here; of Accelerate's ``PartialState`` there."""

    def _fetch_batches(self, iterator: Any) -> tuple[Any, list[Any]]:
        place: DataPlace = self.state
        self.state = place.reading
        try:
            batch, info = super()._fetch_batches(iterator)
        finally:
            self.state = place
        if batch is None and info[0] is not None and place.process_index == 0:
            batch = initialize_tensors(info[0])  # shares the first share, but has not read it
        return batch, info


class DataPlace:
    """A rank's place among those that see different samples, under the names that Accelerate's state has for it."""

    def __init__(self, run: Run, process_index: int | None = None) -> None:
        self.device = run.device
        self.num_processes = run.data_parallel_size
        self.process_index = run.data_parallel_rank if process_index is None else process_index
        if process_index is None:
            self.reading = DataPlace(run, run.backend.rank)
            """The same where only the main process may count as the first."""


def share(loader: Any, run: Run) -> Any:
    """Converts a loader of Accelerate's for ranks with the same samples; others are returned as they are."""
    kinds: dict[type, type] = {DataLoaderShard: SharedShard, DataLoaderDispatcher: SharedDispatcher}
    kind = kinds.get(type(loader))
    if kind is None:
        if not has_fixed_rows(loader):
            return loader
        kind = mixed(_Checked, type(loader))
    shared: Any = object.__new__(kind)  # Accelerate's constructors take what can no longer be asked for
    shared.__dict__.update(loader.__dict__)
    shared.run = run
    if kind is SharedDispatcher:
        shared.state = DataPlace(run)
    return shared
