"""Loaders under a plan: data-parallel ranks get different samples, ranks with the same samples identical ones."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SkipBatchSampler, get_sampler
from accelerate.data_loader import prepare_data_loader as accelerate_prepare
from accelerate.data_loader import skip_first_batches as accelerate_skip
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from neuron_accel.data.fixed_rows import with_fixed_rows
from neuron_accel.data.position import positioned, samples_at_once, without_first
from neuron_accel.data.shared import share, sharing_group
from neuron_accel.data.streams import count_stream, counted
from neuron_accel.errors import ConfigurationError

if TYPE_CHECKING:
    from neuron_accel.engine.runtime.run import Run


def prepare_data_loader(loader: DataLoader, run: Run, **options: Any) -> DataLoader:
    """Accelerate's ``prepare_data_loader`` over the data-parallel ranks of the mesh instead of all processes.

    Ranks with the same samples compare the first batch of every epoch and raise DesyncError if theirs differ.

    Args:
        loader: the user's loader.
        run: the run.
        options: passed on. With ``dispatch_batches`` the main process reads for all ranks; by default, as in
            Accelerate, where the dataset is iterable.
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
        if isinstance(sampler, RandomSampler) and generator is not None:  # Accelerate has put one of its own there
            generator.set_state(run.backend.broadcast_object(generator.get_state(), run.world))
            sampler.generator = prepared.synchronized_generator = generator
    else:  # elsewhere batches have fixed rows
        count_stream(prepared)
    return positioned(counted(share(prepared, run) if shares else prepared))


def _without_step_boundaries(prepared: Any, run: Run, put_on_device: bool) -> Any:
    """Accelerate's loader without torch_xla's around it, which would execute what has collected at every batch. Ranks
    agree on an order once: torch_xla's way of agreeing at every epoch is a graph of its own."""
    inner = getattr(prepared, "dataloader", prepared)
    inner.device = run.device if put_on_device else None
    inner.rng_types = None
    return inner


def _each_reads_its_own(loader: DataLoader, run: Run, dispatch: bool | None) -> bool:
    """Whether the main process reads for all, which is not possible on a lazy device.

    Raises:
        ConfigurationError: if it is asked for.
    """
    if dispatch:
        raise ConfigurationError(
            "dispatch_batches=True is not possible here.",
            where=f"backend {run.backend.name!r}",
            why="batches would go through the device twice, in graphs of their own",
            fix="let every rank read its own samples: leave dispatch_batches out",
        )
    if isinstance(loader.dataset, IterableDataset) and run.data_parallel_size > 1 and not loader.drop_last:
        warnings.warn(
            "The last batch of this stream is padded with samples from its beginning, which count twice, "
            "because its length is unknown. DataLoader(drop_last=True) drops the last batch instead.",
            stacklevel=4,
        )
    return False


def _fixed(loader: Any, run: Run) -> Any:
    """``loader`` with batches of one shape; itself where batches have no size of their own.

    Raises:
        ConfigurationError: if ranks could have different numbers of batches.
    """
    sampler = loader.batch_sampler
    if type(loader) is not DataLoaderShard or not isinstance(getattr(sampler, "batch_size", None), int):
        return loader
    if isinstance(sampler, BatchSamplerShard) and not (sampler.even_batches or sampler.drop_last):
        raise ConfigurationError(
            "even_batches=False is not possible here.",
            where=f"backend {run.backend.name!r}",
            why="a rank with fewer batches would leave the others waiting in their graphs",
            fix="leave it out: what fills up the last batch is masked; or use DataLoader(drop_last=True)",
        )
    rows = samples_at_once(loader) // run.data_parallel_size
    return with_fixed_rows(loader, rows, (run.data_parallel_rank, run.data_parallel_size))


def skip_first_batches(loader: Any, count: int, run: Run) -> Any:
    """A loader like a prepared one that leaves out its first ``count`` batches."""
    original = getattr(loader, "run", None)
    skipping = _skip(loader, count, run)
    # What Accelerate leaves behind, without which it is unknown how much of the last global batch is real.
    skipping._drop_last = getattr(loader, "_drop_last", False)
    sampler = skipping.batch_sampler
    if isinstance(sampler, SkipBatchSampler):
        for name in ("batch_size", "split_batches", "num_processes"):
            if hasattr(sampler.batch_sampler, name):
                setattr(sampler, name, getattr(sampler.batch_sampler, name))
    if run.backend.is_lazy:
        skipping = _fixed(skipping, run)
    return counted(share(skipping, run) if original is run else skipping)


def _skip(loader: Any, count: int, run: Run) -> Any:
    if not run.backend.is_lazy:
        return without_first(loader, count)
    # Accelerate expects a loader of torch_xla's there, and wraps what it makes in one.
    skipping = accelerate_skip(_Wrapped(loader, run.device), num_batches=count)
    inner = getattr(skipping, "dataloader", skipping)
    inner.device, inner.rng_types = loader.device, None
    return inner


class _Wrapped:
    def __init__(self, loader: Any, device: torch.device) -> None:
        self.dataloader, self.device = loader, device


def _agree_on_shuffling(loader: DataLoader, run: Run) -> None:
    """A random sampler without a generator would draw another order on every rank."""
    sampler = None if isinstance(loader.dataset, IterableDataset) else get_sampler(loader)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        seed = run.backend.broadcast_object(seed, run.world)
        sampler.generator = torch.Generator().manual_seed(seed)
