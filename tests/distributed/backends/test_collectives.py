"""Collectives compared with their definitions, with real ranks, through gloo and what else is installed for the CPU.

Entries are small integers, so that sums are exact in every dtype and order, and results are compared bit by bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from neuron_accel.backends.process_group import check_serves, installed_library
from neuron_accel.backends.select import SHARED_MEMORY_VARIABLE, flag
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.errors import CommunicationError, LayoutError, UsageError
from neuron_accel.testing import RanksError, run_ranks

MOVED = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]
SUMMED = [d for d in MOVED if d not in (torch.bool, torch.float8_e4m3fn)]
ORDERED = [d for d in SUMMED if not d.is_complex]
DIMS = [0, 1, -1]
SHAPE = (4, 8, 12)


@pytest.fixture(autouse=True, params=sorted({"gloo", installed_library()}))
def library(request, monkeypatch):
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(request.param != "gloo"))


def connect(**options):
    """Returns the backend of a rank on its device."""
    shares = flag(os.environ, SHARED_MEMORY_VARIABLE, default=True)
    options.setdefault("library", installed_library() if shares else "gloo")
    backend = TorchBackend.connect("neuron" if hasattr(torch, "neuron") else "cpu", **options)
    return backend, backend.new_group([range(backend.world_size)], "tp")


def data(rank: int, dtype: torch.dtype, shape=SHAPE) -> torch.Tensor:
    """Returns the input of ``rank``, which every rank can compute for every other."""
    integers = torch.randint(0, 2 if dtype == torch.bool else 9, shape, generator=torch.Generator().manual_seed(rank))
    return integers.to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.is_contiguous()
    actual = actual.cpu()
    one, other = (t.contiguous().view(-1).view(torch.uint8) for t in (actual, expected))
    assert torch.equal(one, other), (actual, expected)


def moves_uneven_rows(backend, group, dtype: torch.dtype) -> None:
    """Rank r sends (r + 2 i) % 3 rows to rank i: none at all to some, and rank 0 gets none from itself."""
    n, rank = group.size, backend.rank
    counts = [[(r + 2 * i) % 3 for i in range(n)] for r in range(n)]
    split = [data(r, dtype, (sum(counts[r]), 2, 3)).split(counts[r]) for r in range(n)]
    sent, received = counts[rank], [counts[r][rank] for r in range(n)]
    expected = torch.cat([split[r][rank] for r in range(n)])
    same(backend.all_to_all_uneven(torch.cat(split[rank]).to(backend.device), group, sent, received), expected)


def sends_to_everyone(backend, group, dtype: torch.dtype) -> None:
    """Three messages to each rank, of which the last one is waited for first."""
    shapes, others = [(2, 3), (5,), (1, 2, 4)], [i for i in range(group.size) if i != group.index]
    pending = [(o, shape, backend.start_receive(shape, dtype, group, o)) for shape in shapes for o in others]
    sent = [data(100 * backend.rank + o, dtype, shape).to(backend.device) for shape in shapes for o in others]
    sending = [backend.start_send(x, group, o) for x, o in zip(sent, others * len(shapes), strict=True)]
    for x, each in zip(sent, sending, strict=True):
        each.wait()
        x.zero_()  # what was waited for may be changed
    for other, shape, receiving in reversed(pending):
        same(receiving.wait(), data(100 * other + backend.rank, dtype, shape))


def moves(dtypes: list[torch.dtype]) -> None:
    backend, group = connect()
    n, rank = group.size, backend.rank
    for dtype in dtypes:
        everyone = [data(r, dtype) for r in range(n)]
        x = everyone[rank].to(backend.device)
        for dim in DIMS:
            same(backend.all_gather(x, group, dim), torch.cat(everyone, dim))
            same(backend.chunk(x, group, dim).contiguous(), everyone[rank].chunk(n, dim)[rank].contiguous())
            for concat_dim in DIMS:
                received = torch.cat([peer.chunk(n, dim)[rank] for peer in everyone], concat_dim)
                same(backend.all_to_all(x, group, dim, concat_dim), received)
        if backend.has_uneven_all_to_all:
            moves_uneven_rows(backend, group, dtype)
        for shift in (1, -1, 2, n, n + 1):
            same(backend.permute(x, group, shift), everyone[(rank - shift) % n])
        if backend.has_point_to_point:
            sends_to_everyone(backend, group, dtype)
        for source in range(n):
            same(backend.broadcast(x, group, source), everyone[source])
        same(x, data(rank, dtype))  # nothing above touched its input


def sums(dtypes: list[torch.dtype]) -> None:
    backend, group = connect()
    n, rank = group.size, backend.rank
    for dtype in dtypes:
        everyone = [data(r, dtype) for r in range(n)]
        total = torch.stack(everyone).sum(0).to(dtype)
        for dim in DIMS:
            x = everyone[rank].to(backend.device, copy=True)
            same(backend.reduce_scatter(x, group, dim), total.chunk(n, dim)[rank])
            same(x, everyone[rank])
        same(backend.all_reduce(everyone[rank].to(backend.device, copy=True), group), total)


def together() -> None:
    backend, group = connect()
    shapes = [(5, 3), (), (4,)]
    everyone = [
        [data(7 * rank + i, torch.float32, shape) for i, shape in enumerate(shapes)] for rank in range(group.size)
    ]
    found = backend.all_reduce_together(everyone[backend.rank], group, 0.5)
    for value, *given in zip(found, *everyone, strict=True):
        same(value, torch.stack(given).sum(0) * 0.5)
    assert float(backend.number(0.25)) == 0.25


def test_several_tensors_in_one_sum():
    run_ranks(together, 2)


def extremes() -> None:
    backend, group = connect()
    for dtype in [*ORDERED, torch.bool]:
        everyone = torch.stack([data(r, dtype, (5, 3)) for r in range(group.size)])
        same(backend.all_reduce(everyone[backend.rank].clone(), group, "max"), everyone.amax(0))
        same(backend.all_reduce(everyone[backend.rank].clone(), group, "min"), everyone.amin(0))
    flags = torch.tensor([backend.rank == 1, False])
    same(backend.all_reduce(flags, group), torch.tensor([True, False]))
    poisoned = torch.tensor([float("nan") if backend.rank == 1 else 1.0, 2.0])
    assert backend.all_reduce(poisoned.clone(), group, "max").isnan().tolist() == [True, False]
    assert backend.all_reduce(poisoned.clone(), group, "min").isnan().tolist() == [True, False]


@pytest.mark.parametrize("n", [2, 4])
def test_moving(n):
    run_ranks(moves, n, MOVED)


@pytest.mark.parametrize("n", [2, 4])
def test_summing(n):
    run_ranks(sums, n, SUMMED)


def test_extremes():
    run_ranks(extremes, 4)


def odd_shapes() -> None:
    backend, group = connect()
    n, rank = group.size, backend.rank
    # no dims at all, nothing at all, and lengths that nothing divides
    same(backend.all_gather(torch.tensor(float(rank)), group), torch.arange(n, dtype=torch.float32))
    same(
        backend.all_reduce(torch.tensor(rank, dtype=torch.int16), group, "max"), torch.tensor(n - 1, dtype=torch.int16)
    )
    for dtype in (torch.float32, torch.bfloat16):
        empty = torch.empty(0, n, dtype=dtype)
        same(backend.all_reduce(empty.clone(), group), empty)
        same(backend.all_gather(empty, group, 1), torch.empty(0, n * n, dtype=dtype))
        same(backend.reduce_scatter(empty, group, 1), empty[:, :1])
        same(backend.all_to_all(empty, group, 1, 0), empty[:, :1])
        same(backend.permute(empty, group), empty)
        same(backend.all_to_all_uneven(empty, group, [0] * n, [0] * n), empty)
        only_to_first = [n if i == 0 else 0 for i in range(n)], [n * (rank == 0)] * n
        expected = torch.ones(n * n * (rank == 0), 2, dtype=dtype)
        same(backend.all_to_all_uneven(torch.ones(n, 2, dtype=dtype), group, *only_to_first), expected)
        for wrong in (([1] * n, [1]), ([1], [1] * n), ([2] * n, [1] * n)):
            with pytest.raises(ValueError, match="do not fit a group"):  # before anything is sent
                backend.all_to_all_uneven(torch.ones(n, 2, dtype=dtype), group, *wrong)
        same(backend.broadcast(empty, group), empty)
        odd = torch.full((7, 3), 1.0, dtype=dtype)
        same(backend.all_reduce(odd.clone(), group), odd * n)
    # strides: transposed, stepped, expanded
    for x in (data(rank, torch.bfloat16, (n, 6)).t(), data(rank, torch.float32, (24,))[::2]):
        peers = [data(r, x.dtype, (n, 6)).t() if x.dim() == 2 else data(r, x.dtype, (24,))[::2] for r in range(n)]
        same(backend.all_gather(x, group, -1), torch.cat(peers, -1))
        same(backend.permute(x, group), peers[rank - 1].contiguous())
        same(backend.broadcast(x.clone(), group, 1).contiguous(), peers[1].contiguous())
        same(backend.reduce_scatter(x, group, -1), sum(peers).chunk(n, -1)[rank].contiguous())
        same(backend.all_reduce(x, group), sum(peers).contiguous())
    expanded = torch.tensor([[float(rank)]]).expand(2, 3)
    same(backend.all_reduce(expanded, group), torch.full((2, 3), n * (n - 1) / 2))
    tracked = torch.ones(2, requires_grad=True)
    assert not backend.all_gather(tracked, group).requires_grad


def test_odd_shapes_and_strides():
    run_ranks(odd_shapes, 2)
    run_ranks(odd_shapes, 4)


def bits_of_sums(seed: int) -> list[list[torch.Tensor]]:
    backend, group = connect()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        everyone = [torch.randn(4096, generator=torch.Generator().manual_seed(seed + r)).to(dtype) for r in range(4)]
        in_order = everyone[0].float()
        for peer in everyone[1:]:
            in_order = in_order + peer.float()
        if (backend.rank + seed) % 3 == 0:
            time.sleep(0.02)  # arriving late changes nothing
        scattered = backend.reduce_scatter(everyone[backend.rank], group)
        same(scattered, in_order.to(dtype).chunk(4)[backend.rank])
        reduced = backend.all_reduce(everyone[backend.rank], group)
        if dtype == torch.bfloat16:
            same(reduced, in_order.to(dtype))
        results.append([scattered, reduced])
    return results


def test_sums_depend_on_nothing_but_the_ranks():
    first, second = run_ranks(bits_of_sums, 4, 7), run_ranks(bits_of_sums, 4, 7)
    for one, other in zip(first, second, strict=True):
        for i in range(2):
            for j in range(2):
                same(one[i][j], other[i][j])
    for results in first[1:]:
        same(results[0][1], first[0][0][1])
        same(results[1][1], first[0][1][1])


# ---- what is counted -------------------------------------------------------------------------------------------------
def counted() -> list[tuple[str, str, int, int]]:
    backend, group = connect()
    x = torch.ones(8, 6)  # 192 bytes
    with backend.record() as traffic:
        backend.all_reduce(x.clone(), group)
        backend.all_reduce(x.bfloat16(), group)
        backend.all_gather(x, group, 1)
        backend.reduce_scatter(x, group)
        backend.all_to_all(x, group)
        counts = [8] * group.size
        backend.all_to_all_uneven(x.repeat(group.size, 1), group, counts, counts)
        backend.permute(x, group)
        backend.broadcast(x, group, 1)
        backend.chunk(x, group)
        backend.all_gather_object("x", group)
        if backend.rank < 2 and backend.has_point_to_point:
            sending = backend.start_send(x[:3], group, 1 - backend.rank)
            backend.start_receive((3, 6), x.dtype, group, 1 - backend.rank).wait()
            sending.wait()
    backend.all_reduce(x.clone(), group)
    return [(t.op, t.group, t.size, t.sent) for t in traffic.transfers]


@pytest.mark.parametrize("n", [2, 4])
def test_what_is_sent_is_the_least_possible(n):
    size = 192
    for rank, transfers in enumerate(run_ranks(counted, n)):
        assert transfers == [
            ("all_reduce", "tp", n, 2 * (n - 1) * size // n),
            ("all_reduce", "tp", n, 2 * (n - 1) * size // 2 // n),
            ("all_gather", "tp", n, (n - 1) * size),
            ("reduce_scatter", "tp", n, (n - 1) * size // n),
            ("all_to_all", "tp", n, (n - 1) * size // n),
            ("all_to_all_uneven", "tp", n, (n - 1) * size),
            ("permute", "tp", n, size),
            ("broadcast", "tp", n, size if rank == 1 else 0),
            *([("send", "tp", n, 72), ("receive", "tp", n, 0)] if rank < 2 else []),
        ]


# ---- overlap ---------------------------------------------------------------------------------------------------------
def started(folder: str) -> None:
    """Rank 1 takes part only after rank 0 has returned from every ``start_``; if they waited, this would deadlock."""
    backend, group = connect()
    started = Path(folder, "started")
    if backend.rank == 1:
        while not started.exists():
            time.sleep(0.005)
    x = data(backend.rank, torch.float32)
    half = data(backend.rank, torch.bfloat16)
    pending = [
        backend.start_all_reduce(x.clone(), group),
        backend.start_all_gather(x, group, 1),
        backend.start_reduce_scatter(x, group, -1),
        backend.start_permute(x, group),
        backend.start_all_to_all(x, group, -1, 0),
        backend.start_all_reduce(half, group),
    ]
    if backend.rank == 0:
        started.touch()
    everyone = [data(r, torch.float32) for r in range(2)]
    expected = [sum(everyone), torch.cat(everyone, 1), sum(everyone).chunk(2, -1)[backend.rank].contiguous()]
    expected.append(everyone[1 - backend.rank])
    expected.append(torch.cat([each.chunk(2, -1)[backend.rank] for each in everyone], 0))
    for work, result in zip(pending, [*expected, sum(everyone).bfloat16()], strict=True):
        same(work.wait(), result)
        assert work.wait() is work.wait()


def test_starting_does_not_wait(tmp_path):
    run_ranks(started, 2, str(tmp_path))


def gathered_among_messages() -> None:
    """Messages of the program, some of them sent before an all-gather and received after it, are not taken for its."""
    import torch.distributed as dist

    backend = TorchBackend.connect("cpu")
    group = backend.new_group([range(3)], "dp")
    rank, following, before = backend.rank, (backend.rank + 1) % 3, (backend.rank - 1) % 3
    sent = [torch.full((4,), 100.0 + rank), torch.full((4,), 200.0 + rank)]
    sending = [backend.start_send(sent[0], group, following), dist.isend(sent[1], following, tag=1)]
    pending = [backend.start_all_gather(torch.full((4,), each + rank), group) for each in (0.0, 10.0)]
    received = torch.empty(4)
    dist.irecv(received, before, tag=1).wait()
    same(received, torch.full((4,), 200.0 + before))
    same(backend.start_receive((4,), torch.float32, group, before).wait(), torch.full((4,), 100.0 + before))
    for each, work in zip((0.0, 10.0), pending, strict=True):
        same(work.wait(), torch.arange(each, each + 3).repeat_interleave(4))
    for work in sending:
        work.wait()
    backend.shutdown()


def test_all_gathers_and_messages_do_not_meet():
    run_ranks(gathered_among_messages, 3)


# ---- groups ----------------------------------------------------------------------------------------------------------
def grouped() -> None:
    import torch.distributed as dist

    backend, world = connect()
    serves = backend.device.type != "cpu" or backend._library == dist.get_backend()
    assert (world.handle is dist.group.WORLD) == serves
    inner = backend.new_group([[0, 1], [2, 3]], "tp")
    outer = backend.new_group([[1, 3], [2, 0]], "dp")
    alone = backend.new_group([[0], [1], [2], [3]], "pp")
    uneven = backend.new_group([[0, 1, 2], [3]], "ragged")
    rank = torch.tensor([backend.rank])
    assert backend.all_gather(rank, inner).tolist() == [[0, 1], [2, 3]][backend.rank // 2] == list(inner.ranks)
    assert backend.all_gather(rank, outer).tolist() == [[0, 2], [1, 3]][backend.rank % 2] == list(outer.ranks)
    assert backend.all_gather(rank, alone).tolist() == [backend.rank]
    assert backend.all_gather(rank, uneven).tolist() == ([0, 1, 2] if backend.rank < 3 else [3])
    assert (inner.index, outer.index) == (backend.rank % 2, backend.rank // 2)
    assert backend.permute(rank, outer).item() == (backend.rank + 2) % 4
    assert backend.broadcast(rank, inner, 1).item() == inner.ranks[1]
    assert backend.broadcast_object(backend.rank, outer, 1) == outer.ranks[1]
    assert backend.all_gather_object({backend.rank: "x" * backend.rank}, outer) == [{r: "x" * r} for r in outer.ranks]
    again = backend.new_group([[3, 2], [1, 0]], "cp")
    assert again.name == "cp"
    assert again.handle is inner.handle
    assert again.partition == ((0, 1), (2, 3))
    backend.barrier()
    with pytest.raises(ValueError, match="partition"):
        backend.new_group([[0, 1], [2]], "tp")
    with pytest.raises(LayoutError, match="into 2 equal chunks"):
        backend.reduce_scatter(torch.ones(3), inner)


def test_groups():
    run_ranks(grouped, 4)


# ---- lost peers -----------------------------------------------------------------------------------------------------
OPERATIONS = {
    "all_reduce": lambda b, g, x: b.all_reduce(x, g),
    "all_reduce bf16": lambda b, g, x: b.all_reduce(x.bfloat16(), g),
    "all_gather": lambda b, g, x: b.start_all_gather(x, g).wait(),
    "reduce_scatter": lambda b, g, x: b.reduce_scatter(x, g),
    "all_to_all": lambda b, g, x: b.all_to_all(x, g),
    "all_to_all_uneven": lambda b, g, x: b.all_to_all_uneven(x, g, *[[3 - 2 * b.rank, 1 + 2 * b.rank]] * 2),
    "permute": lambda b, g, x: b.permute(x, g),
    "receive": lambda b, g, x: (b.start_send(x, g, 0) if b.rank else b.start_receive([4], x.dtype, g, 1)).wait(),
    "broadcast": lambda b, g, x: b.broadcast(x, g, 1),
    "all_gather_object": lambda b, g, x: b.all_gather_object("x", g),
    "broadcast_object": lambda b, g, x: b.broadcast_object("x", g, 1),
    "barrier": lambda b, g, x: b.barrier(),
}


def lose_a_peer(name: str) -> None:
    backend, group = connect()
    OPERATIONS[name](backend, group, torch.ones(4))
    if backend.rank == 1:
        os._exit(17)
    for _ in range(3):  # one rank may be through the first before the other is gone
        OPERATIONS[name](backend, group, torch.ones(4))


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_lost_peer_is_reported_at_once(name):
    with pytest.raises(RanksError) as caught:
        run_ranks(lose_a_peer, 2, name)
    error = caught.value.errors[0]
    assert isinstance(error, CommunicationError), error
    assert repr(name.split()[0]) in error.what
    assert "rank 0 of 2" in error.where
    assert ("'world'" if name == "barrier" else "'tp'") in error.where
    assert error.fix


def lose_a_distant_peer() -> None:
    backend, world = connect()
    inner = backend.new_group([[0, 1], [2, 3]], "tp")
    backend.all_reduce(torch.ones(4), world)
    if backend.rank == 3:
        os._exit(1)
    for _ in range(10):
        backend.all_reduce(torch.ones(4), inner)
        backend.all_reduce(torch.ones(4), world)


def test_everyone_learns_of_a_lost_peer():
    with pytest.raises(RanksError) as caught:
        run_ranks(lose_a_distant_peer, 4)
    assert set(caught.value.errors) == {0, 1, 2, 3}
    for rank in range(3):
        assert isinstance(caught.value.errors[rank], CommunicationError)
    assert caught.value.__cause__.code == 1


def come_late() -> None:
    backend, _ = connect(timeout=timedelta(seconds=0.5))
    group = backend.new_group([[0, 1], [2]], "tp")
    backend.all_reduce(torch.ones(1), group)
    if backend.rank == 1:
        time.sleep(1.5)
    backend.all_reduce(torch.ones(1), group)


def test_a_late_peer_is_reported_in_the_end():
    with pytest.raises(RanksError) as caught:
        run_ranks(come_late, 3)
    error = caught.value.errors[0]
    assert isinstance(error, CommunicationError)
    assert "in time" in error.why
    assert "timeout" in error.fix


# ---- connecting ------------------------------------------------------------------------------------------------------
def connect_from_the_environment() -> None:
    import torch.distributed as dist

    assert not dist.is_initialized()
    backend, group = connect()
    pair = backend.new_group([[0, 1], [2]], "tp")
    assert backend.all_gather(torch.tensor([backend.rank]), group).tolist() == [0, 1, 2]
    assert backend.all_gather(torch.tensor([backend.rank]), pair).tolist() == list(pair.ranks)
    backend.barrier()
    backend.shutdown()
    backend.shutdown()
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="shut down"):
        backend.all_reduce(torch.ones(1), group)


def test_connecting_from_the_environment():
    run_ranks(connect_from_the_environment, 3, backend=None)


def leave_the_group_of_others() -> None:
    import torch.distributed as dist

    backend = TorchBackend.connect()
    pair = backend.new_group([[0, 1], [2]], "tp")
    backend.all_reduce(torch.ones(1), pair)
    backend.shutdown()
    assert dist.is_initialized()
    again = TorchBackend.connect()
    assert again.all_reduce(torch.ones(1), again.new_group([[0, 1], [2]], "tp")).item() == pair.size
    with pytest.raises(UsageError, match="does not support device 'cuda'"):
        check_serves(torch.device("cuda"))


def test_a_group_that_others_made_stays():
    run_ranks(leave_the_group_of_others, 3)


def leave_without_a_word() -> list[tuple[int, str]]:
    script = (
        "import torch\n"
        "from neuron_accel.backends.torch_distributed import TorchBackend\n"
        "backend = TorchBackend.connect()\n"
        "world = backend.new_group([range(backend.world_size)], 'w')\n"
        "parts = backend.new_group([[0, 1]], 'tp')\n"
        "print(int(backend.all_reduce(torch.ones(1), world)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def test_a_process_may_simply_end():
    for code, out, err in run_ranks(leave_without_a_word, 2, backend=None):
        assert (code, out.splitlines()[-1:]) == (0, ["2"]), err  # gloo of torch 2.9 has something to say before
        assert "Error" not in err


def into_memory(dtype):
    """Compares reduce-scatter and all-gather into the caller's memory with those that allocate their result."""
    backend, group = connect()
    tensor = (torch.arange(group.size * 7.0) * (backend.rank + 1)).to(dtype)
    out, scratch = torch.empty(7, dtype=torch.float32), torch.empty_like(tensor)
    with backend.record() as traffic:
        mine = backend.start_reduce_scatter_into(out, tensor, group, scale=0.5, scratch=scratch).wait()
    expected = backend.reduce_scatter(tensor.clone(), group).float() * 0.5
    whole = torch.zeros(group.size * 7, dtype=dtype)
    part = backend.chunk(whole, group).copy_(mine)
    gathered = backend.start_all_gather_into(whole, part, group).wait()
    apart = backend.start_all_gather_into(torch.zeros_like(whole), mine.to(dtype), group).wait()
    equal = torch.equal(mine, expected) and torch.equal(gathered, apart)
    right = torch.equal(gathered, backend.all_gather(mine.to(dtype), group))
    return mine is out and equal and right, traffic.sent(op="reduce_scatter") == (group.size - 1) * 7 * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_into_memory_of_the_callers(ranks, dtype):
    assert run_ranks(into_memory, ranks, dtype) == [(True, True)] * ranks
