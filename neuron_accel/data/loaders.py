"""Loaders under a plan: ranks that see different samples divide them, ranks that share samples see the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import get_sampler
from accelerate.data_loader import prepare_data_loader as accelerate_prepare
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from neuron_accel.engine.errors import UsageError

if TYPE_CHECKING:
    from neuron_accel.engine.run import Run


def prepare_data_loader(
    loader: DataLoader, run: Run, *, dispatch_batches: bool | None, put_on_device: bool, **options: Any
) -> DataLoader:
    """Accelerate's ``prepare_data_loader`` over the data-parallel ranks of the mesh instead of all processes.

    Args:
        loader: the user's loader.
        run: the run.
        dispatch_batches: whether the main process reads for all; by default, as in Accelerate, where the dataset is
            iterable and no two ranks share samples. Where ranks do, each reads for itself.
        put_on_device: whether batches go to the run's device.
        options: passed on.

    Raises:
        UsageError: if batches are to be dispatched although ranks share samples.
    """
    shares = run.data_parallel_size < run.mesh.world_size
    if shares:
        if dispatch_batches:
            raise UsageError(
                "`dispatch_batches=True` is not possible here.",
                where=f"mesh {run.mesh}",
                why="the main process would give different samples to ranks that must see the same",
                fix="leave `dispatch_batches` out: every rank then reads its own share",
            )
        dispatch_batches = False
        _agree_on_shuffling(loader, run)
    return accelerate_prepare(
        loader,
        run.device,
        num_processes=run.data_parallel_size,
        process_index=run.data_parallel_rank,
        dispatch_batches=dispatch_batches,
        put_on_device=put_on_device,
        **options,
    )


def _agree_on_shuffling(loader: DataLoader, run: Run) -> None:
    """A random sampler without a generator would draw another order on every rank."""
    sampler = None if isinstance(loader.dataset, IterableDataset) else get_sampler(loader)
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        seed = run.backend.broadcast_object(seed, run.world)
        sampler.generator = torch.Generator().manual_seed(seed)
