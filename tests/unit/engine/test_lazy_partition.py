"""The partition for devices that compile graphs, whose spans have the same offsets and lengths on every rank."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.engine.shards.partition import lazy_partition

SIZES = [(7,), (1, 8, 3), (5, 0, 4), (16, 2)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_every_rank_has_spans_of_equal_lengths_at_equal_offsets(sizes, degree):
    partition = lazy_partition(sizes, degree)
    shapes = {tuple((p.parameter, p.offset, p.length) for p in partition.spans(rank)) for rank in range(degree)}
    assert len(shapes) == 1
    assert partition.numel == degree * partition.chunk


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_split_inverts_join_and_values_are_at_the_offsets_of_the_spans(sizes, degree):
    partition = lazy_partition(sizes, degree)
    values = [torch.arange(1.0, size + 1) + 100 * i for i, size in enumerate(sizes)]
    flat = partition.join(values, torch.float32, torch.device("cpu"))
    for value, back in zip(values, partition.split(flat), strict=True):
        assert torch.equal(value, back)
    seen = [torch.zeros(size) for size in sizes]
    for rank, chunk in enumerate(flat.chunk(degree)):
        for piece in partition.spans(rank):
            part = chunk[piece.offset : piece.offset + piece.length]
            real = part[: piece.stop - piece.start]
            seen[piece.parameter][piece.start : piece.stop] += real
            assert not part[piece.stop - piece.start :].any()
    for value, once in zip(values, seen, strict=True):
        assert torch.equal(value, once)


def test_what_is_missing_counts_as_zeros():
    partition = lazy_partition([3, 2], 2)
    flat = partition.join([None, torch.ones(2)], torch.float32, torch.device("cpu"))
    assert [part.tolist() for part in partition.split(flat)] == [[0, 0, 0], [1, 1]]
