# SPDX-License-Identifier: Apache-2.0
"""Loaders for ranks that read the same samples, with a check that their batches are equal.

Ranks along a model axis compute one forward pass together. Different batches would not raise an error but give a
meaningless loss. These ranks therefore compare a checksum of the first batch of every epoch before they use it, and
those of the other batches with what else is compared (:mod:`neuron_accel.engine.runtime.shared_inputs`).
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
from neuron_accel.data.mixing import Mixin, as_mixed, mixed
from neuron_accel.engine.runtime.shared_inputs import checksum_of
from neuron_accel.errors import DesyncError

if TYPE_CHECKING:
    from neuron_accel.backends.group import Group
    from neuron_accel.engine.runtime.run import Run


def sharing_group(run: Run) -> Group:
    """Returns the group of ranks that read the same samples as this one."""
    return run.group(*(axis.name for axis in run.mesh.axes if axis.name not in run.mesh.data_axes))


def checksum(batch: Any) -> int:
    """Returns a checksum (CRC-32) of the tensors of a batch, and of the ``repr`` of its other values."""
    total = 0
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            total = checksum_of(leaf, total)
        else:
            total = zlib.crc32(repr(leaf).encode(), total)
    return total


def check_same(batch: Any, run: Run) -> None:
    """Checks that ``batch`` is equal on the ranks that read the same samples. Collective over them. In a dry run, whose
    batches have no values, does nothing.

    Raises:
        DesyncError: on all of these ranks, if ``batch`` differs between them.
    """
    if not run.backend.has_values:
        return
    group = sharing_group(run)
    sums = run.backend.all_gather_object(checksum(batch), group)
    different = [rank for rank, value in zip(group.ranks, sums, strict=True) if value != sums[0]]
    if different:
        raise DesyncError(
            f"Rank {different[0]} reads other samples than rank {group.ranks[0]}.",
            where=f"first batch of an epoch, ranks {list(group.ranks)} of group {group.name!r}",
            why="they hold shards of one model and must read the same data; their results would be meaningless",
            fix="build the same dataset on every rank (seed its random numbers), or let the main process read for all: "
            "DataLoaderConfiguration(dispatch_batches=True)",
        )


class _Checked(Mixin):
    """Checks the first batch of every epoch, and the others together at its end at the latest."""

    prefix = "Shared"
    run: Run

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(super().__iter__()):  # type: ignore[misc]
            if index == 0:
                check_same(batch, self.run)
            yield batch
        self.run.shared_inputs.compare()


class _Noted(Mixin):
    """A loader of torch that adds its batches, while they are on the host, to what is compared."""

    prefix = "Noted"
    run: Run

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():  # type: ignore[misc]
            self.run.shared_inputs.add(checksum(batch))
            yield batch


class SharedShard(_Checked, DataLoaderShard):
    """A loader that reads the samples of this rank, which other ranks read too."""


class SharedDispatcher(_Checked, DataLoaderDispatcher):
    """A loader of which the main process reads for all ranks, and each rank gets the samples of its data-parallel rank.

    Accelerate's class gives every process different samples; here its process state is replaced by that of the
    data-parallel ranks.
    """

    state: Any
    """A :class:`DataPlace`; in Accelerate's class, a ``PartialState``."""

    _drawn: torch.Tensor | None = None
    """State of the default generator as reading this epoch has left it."""

    def __iter__(self) -> Iterator[Any]:
        self._drawn = None
        yield from super().__iter__()

    def _fetch_batches(self, iterator: Any) -> tuple[Any, list[Any]]:
        place: DataPlace = self.state
        self.state = place.reading
        # The main process alone reads. What a dataset draws there must not change what its peers draw alike.
        common = torch.get_rng_state()
        if self._drawn is not None:
            torch.set_rng_state(self._drawn)
        try:
            batch, info = super()._fetch_batches(iterator)
            self._drawn = torch.get_rng_state()
        finally:
            self.state = place
            torch.set_rng_state(common)
        if batch is None and info[0] is not None and place.process_index == 0:
            batch = initialize_tensors(info[0])  # belongs to the first data-parallel rank, but has not read
        return batch, info


class DataPlace:
    """Data-parallel rank and size, with the attribute names of Accelerate's ``PartialState``."""

    def __init__(self, run: Run, process_index: int | None = None) -> None:
        self.device = run.device
        self.num_processes = run.data_parallel_size
        self.process_index = run.data_parallel_rank if process_index is None else process_index
        if process_index is None:
            self.reading = DataPlace(run, run.backend.rank)
            """The same with the global rank as index, so that only the main process reads."""


def share(loader: Any, run: Run) -> Any:
    """Returns a copy of a loader of Accelerate for ranks that read the same samples. Other loaders are returned
    unchanged."""
    kinds: dict[type, type] = {DataLoaderShard: SharedShard, DataLoaderDispatcher: SharedDispatcher}
    kind = kinds.get(type(loader))
    if kind is None:
        if not has_fixed_rows(loader):
            return loader
        kind = mixed(_Checked, type(loader))
    shared: Any = object.__new__(kind)  # arguments of Accelerate's constructors are not available here
    shared.__dict__.update(loader.__dict__)
    shared.run = run
    if kind is SharedDispatcher:
        shared.state = DataPlace(run)
    elif run.shared_inputs.compares and not issubclass(type(loader.base_dataloader), _Noted):
        shared.base_dataloader = as_mixed(loader.base_dataloader, _Noted)
        shared.base_dataloader.run = run
    return shared
