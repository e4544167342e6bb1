"""Streams that every rank reads and takes its samples from: what is left over at their end counts once.

Ranks need equally many batches, so the last ones are filled up with samples from the beginning. No rank knows the
length of a stream before it ends; and where several workers read, each one's samples end independently. So every batch
says how many samples all ranks together really have in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from accelerate.data_loader import DataLoaderShard, IterableDatasetShard

from neuron_accel.data.mixing import Mixin, as_mixed


class Counted(NamedTuple):
    """A sample, or a batch of them, on its way from the stream.

    Args:
        value: the sample or batch.
        left_over: number of real samples in the global batch that it belongs to; None if all are.
    """

    value: Any
    left_over: int | None


class _Counting:
    """The user's dataset, counted.

    Attributes:
        left_over: how many samples beyond whole global batches it had; None before its end.
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
    """Gives out counted samples."""

    def __iter__(self) -> Iterator[Counted]:
        for sample in super().__iter__():
            yield Counted(sample, self.dataset.left_over)  # type: ignore[attr-defined]


class _Collate:
    """The user's ``collate_fn``, of counted samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Counted]) -> Counted:
        return Counted(self._collate([sample.value for sample in samples]), samples[-1].left_over)


class _CountedLoader(Mixin):
    """Gives out batches, and knows of the current one how much is real. Mixed into Accelerate's loaders.

    Attributes:
        left_over: number of real samples in the global batch that was given out last; None if all are.
    """

    prefix = "Counted"
    left_over: int | None = None

    def __iter__(self) -> Iterator[Any]:
        try:
            for batch, self.left_over in super().__iter__():  # type: ignore[misc]
                if self.left_over is not None:
                    self.remainder = self.left_over  # also what Accelerate looks at, at the end
                yield batch
        finally:
            self.left_over = None


def count_stream(loader: Any) -> Any:
    """Lets a loader of Accelerate's count, if every rank reads its own samples of a stream through it. To be followed
    by :func:`counted`."""
    shard: Any = getattr(loader, "dataset", None)
    if isinstance(loader, DataLoaderShard) and type(shard) is IterableDatasetShard:
        at_once = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        shard.dataset = _Counting(shard.dataset, at_once)
        shard.__class__ = _CountedShard
        loader.base_dataloader.collate_fn = _Collate(loader.base_dataloader.collate_fn)
    return loader


def counted(loader: Any) -> Any:
    """``loader``, made anew from one that counts, as one that does; itself if there is nothing to count."""
    if not isinstance(getattr(loader, "dataset", None), _CountedShard) or isinstance(loader, _CountedLoader):
        return loader
    return as_mixed(loader, _CountedLoader)
