# SPDX-License-Identifier: Apache-2.0
"""Iterable datasets that every rank reads: counts the samples of the last batch that are not padding.

All ranks need the same number of batches, so the last ones are padded with samples from the beginning. The length of an
iterable dataset is unknown until it ends, and with several workers each worker's part ends independently. Each batch
therefore carries the number of real samples that all ranks together have in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from accelerate.data_loader import DataLoaderShard, IterableDatasetShard

from neuron_accel.data.mixing import Mixin, as_mixed


class Counted(NamedTuple):
    """A sample or a batch, with the number of real samples.

    Args:
        value: the sample or batch.
        left_over: number of real samples in its global batch; None if all are.
    """

    value: Any
    left_over: int | None


class _Counting:
    """The user's dataset, with a count of its samples.

    Attributes:
        left_over: number of samples in the incomplete global batch at its end; None before the end.
    """

    def __init__(self, dataset: Any, at_once: int) -> None:
        self._dataset, self._at_once = dataset, at_once
        self.left_over: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.left_over, count = None, 0
        for sample in self._dataset:
            count += 1
            yield sample
        self.left_over = count % self._at_once

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _CountedShard(IterableDatasetShard):
    """Yields samples as :class:`Counted`."""

    def __iter__(self) -> Iterator[Counted]:
        for sample in super().__iter__():
            yield Counted(sample, self.dataset.left_over)  # type: ignore[attr-defined]


class _Collate:
    """The user's ``collate_fn``, applied to :class:`Counted` samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Counted]) -> Counted:
        return Counted(self._collate([sample.value for sample in samples]), samples[-1].left_over)


class _CountedLoader(Mixin):
    """Returns batches, and knows the number of real samples of the current one. Mixed into Accelerate's loaders.

    Attributes:
        left_over: number of real samples in the current global batch; None if all are.
    """

    prefix = "Counted"
    left_over: int | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch, self.left_over in super().__iter__():  # type: ignore[misc]
                if self.left_over is not None:
                    self.remainder = self.left_over  # Accelerate reads this attribute after the last batch
                yield batch
        finally:
            self.left_over = None


def count_stream(loader: Any) -> Any:
    """Makes a loader of Accelerate count samples, if each rank reads its own samples of an iterable dataset through it.
    Has to be followed by :func:`counted`."""
    shard: Any = getattr(loader, "dataset", None)
    if isinstance(loader, DataLoaderShard) and type(shard) is IterableDatasetShard:
        at_once = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        shard.dataset = _Counting(shard.dataset, at_once)
        shard.__class__ = _CountedShard
        loader.base_dataloader.collate_fn = _Collate(loader.base_dataloader.collate_fn)
    return loader


def counted(loader: Any) -> Any:
    """Returns a copy of a loader that :func:`count_stream` has changed, with the attribute ``left_over``. Other loaders
    are returned unchanged."""
    if not isinstance(getattr(loader, "dataset", None), _CountedShard) or isinstance(loader, _CountedLoader):
        return loader
    return as_mixed(loader, _CountedLoader)
