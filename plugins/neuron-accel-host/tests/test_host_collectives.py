"""What torch.distributed does with this backend, compared with the definitions."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from host_support import needs_shared_memory, new_group
from neuron_accel_host import HostGroup
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from neuron_accel.testing import run_ranks

pytestmark = needs_shared_memory
SUMMED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int16, torch.uint8]
MOVED = [*SUMMED, torch.bool, torch.complex64]
LARGE = 1 << 14
"""Elements from which an all-reduce of float32 takes two exchanges on three ranks."""


def data(rank: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (6, 4)) -> torch.Tensor:
    """What a rank has: small integers, whose sums are exact in every dtype and order."""
    return torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def gathers(out: torch.Tensor, tensor: torch.Tensor, **options: object) -> object:
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(out, tensor, **options)


def scatters_sums(out: torch.Tensor, tensor: torch.Tensor, **options: object) -> object:
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(out, tensor, **options)


def sums() -> None:
    group, rank, size = new_group(), dist.get_rank(), dist.get_world_size()
    for dtype in SUMMED:
        for shape in ((6, 4), (), (0,), (LARGE + 1, 3)):
            everyone = torch.stack([data(r, dtype, shape) for r in range(size)])
            total = everyone[rank].clone()
            dist.all_reduce(total, group=group)
            assert torch.equal(total, everyone.sum(0).to(dtype)), (dtype, shape)
        everyone = torch.stack([data(r, dtype) for r in range(size)])
        part = torch.empty(6 // size, 4, dtype=dtype)
        scatters_sums(part, everyone[rank], group=group)
        assert torch.equal(part, everyone.sum(0).to(dtype).chunk(size)[rank])
    everyone = torch.stack([data(r) for r in range(size)])
    for op, expected in ((dist.ReduceOp.AVG, everyone.mean(0)), (dist.ReduceOp.MAX, everyone.amax(0))):
        found = everyone[rank].clone()
        dist.all_reduce(found, op, group=group)
        torch.testing.assert_close(found, expected)
    scatters_sums(part := torch.empty(6 // size, 4), everyone[rank], op=dist.ReduceOp.AVG, group=group)
    torch.testing.assert_close(part, everyone.mean(0).chunk(size)[rank])
    weight = nn.Parameter(data(rank))
    dist.all_reduce(weight, group=group)
    assert torch.equal(weight, everyone.sum(0))


def copies() -> None:
    group, rank, size = new_group(), dist.get_rank(), dist.get_world_size()
    for dtype in MOVED:
        everyone = [data(r, dtype) for r in range(size)]
        out = torch.empty(size * 6, 4, dtype=dtype)
        gathers(out, everyone[rank], group=group)
        assert torch.equal(out, torch.cat(everyone))
        gathers(out, out.chunk(size)[rank], group=group)
        assert torch.equal(out, torch.cat(everyone)), "in place"
        rows = [torch.empty(6, 4, dtype=dtype) for _ in everyone]
        dist.all_gather(rows, everyone[rank], group=group)
        assert torch.equal(torch.cat(rows), torch.cat(everyone))
        out = torch.empty(6, 4, dtype=dtype)
        dist.all_to_all_single(out, everyone[rank], group=group)
        assert torch.equal(out, torch.cat([each.chunk(size)[rank] for each in everyone]))
        for source in range(size):
            tensor = everyone[rank].clone()
            dist.broadcast(tensor, source, group=group)
            assert torch.equal(tensor, everyone[source])
    counts = [[(r + 2 * i) % 3 for i in range(size)] for r in range(size)]  # rows from rank r to rank i
    sent = [data(r, shape=(sum(counts[r]), 2)) for r in range(size)]
    received = [counts[r][rank] for r in range(size)]
    out = torch.empty(sum(received), 2)
    dist.all_to_all_single(out, sent[rank], received, counts[rank], group=group)
    assert torch.equal(out, torch.cat([sent[r].split(counts[r])[rank] for r in range(size)]))


def rooted() -> None:
    """What gloo does."""
    group, rank, size = new_group(), dist.get_rank(), dist.get_world_size()
    everyone = torch.stack([data(r) for r in range(size)])
    total = everyone[rank].clone()
    dist.reduce(total, 1, group=group)
    assert rank != 1 or torch.equal(total, everyone.sum(0))
    rows = [torch.empty(6, 4) for _ in everyone] if rank == 0 else None
    dist.gather(everyone[rank], rows, 0, group=group)
    assert rows is None or torch.equal(torch.stack(rows), everyone)
    dist.scatter(out := torch.empty(6, 4), list(everyone) if rank == 0 else None, 0, group=group)
    assert torch.equal(out, everyone[rank])
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank}, group=group)
    assert found == [{"rank": r} for r in range(size)]


def messages() -> None:
    group, rank, size = new_group(), dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    out = torch.empty(6, 4)
    sent = dist.P2POp(dist.isend, data(rank), after, group)
    for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, out, before, group)]):
        work.wait()
    assert torch.equal(out, data(before))
    tagged, plain = torch.empty(2), torch.empty(3)
    receiving = [dist.irecv(plain, before, group=group), dist.irecv(tagged, before, group=group, tag=7)]
    dist.send(torch.full((2,), 2.0), after, group=group, tag=7)
    dist.send(torch.full((3,), 3.0), after, group=group)
    for work in receiving:
        work.wait()
    assert plain.tolist() == [3.0] * 3
    assert tagged.tolist() == [2.0] * 2
    if rank:
        dist.send(torch.full((3,), float(rank)), 0, group=group)
    else:
        sources = []
        for _ in range(size - 1):
            sources.append(dist.recv(plain, group=group))
            assert plain.tolist() == [float(sources[-1])] * 3
        assert sorted(sources) == list(range(1, size))
    dist.barrier(group=group)


def asynchronous() -> None:
    group, rank, size = new_group(), dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((3 + LARGE * (i % 2),), float(i + rank)) for i in range(20)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    if rank == 0:
        while not works[0].is_completed():
            time.sleep(0.001)
    for i, work in reversed(list(enumerate(works))):
        work.wait()
        assert tensors[i].eq(size * i + sum(range(size))).all()
    future = dist.all_reduce(torch.ones(2), group=group, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [2.0 * size] * 2
    work = dist.barrier(group=group, async_op=True)
    work.wait(timedelta(seconds=20))
    assert work.is_completed()
    sent = dist.isend(torch.ones(1), (rank + 1) % size, group=group)
    received = dist.irecv(torch.zeros(1), (rank - 1) % size, group=group)
    with pytest.raises(NotImplementedError, match="messages have no futures"):
        received.get_future()
    received.wait()
    sent.wait()


def overloads() -> None:
    """Other signatures of the methods of a process group."""
    group, rank, size = new_group(), dist.get_rank(), dist.get_world_size()
    everyone = [data(r) for r in range(size)]
    tensor = everyone[rank].clone()
    group.broadcast(tensor, 1).wait()
    assert torch.equal(tensor, everyone[1])
    group.allreduce([tensor], dist.ReduceOp.SUM).wait()
    assert torch.equal(tensor, size * everyone[1])
    group.allreduce(tensor).wait()
    assert torch.equal(tensor, size * size * everyone[1])
    rows = [torch.empty(6, 4) for _ in everyone]
    group.allgather(rows, everyone[rank]).wait()
    assert torch.equal(torch.cat(rows), torch.cat(everyone))
    group.barrier().wait()


def compiled_names() -> None:
    """Functional collectives, which call the group from C++."""
    group, rank, size = new_group(), dist.get_rank(), dist.get_world_size()
    everyone = torch.stack([data(r) for r in range(size)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(functional.all_reduce(everyone[rank], "sum", group) + 0, everyone.sum(0))
        assert torch.equal(functional.all_gather_tensor(everyone[rank], 0, group) + 0, everyone.flatten(0, 1))
        part = functional.reduce_scatter_tensor(everyone[rank], "sum", 0, group) + 0
        assert torch.equal(part, everyone.sum(0).chunk(size)[rank])
        both = functional.all_reduce_coalesced([everyone[rank], everyone[rank][0]], "sum", group)
        assert torch.equal(both[1] + 0, everyone.sum(0)[0])
        out = functional.all_to_all_single(everyone[rank], None, None, group) + 0
        assert torch.equal(out, torch.cat([each.chunk(size)[rank] for each in everyone]))


@pytest.mark.parametrize("check", [sums, copies, rooted, messages, asynchronous, overloads, compiled_names])
@pytest.mark.parametrize("ranks", [2, 3])
def test_is_what_torch_defines(check, ranks):
    run_ranks(check, ranks)


def go_on_elsewhere() -> float:
    """Rank 0 waits for another group while the others need it in the middle of an all-reduce."""
    group, other = new_group(), dist.new_group(backend="gloo")
    tensor = torch.ones(LARGE)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if dist.get_rank() == 0:
        dist.barrier(group=other)
        work.wait()
    else:
        work.wait()
        dist.barrier(group=other)
    return tensor.sum().item()


def test_other_ranks_need_not_wait_until_this_one_waits():
    assert run_ranks(go_on_elsewhere, 3) == [3.0 * LARGE] * 3


def train(backend: str, hook: bool, folder: str, rank: int, size: int) -> list[list[float]]:
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/{backend}", size), rank=rank, world_size=size)
    assert isinstance(dist.group.WORLD, HostGroup) == (backend == "host")
    # The model goes before the group: one that holds the last reference to a group of gloo may wait for ever for the
    # group's thread, which waits for the interpreter lock.
    weights = weights_of_training(hook, rank)
    dist.destroy_process_group()
    return weights


def weights_of_training(hook: bool, rank: int) -> list[list[float]]:
    """Steps of plain DistributedDataParallel, with buckets smaller than a layer."""
    torch.manual_seed(rank)
    layers = nn.Sequential(nn.Linear(64, 400), nn.BatchNorm1d(400), nn.Tanh(), nn.Linear(400, 100), nn.Linear(100, 1))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.05)
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def train_on_both(folder: str, hook: bool) -> tuple[list[list[float]], list[list[float]]]:
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import neuron_accel_host  # noqa: F401  which is all that a program needs

    return train("host", hook, folder, rank, size), train("gloo", hook, folder, rank, size)


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "a hook"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_trains_as_with_gloo(ranks, hook, tmp_path):
    results = run_ranks(train_on_both, ranks, str(tmp_path), hook, backend=None)
    for ours, gloo in results:
        assert ours == results[0][0], "the same on every rank"
        torch.testing.assert_close(
            torch.cat([torch.tensor(each) for each in ours]), torch.cat([torch.tensor(each) for each in gloo])
        )
