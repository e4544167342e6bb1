# SPDX-License-Identifier: Apache-2.0
"""Position of a loader within an epoch, and its order, so that a later run on another mesh can resume from there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.data_loader import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    skip_first_batches,
)
from torch.utils.data import RandomSampler

from neuron_accel.data.fixed_rows import has_fixed_rows, with_fixed_rows
from neuron_accel.data.mixing import Mixin, as_mixed
from neuron_accel.data.shared import share
from neuron_accel.data.streams import counted
from neuron_accel.errors import CheckpointError

Order = dict[str, Any]
"""State of the random number generators that determine the order of an epoch. ``default``: state of the default
generator at the beginning of the epoch. Beside it one of ``own``: state of the sampler's generator; ``drawn``: state of
a generator that the sampler seeds from the default one; ``seed``: seed of a sampler that creates its generator from a
seed and the epoch."""


def sampler_of(loader: Any) -> Any:
    """Returns the sampler of single samples below all batch samplers, or None if there is none."""
    sampler = loader.batch_sampler
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    return getattr(sampler, "sampler", None)


def order_of(loader: Any) -> Order:
    """Returns the :data:`Order` of the epoch that begins now, without drawing random numbers."""
    order: Order = {"default": torch.get_rng_state()}
    sampler = sampler_of(loader)
    if isinstance(sampler, SeedableRandomSampler):
        order["seed"] = sampler.initial_seed
    elif isinstance(sampler, RandomSampler):
        if sampler.generator is None:
            order["drawn"] = _peek(loader)
        else:
            order["own"] = sampler.generator.get_state()
    return order


def _peek(loader: Any) -> torch.Tensor:
    """Returns the state of the generator that a random sampler without one will create. Its seed is drawn from the
    default generator, after the seed of the loader's workers."""
    now = torch.get_rng_state()
    try:
        if loader.base_dataloader.generator is None:
            torch.empty((), dtype=torch.int64).random_()
        seed = int(torch.empty((), dtype=torch.int64).random_())
    finally:
        torch.set_rng_state(now)
    return torch.Generator().manual_seed(seed).get_state()


def set_order(loader: Any, order: Order) -> None:
    """Sets the sampler's seed, or the state of its own generator, to that of ``order``."""
    sampler = sampler_of(loader)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = order.get("seed", sampler.initial_seed)
    elif isinstance(sampler, RandomSampler) and "own" in order:
        sampler.generator = sampler.generator or torch.Generator()
        sampler.generator.set_state(order["own"])


@contextmanager
def drawing(loader: Any, order: Order) -> Iterator[None]:
    """Context in which the order of an epoch is drawn from ``order``. The state of the default generator is
    restored."""
    now, sampler = torch.get_rng_state(), sampler_of(loader)
    set_order(loader, order)
    torch.set_rng_state(order["default"])
    if isinstance(sampler, RandomSampler) and "drawn" in order and sampler.generator is not None:
        sampler.generator.set_state(order["drawn"])
    try:
        yield
    finally:
        torch.set_rng_state(now)


# ---- Loaders that can be resumed within an epoch ---------------------------------------------------------------------
# A checkpoint taken within an epoch contains, for each loader, the epoch, the number of samples returned so far, and
# the state of the generators that determine the order. After such a position is set, the next iteration continues that
# epoch with the remaining samples, each once, also with another number of data-parallel ranks.
class _Positioned(Mixin):
    """Counts the batches that a loader returns, and can resume within an epoch. Mixed into Accelerate's loaders."""

    prefix = "Positioned"
    _given: int = 0
    _before: int = 0
    _resume: dict[str, Any] | None = None
    _begin: Order | None = None

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        try:
            if resume is None:
                self._begin, self._given, self._before = order_of(self), 0, 0
                batches = super().__iter__()  # type: ignore[misc]
            else:
                batches = self._rest_of(resume)
            for batch in batches:
                self._given += 1
                yield batch
        finally:  # also if the loop ends early: the next one starts a new epoch
            self._begin, self._given, self._before = None, 0, 0

    def _rest_of(self, resume: dict[str, Any]) -> Iterator[Any]:
        """Yields the remaining batches of the epoch that was interrupted."""
        self.iteration = epoch = resume["epoch"]
        self._before, self._begin, self._given = resume["samples"], resume["begin"], 0
        with drawing(self, resume["begin"]):
            self.set_epoch(epoch)  # type: ignore[attr-defined]
            batches = iter(_without(self, resume["samples"]))
            first = next(batches, _END)
        if first is not _END:
            yield first
            yield from batches
        self.iteration = epoch + 1

    # ---- for checkpoints ---------------------------------------------------------------------------------------------
    def position(self) -> dict[str, Any]:
        """Returns the position of this loader: plain values and tensors, the same on all ranks."""
        if self._resume is not None:  # no batch was returned since it was set
            return self._resume
        return {
            "epoch": self.iteration,  # type: ignore[attr-defined]
            "samples": self._before + self._given * samples_at_once(self),
            "begin": self._begin,
            "next": order_of(self) if self._begin is None else None,
        }

    def set_position(self, position: dict[str, Any]) -> None:
        """Makes the next iteration start at ``position``.

        Raises:
            CheckpointError: as for :meth:`check_position`.
        """
        self.check_position(position)
        self.iteration = position["epoch"]
        self._resume = dict(position) if position["begin"] is not None else None
        if position["next"] is not None:
            set_order(self, position["next"])

    def forget_position(self) -> None:
        """Discards the position that was set, for callers that skip batches themselves."""
        self._resume = None

    def check_position(self, position: dict[str, Any]) -> None:
        """Raises CheckpointError if the samples returned so far are not a multiple of this loader's global batch
        size."""
        samples = position["samples"]
        size = samples_at_once(self)
        sampler = _batch_sampler(self)
        if samples % size == 0 or (
            isinstance(sampler, BatchSamplerShard) and not sampler.split_batches and samples % sampler.batch_size == 0
        ):
            return
        raise CheckpointError(
            f"A loader returned {samples} samples of its epoch, which is not a multiple of the batch size {size}.",
            why="a sample would be seen twice, or never",
            fix="resume with a batch size and a number of data-parallel ranks whose product divides that number",
        )


def positioned(loader: Any) -> Any:
    """Returns a copy of a loader that Accelerate prepared, with ``position()`` and ``set_position()``. Other loaders
    are returned unchanged."""
    if not issubclass(type(loader), (DataLoaderShard, DataLoaderDispatcher)):
        return loader
    if loader.use_stateful_dataloader:  # Accelerate has begun an epoch to get the loader's state: its order is drawn
        loader.base_dataloader.load_state_dict({})
    return as_mixed(loader, _Positioned)


def samples_at_once(loader: Any) -> int:
    """Returns the number of samples in one batch of all ranks together."""
    shard = loader.dataset
    if isinstance(shard, IterableDatasetShard):
        return shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    if isinstance(loader, DataLoaderDispatcher):  # Accelerate's property asks the dataset, which does not know
        size = loader.base_dataloader.batch_size or loader.batch_sampler.batch_size
        return size * (1 if loader.split_batches else loader.state.num_processes)
    return loader.total_batch_size


def without_first(loader: Any, count: int) -> Any:
    """Returns a prepared loader without its first ``count`` batches. Corrects Accelerate's ``skip_first_batches`` for a
    main process that reads a map-style dataset for all ranks: there it counts the batches of single ranks, and pads the
    last batch from the first remaining batch instead of the first batch of the epoch."""
    iterable = isinstance(loader.dataset, torch.utils.data.IterableDataset)
    if not isinstance(loader, DataLoaderDispatcher) or iterable:
        return skip_first_batches(loader, count)
    if _is_filled_up(loader) or count >= len(loader):
        rest = skip_first_batches(loader, 0)
        rest.skip_batches = count  # reads the skipped batches too: Accelerate cannot dispatch from an empty loader
        return rest
    return skip_first_batches(loader, count if loader.split_batches else count * loader.state.num_processes)


def _is_filled_up(loader: DataLoaderDispatcher) -> bool:
    """Returns whether the last batch of an epoch is padded with samples from the first."""
    if loader._drop_last:
        return False
    try:
        return len(sampler_of(loader)) % loader.state.num_processes != 0
    except TypeError:  # its length is unknown
        return True


_END = object()


class _SkipBatches(SkipBatchSampler):
    """A batch sampler without its first batches, with all other attributes of the original."""

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)


class _Rest(DataLoaderShard):
    """A loader of the remaining samples of an epoch."""

    skipped: int = 0
    remainder: int

    def begin(self) -> None:
        super().begin()
        if self.remainder >= 0:
            self.remainder = (self.total_dataset_length - self.skipped) % self.total_batch_size


def _batch_sampler(loader: Any) -> Any:
    return loader.sampler if isinstance(loader.sampler, torch.utils.data.BatchSampler) else loader.batch_sampler


def _without(loader: Any, samples: int) -> Any:
    """Returns a loader of the same epoch without its first ``samples`` samples."""
    at_once = samples_at_once(loader)
    sampler = _batch_sampler(loader)
    own_sampler = isinstance(loader.dataset, torch.utils.data.IterableDataset) or sampler is loader.sampler
    if isinstance(loader, DataLoaderDispatcher) or own_sampler:
        rest = without_first(loader, samples // at_once)
        rest._drop_last, rest._non_blocking = loader._drop_last, loader._non_blocking
        return counted(share(rest, loader.run) if hasattr(loader, "run") else rest)
    if samples % at_once == 0:
        left: Any = _SkipBatches(sampler, samples // at_once)
    else:  # the number of data-parallel ranks has changed
        left = BatchSamplerShard(
            _SkipBatches(sampler.batch_sampler, samples // sampler.batch_size),
            num_processes=sampler.num_processes,
            process_index=sampler.process_index,
            even_batches=sampler.even_batches,
        )
    names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor", "generator")
    rest = _Rest(
        loader.dataset,
        device=loader.device,
        rng_types=loader.rng_types,
        synchronized_generator=loader.synchronized_generator,
        iteration=loader.iteration,
        batch_sampler=left,
        _drop_last=loader._drop_last,
        _non_blocking=loader._non_blocking,
        **{name: getattr(loader.base_dataloader, name) for name in names},
    )
    rest.skipped = samples
    return with_fixed_rows(rest, loader.rows, loader.place) if has_fixed_rows(loader) else rest
