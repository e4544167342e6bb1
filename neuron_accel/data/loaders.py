# SPDX-License-Identifier: Apache-2.0
"""Data loaders of a run: data-parallel ranks read different samples, the other ranks of each read the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    SkipBatchSampler,
    get_sampler,
)
from accelerate.data_loader import prepare_data_loader as accelerate_prepare
from accelerate.data_loader import skip_first_batches as accelerate_skip
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from neuron_accel.data.fixed_rows import with_fixed_rows
from neuron_accel.data.mixing import Mixin, as_mixed
from neuron_accel.data.position import positioned, samples_at_once, without_first
from neuron_accel.data.shared import share, sharing_group
from neuron_accel.data.streams import count_stream, counted
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.backends.events import Events
    from neuron_accel.engine.runtime.run import Run


def prepare_data_loader(loader: DataLoader, run: Run, **options: Any) -> DataLoader:
    """Calls Accelerate's ``prepare_data_loader`` for the data-parallel ranks of the mesh instead of all processes.

    Ranks that read the same samples compare the first batch of every epoch and raise DesyncError if they differ.

    Args:
        loader: the user's loader. run: the run. options: passed to Accelerate. With ``dispatch_batches=True`` the main
            process reads for all ranks, which is the default for iterable datasets, as in Accelerate.

        Returns:
            The prepared loader.

        Raises:
            ConfigurationError: if an option is not possible on a lazy device.
    """
    shares, lazy = sharing_group(run).size > 1, run.backend.is_lazy
    if shares or lazy:
        _agree_on_shuffling(loader, run)
    sampler = None if isinstance(loader.dataset, IterableDataset) else get_sampler(loader)
    generator = getattr(sampler, "generator", None)
    if lazy:
        options["dispatch_batches"] = _each_reads_its_own(loader, run, options["dispatch_batches"])
    prepared = accelerate_prepare(
        loader, run.device, num_processes=run.data_parallel_size, process_index=run.data_parallel_rank, **options
    )
    if lazy:
        prepared = _fixed(_without_step_boundaries(prepared, run, options["put_on_device"]), run)
        if isinstance(sampler, RandomSampler) and generator is not None:  # Accelerate has replaced it
            generator.set_state(run.backend.broadcast_object(generator.get_state(), run.world))
            sampler.generator = prepared.synchronized_generator = generator
    else:  # on a lazy device batches have fixed rows instead
        count_stream(prepared)
    return as_events(positioned(counted(share(prepared, run) if shares else prepared)), run)


class _AsEvents(Mixin):
    """A loader each batch of which is an event of the run, until it is there."""

    prefix = "Observed"
    events: Events

    def __iter__(self) -> Iterator[Any]:
        batches = iter(super().__iter__())  # type: ignore[misc]
        try:
            while True:
                with self.events.open("loader", "part", part="loader"):
                    batch = next(batches, _END)
                if batch is _END:
                    return
                yield batch
        finally:  # also if the loop ends early
            batches.close()


_END = object()


def as_events(loader: Any, run: Run) -> Any:
    """Returns a copy of a loader that Accelerate prepared, each batch of which is an event of the run. Other loaders
    are returned unchanged."""
    if not issubclass(type(loader), (DataLoaderShard, DataLoaderDispatcher)):
        return loader
    observed = as_mixed(loader, _AsEvents)
    observed.events = run.events
    return observed


def _without_step_boundaries(prepared: Any, run: Run, put_on_device: bool) -> Any:
    """Removes torch_xla's loader around Accelerate's, which would execute the pending graph at every batch. Ranks
    synchronize the order once, when the loader is prepared; doing it at every epoch would compile another graph."""
    inner = getattr(prepared, "dataloader", prepared)
    inner.device = run.device if put_on_device else None
    inner.rng_types = None
    return inner


def _each_reads_its_own(loader: DataLoader, run: Run, dispatch: bool | None) -> bool:
    """Returns False, the value for ``dispatch_batches``: on a lazy device each rank reads its own samples.

    Raises:
        ConfigurationError: if ``dispatch`` is True.
    """
    if dispatch:
        raise ConfigurationError(
            "dispatch_batches=True is not possible here.",
            where=f"backend {run.backend.name!r}",
            why="batches would be sent through the device, in graphs of their own",
            fix="remove dispatch_batches, so that each rank reads its own samples",
        )
    if isinstance(loader.dataset, IterableDataset) and run.data_parallel_size > 1 and not loader.drop_last:
        warnings.warn(
            "The last batch of this stream is padded with samples from its beginning, which count twice, "
            "because its length is unknown. DataLoader(drop_last=True) drops the last batch instead.",
            stacklevel=4,
        )
    return False


def _fixed(loader: Any, run: Run) -> Any:
    """Returns ``loader`` with batches of a fixed shape, or ``loader`` itself if it has no batch size.

    Raises:
        ConfigurationError: if ranks could get different numbers of batches.
    """
    sampler = loader.batch_sampler
    if type(loader) is not DataLoaderShard or not isinstance(getattr(sampler, "batch_size", None), int):
        return loader
    if isinstance(sampler, BatchSamplerShard) and not (sampler.even_batches or sampler.drop_last):
        raise ConfigurationError(
            "even_batches=False is not possible here.",
            where=f"backend {run.backend.name!r}",
            why="the other ranks would wait forever for a rank that has fewer batches",
            fix="remove it, since padding of the last batch is masked; or use DataLoader(drop_last=True)",
        )
    rows = samples_at_once(loader) // run.data_parallel_size
    return with_fixed_rows(loader, rows, (run.data_parallel_rank, run.data_parallel_size))


def skip_first_batches(loader: Any, count: int, run: Run) -> Any:
    """Returns a copy of a prepared loader without its first ``count`` batches."""
    original = getattr(loader, "run", None)
    skipping = _skip(loader, count, run)
    # Attributes that Accelerate does not copy. They are needed to know the number of real samples in the last batch.
    skipping._drop_last = getattr(loader, "_drop_last", False)
    sampler = skipping.batch_sampler
    if isinstance(sampler, SkipBatchSampler):
        for name in ("batch_size", "split_batches", "num_processes"):
            if hasattr(sampler.batch_sampler, name):
                setattr(sampler, name, getattr(sampler.batch_sampler, name))
    if run.backend.is_lazy:
        skipping = _fixed(skipping, run)
    return as_events(counted(share(skipping, run) if original is run else skipping), run)


def _skip(loader: Any, count: int, run: Run) -> Any:
    if not run.backend.is_lazy:
        return without_first(loader, count)
    # Accelerate expects torch_xla's loader here, and returns one.
    skipping = accelerate_skip(_Wrapped(loader, run.device), num_batches=count)
    inner = getattr(skipping, "dataloader", skipping)
    inner.device, inner.rng_types = loader.device, None
    return inner


class _Wrapped:
    def __init__(self, loader: Any, device: torch.device) -> None:
        self.dataloader, self.device = loader, device


def _agree_on_shuffling(loader: DataLoader, run: Run) -> None:
    """Makes a random sampler without a generator yield the same order on all ranks.

    It gets a generator with the same seed, drawn as Accelerate draws one. If all ranks read the same samples, as one
    process does, the sampler stays as it is, and the ranks' default generators get the same state: it then draws the
    numbers that it draws in one process.
    """
    sampler = None if isinstance(loader.dataset, IterableDataset) else get_sampler(loader)
    if not isinstance(sampler, RandomSampler) or sampler.generator is not None:
        return
    if run.data_parallel_size == 1 and not run.backend.is_lazy:
        torch.set_rng_state(run.backend.broadcast_object(torch.get_rng_state(), run.world))
        return
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    seed = run.backend.broadcast_object(seed, run.world)
    sampler.generator = torch.Generator().manual_seed(seed)
