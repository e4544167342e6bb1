"""Collectives of the backend on a device whose library sums in float32, and what is beside the device."""

from __future__ import annotations

import pytest
import torch
from neuron_accel_emulation import StandIn, native_ranks

from neuron_accel.testing import run_ranks
from tests.distributed.backends.test_collectives import MOVED, SUMMED, connect, moves, same, sums

STRICT = StandIn(integers=False).environ()  # no integer is ever added by the device
NO_SUM = (torch.float8_e4m3fn, torch.complex64)  # what gloo cannot add; a broadcast is a sum


@pytest.mark.parametrize("n", [2, 4])
def test_moving_and_summing(n):
    run_ranks(moves, n, [d for d in MOVED if d not in NO_SUM], backend="native", env=STRICT)
    run_ranks(sums, n, [d for d in SUMMED if d not in NO_SUM], backend="native", env=STRICT)


def exactly() -> None:
    backend, group = connect()
    assert not backend.sums_integers_exactly
    n, rank = group.size, backend.rank
    for dtype in (torch.int64, torch.int32):
        limits = torch.iinfo(dtype)
        values = torch.tensor([2**24 + 1, -(2**24) - 3, limits.max // 4 - 1, limits.min // 4 + 1, 7, limits.max, -1])
        everyone = [(values - 3 * r).to(dtype) for r in range(n)]
        mine = everyone[rank].to(backend.device)
        same(backend.all_reduce(mine.clone(), group), torch.stack(everyone).sum(0, dtype=dtype))  # wraps around as well
        same(backend.all_reduce(mine.clone(), group, "max"), torch.stack(everyone).amax(0))
        same(backend.all_reduce(mine.clone(), group, "min"), torch.stack(everyone).amin(0))
        for source in range(n):
            same(backend.broadcast(mine, group, source), everyone[source])
        counts = torch.arange(4 * n, dtype=dtype, device=backend.device) + 2**25
        same(backend.reduce_scatter(counts, group), (counts.cpu() * n).chunk(n)[rank])
    flags = torch.tensor([rank == 1, False, True], device=backend.device)
    same(backend.all_reduce(flags, group), torch.tensor([True, False, True]))
    same(backend.all_reduce(flags, group, "min"), torch.tensor([False, False, True]))
    same(backend.broadcast(flags, group, 1), torch.tensor([True, False, True]))
    assert native_ranks.counts().integers_combined == 0


@pytest.mark.parametrize("n", [2, 4])
def test_integers_and_flags_are_exact(n):
    run_ranks(exactly, n, backend="native", env=STRICT)


def reduced() -> None:
    from neuron_accel import NeuronAccelerator

    accelerator = NeuronAccelerator()
    tokens = torch.tensor(2**24 + 1 + accelerator.process_index, device=accelerator.device)
    assert accelerator.reduce(tokens, "sum").item() == 2 * (2**24 + 1) + 1
    assert accelerator.reduce({"n": tokens.to(torch.int32)}, "sum")["n"].item() == 2 * (2**24 + 1) + 1
    assert accelerator.gather(tokens).tolist() == [2**24 + 1, 2**24 + 2]


def test_accelerator_reduce_of_token_counts():
    run_ranks(reduced, 2, backend="native", env=STRICT)


def beside() -> None:
    backend, group = connect()
    before = native_ranks.counts()
    values = [None, "x" * 3_000_000, {"rank": 2}, torch.arange(3)]
    received = backend.all_gather_object(values[backend.rank], group)
    assert received[:3] == values[:3]
    assert received[3].tolist() == [0, 1, 2]
    for source in (1, 2):
        assert backend.broadcast_object(values[backend.rank], group, source) == values[source]
    inner = backend.new_group([[0, 1], [2, 3]], "tp")
    assert backend.all_gather_object(backend.rank, inner) == list(inner.ranks)
    same(backend.all_reduce(torch.full((3,), float(backend.rank)), inner), torch.full((3,), float(sum(inner.ranks))))
    same(backend.broadcast(torch.tensor([backend.rank]), group, 2), torch.tensor([2]))  # of the host, and stays there
    backend.barrier()
    board = backend.board()
    board.put(f"{backend.rank}", b"here")
    backend.barrier()
    assert [board.get(f"{rank}") for rank in range(4)] == [b"here"] * 4
    after = native_ranks.counts()
    assert (after.collectives, after.kernels) == (before.collectives, before.kernels), "none of it is the device's"
    backend.shutdown()


def test_objects_and_tensors_of_the_host_travel_beside_the_device():
    run_ranks(beside, 4, backend="native")
