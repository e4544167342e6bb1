"""CUDA ranks without a GPU: the error, and the process group that stages tensors in host memory, on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from neuron_accel.errors import UsageError
from neuron_accel.testing import cuda_ranks, run_ranks


@pytest.mark.skipif(cuda_ranks.missing() is None, reason="this machine has a GPU")
def test_without_a_gpu_ranks_are_refused():
    with pytest.raises(UsageError, match="Ranks with CUDA devices cannot be run: torch"):
        run_ranks(os.getpid, 2, backend="cuda")


@pytest.mark.parametrize(("size", "devices", "expected"), [(2, 1, "staged"), (4, 2, "staged"), (1, 0, "staged")])
def test_ranks_that_share_a_gpu_go_through_host_memory(size, devices, expected):
    assert cuda_ranks.library(size, devices) == expected


def test_ranks_with_a_gpu_each_use_nccl():
    assert cuda_ranks.library(2, 2) == ("nccl" if dist.is_nccl_available() else "staged")


def results_of(group):
    """The result of each collective, for tensors that differ between ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(2.0 * size) + 10 * rank
    found = []
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        tensor = own.to(dtype)
        dist.all_reduce(tensor, group=group)
        found.append(tensor)
        tensor = own.to(dtype)
        dist.broadcast(tensor, 1, group=group)
        found.append(tensor)
        gathered = torch.empty(size * len(own), dtype=dtype)
        dist.all_gather_into_tensor(gathered, own.to(dtype), group=group)
        swapped = torch.empty(len(own), dtype=dtype)
        dist.all_to_all_single(swapped, own.to(dtype), group=group)
        found += [gathered, swapped]
    largest = own.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    scattered = torch.empty(2)
    work = dist.reduce_scatter_tensor(scattered, own, group=group, async_op=True)
    work.wait()
    received = torch.empty(2 * size)
    pairs = [
        dist.P2POp(dist.isend, own, (rank + 1) % size, group),
        dist.P2POp(dist.irecv, received, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    dist.barrier(group=group)
    return [*found, largest, scattered, received]


def staged_and_gloo():
    cuda_ranks.register("cpu")
    staged = dist.new_group(backend=cuda_ranks.STAGED)
    assert dist.get_backend(staged) == cuda_ranks.STAGED
    return results_of(staged), results_of(dist.group.WORLD)


def test_collectives_through_host_memory_are_those_of_gloo():
    for staged, gloo in run_ranks(staged_and_gloo, 3):
        assert len(staged) == len(gloo)
        for found, expected in zip(staged, gloo, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_results_are_pickled_like_any_value():
    import pickle

    value = {"x": torch.arange(3), "y": (1, "two")}
    assert pickle.loads(cuda_ranks.dumps(value))["y"] == (1, "two")
    assert pickle.loads(cuda_ranks.dumps(value))["x"].tolist() == [0, 1, 2]
