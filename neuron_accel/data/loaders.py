"""Loaders under a plan: ranks that see different samples divide them, ranks that share samples see the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import SkipBatchSampler, get_sampler
from accelerate.data_loader import prepare_data_loader as accelerate_prepare
from accelerate.data_loader import skip_first_batches as accelerate_skip
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from neuron_accel.data.position import positioned
from neuron_accel.data.shared import share, sharing_group

if TYPE_CHECKING:
    from neuron_accel.engine.run import Run


def prepare_data_loader(loader: DataLoader, run: Run, **options: Any) -> DataLoader:
    """Accelerate's ``prepare_data_loader`` over the data-parallel ranks of the mesh instead of all processes.

    Ranks that share samples compare the first batch of every epoch and raise DesyncError if theirs differ.

    Args:
        loader: the user's loader.
        run: the run.
        options: passed on. With ``dispatch_batches`` the main process reads for all ranks; by default, as in
            Accelerate, where the dataset is iterable.
    """
    shares = sharing_group(run).size > 1
    if shares:
        _agree_on_shuffling(loader, run)
    prepared = accelerate_prepare(
        loader, run.device, num_processes=run.data_parallel_size, process_index=run.data_parallel_rank, **options
    )
    return positioned(share(prepared, run) if shares else prepared)


def skip_first_batches(loader: Any, count: int, run: Run) -> Any:
    """A loader like a prepared one that leaves out its first ``count`` batches."""
    original = getattr(loader, "run", None)
    skipping = accelerate_skip(loader, num_batches=count)
    # What Accelerate leaves behind, without which nobody can tell how much of the last global batch is real.
    skipping._drop_last = getattr(loader, "_drop_last", False)
    sampler = skipping.batch_sampler
    if isinstance(sampler, SkipBatchSampler):
        for name in ("batch_size", "split_batches", "num_processes"):
            if hasattr(sampler.batch_sampler, name):
                setattr(sampler, name, getattr(sampler.batch_sampler, name))
    return share(skipping, run) if original is run else skipping


def _agree_on_shuffling(loader: DataLoader, run: Run) -> None:
    """A random sampler without a generator would draw another order on every rank."""
    sampler = None if isinstance(loader.dataset, IterableDataset) else get_sampler(loader)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        seed = run.backend.broadcast_object(seed, run.world)
        sampler.generator = torch.Generator().manual_seed(seed)
