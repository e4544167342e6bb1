"""What is particular to ranks that communicate through shared memory; test_collectives.py has their results."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from neuron_accel.backends import shared_memory
from neuron_accel.backends.select import SHARED_MEMORY_VARIABLE
from neuron_accel.backends.torch_distributed import TorchBackend
from neuron_accel.errors import CommunicationError
from neuron_accel.testing import RanksError, run_ranks
from neuron_accel.testing.parity import Training, assert_parallel_equivalence
from neuron_accel.testing.resources import bytes_sent
from tests.distributed.models import llama, token_batches

pytestmark = pytest.mark.skipif(shared_memory.why_not_here() is not None, reason=str(shared_memory.why_not_here()))

REST = 1000
"""Bytes that gloo may still send for a barrier that this rank has left."""


def connect(**options):
    backend = TorchBackend.connect("cpu", **{"shares_memory": True, **options})
    return backend, backend.new_group([range(backend.world_size)], "world")


def through_the_kernel(shares_memory: bool) -> tuple[int, int]:
    """Bytes of an all-reduce that were counted, and that the kernel has sent."""
    backend, group = connect(shares_memory=shares_memory)
    backend.all_reduce(torch.ones(4), group)
    backend.barrier()
    before = bytes_sent()
    with backend.record() as traffic:
        assert backend.all_reduce(torch.ones(1 << 20), group).eq(2).all()
        assert backend.permute(torch.ones(1 << 20), group).eq(1).all()
    backend.barrier()  # what was sent has left
    return traffic.sent(), bytes_sent() - before


def test_nothing_is_sent_through_the_kernel():
    for counted, sent in run_ranks(through_the_kernel, 2, True):
        assert counted == 8 << 20
        assert sent < REST
    for counted, sent in run_ranks(through_the_kernel, 2, False):
        assert sent >= counted == 8 << 20


def of_an_accelerator() -> int:
    from neuron_accel import NeuronAccelerator

    run = NeuronAccelerator().run
    run.backend.barrier()
    before = bytes_sent()
    run.backend.all_reduce(torch.ones(1 << 18), run.world)
    return bytes_sent() - before


def test_a_variable_turns_it_off():
    assert max(run_ranks(of_an_accelerator, 2)) < REST
    assert min(run_ranks(of_an_accelerator, 2, env={SHARED_MEMORY_VARIABLE: "0"})) >= 1 << 20


def with_a_distant_rank() -> tuple[int, int]:
    here = shared_memory.host_of_this_process()
    if int(os.environ["RANK"]) == 2:
        shared_memory.host_of_this_process = lambda: ("another boot", *here[1:])
    backend, group = connect()
    pair = backend.new_group([[0, 1], [2]], "pair")
    backend.barrier()
    before = bytes_sent()
    total = backend.all_reduce(torch.ones(1 << 18), pair)[0]
    sent_in_pair = bytes_sent() - before
    assert backend.all_reduce(total.repeat(1 << 12), group).eq(5).all()
    return sent_in_pair, bytes_sent() - before


def test_groups_of_several_hosts_use_gloo():
    first, second, third = run_ranks(with_a_distant_rank, 3)
    assert max(first[0], second[0], third[0]) < REST  # the pair shares a host
    assert min(first[1], second[1], third[1]) > REST


def many_under_way() -> None:
    backend, group = connect()
    tensors = [torch.full((3,), float(i + backend.rank)) for i in range(shared_memory.ENTRIES + 100)]
    pending = [backend.start_all_reduce(tensor, group) for tensor in tensors]
    for i, each in reversed(list(enumerate(pending))):
        assert each.wait().tolist() == [2.0 * i + 1] * 3


def test_any_number_of_operations_may_be_under_way():
    run_ranks(many_under_way, 2)


def many_messages() -> int:
    """Rank 1 reads only after rank 0 has sent as many as can be under way; returns the bytes of memory of rank 0."""
    backend, group = connect()
    numbers = range(2 * shared_memory.ENTRIES)
    if backend.rank == 0:
        for i in numbers:
            backend.start_send(torch.full((256,), float(i)), group, 1)
            if i + 1 == shared_memory.ENTRIES:
                backend.all_reduce(torch.zeros(1), group)
    else:
        backend.all_reduce(torch.zeros(1), group)
        pending = [backend.start_receive((256,), torch.float32, group, 0) for _ in numbers]
        for i, each in reversed(list(enumerate(pending))):
            assert each.wait().eq(i).all()
    (memory,) = backend._memories.values()
    arenas = memory._pairs[1].arenas.memories if backend.rank == 0 else []
    return sum(os.stat(arena.file).st_blocks * 512 for arena in arenas)


def test_memory_of_messages_is_used_again():
    written, _ = run_ranks(many_messages, 2)
    assert written <= 1024 * (shared_memory.ENTRIES + 1)  # half of what was sent


def repeated() -> list[int]:
    backend, group = connect()
    (memory,) = backend._memories.values()
    sizes = []
    for step in range(60):
        pending = [backend.start_all_reduce(torch.full((1 << 17,), 1.0), group) for _ in range(4)]
        pending.append(backend.start_all_gather(torch.ones(1000 + step), group))
        assert all(each.wait().min() >= 1 for each in pending)
        sizes.append(sum(os.stat(arena.file).st_blocks * 512 for arena in memory._arenas.memories))
    return sizes


def test_memory_is_used_again():
    for sizes in run_ranks(repeated, 3):
        assert sizes[-1] <= 24 << 20  # of 126 MiB that were sent


def scattered(numel: int) -> tuple[float, int]:
    """Sum of a row over the ranks, and bytes of the memory that this rank has written to."""
    backend, group = connect()
    rows = torch.arange(3.0).repeat_interleave(numel) + group.index
    total = backend.reduce_scatter(rows, group)
    assert total.eq(total[0]).all()
    (memory,) = backend._memories.values()
    return total[0].item(), sum(os.stat(arena.file).st_blocks * 512 for arena in memory._arenas.memories)


def test_a_reduce_scatter_copies_what_other_ranks_read():
    numel, page = 1 << 19, 4096
    for rank, (total, written) in enumerate(run_ranks(scattered, 3, numel)):
        assert total == 3 * rank + 0 + 1 + 2
        assert 2 * 4 * numel <= written <= 2 * 4 * numel + 2 * page


def odd_sums(numel: int) -> list[float]:
    backend, group = connect()
    generator = torch.Generator().manual_seed(backend.rank)
    mine = torch.randn(numel, generator=generator)
    everyone = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(group.size)]
    total = backend.all_reduce(mine, group)
    torch.testing.assert_close(total, torch.stack(everyone).double().sum(0).float())
    return total.tolist()


@pytest.mark.parametrize("numel", [1, 5, 50_001])
def test_sums_are_equal_on_all_ranks_to_the_last_bit(numel):
    first, *others = run_ranks(odd_sums, 4, numel)
    assert all(other == first for other in others)


def different_calls() -> None:
    backend, group = connect()
    backend.all_reduce(torch.ones(4), group)
    if backend.rank == 0:
        backend.all_reduce(torch.ones(8), group)
    else:
        backend.all_gather(torch.ones(8), group)


def test_different_collectives_are_an_error_on_every_rank():
    begin = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(different_calls, 2)
    assert time.monotonic() - begin < 20
    errors = caught.value.errors
    assert set(errors) == {0, 1}
    for error in errors.values():
        assert isinstance(error, CommunicationError)
        assert "another collective" in str(error)


def different_messages() -> None:
    backend, group = connect()
    if backend.rank == 0:
        backend.start_send(torch.ones(8), group, 1)
    else:
        backend.start_receive((2, 2), torch.float32, group, 0).wait()


def test_a_message_of_another_shape_is_an_error():
    with pytest.raises(RanksError) as caught:
        run_ranks(different_messages, 2)
    error = caught.value.errors[1]
    assert isinstance(error, CommunicationError)
    assert "rank 0 sends another shape or dtype than 4 elements of torch.float32" in str(error)


def both_at_once() -> None:
    """A thread receives before the main thread has sent what the other rank's thread waits for."""
    backend, group = connect()
    found = []
    waiting = threading.Thread(
        target=lambda: found.append(backend.start_receive((3,), torch.float32, group, 1 - group.index).wait())
    )
    waiting.start()
    time.sleep(0.3)
    backend.start_send(torch.full((3,), float(backend.rank)), group, 1 - group.index).wait()
    waiting.join(20)
    assert found[0].eq(1 - backend.rank).all()


def test_a_thread_can_receive_while_another_one_sends():
    run_ranks(both_at_once, 2)


def send_late(to_ended: bool) -> None:
    backend, group = connect(timeout=timedelta(seconds=2))
    if backend.rank == 1 and to_ended:
        os._exit(3)
    if backend.rank == 0:
        time.sleep(3 if not to_ended else 1)
        backend.start_send(torch.ones(3), group, 1)
    else:
        backend.start_receive((3,), torch.float32, group, 0).wait()


@pytest.mark.parametrize(("to_ended", "rank", "why"), [(True, 0, "has ended"), (False, 1, "timed out after 2 s")])
def test_a_message_that_is_late_or_goes_to_an_ended_rank_is_an_error(to_ended, rank, why):
    with pytest.raises(RanksError) as caught:
        run_ranks(send_late, 2, to_ended)
    error = caught.value.errors[rank]
    assert isinstance(error, CommunicationError)
    assert why in str(error)


def end_first() -> float:
    backend, group = connect()
    pending = backend.start_all_gather(torch.full((1 << 16,), float(backend.rank)), group)
    if backend.rank == 0:
        backend.start_send(torch.ones(3), group, 1)
        return pending.wait().sum().item()
    time.sleep(1.0)  # rank 0 has finished by now, and its memory was not mapped here yet
    assert backend.start_receive((3,), torch.float32, group, 0).wait().eq(1).all()
    return pending.wait().sum().item()


def test_a_rank_that_ends_first_is_still_read():
    assert run_ranks(end_first, 2, full_exit=True) == [1 << 16] * 2


def end_without_reading() -> float:
    backend, group = connect()
    backend.start_send(torch.ones(3), group, 1 - group.index)
    begin = time.monotonic()
    backend.shutdown()
    return time.monotonic() - begin


def test_a_message_that_is_never_read_does_not_delay_the_end():
    assert max(run_ranks(end_without_reading, 2, full_exit=True)) < 8  # it waits 10 s for a rank that might read it


PP2 = {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}


TP2 = {"tensor_parallel": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@pytest.mark.parametrize(
    "plugins",
    [[], ["zero1"], ["fully_sharded"], [TP2, "zero1"], [PP2, "zero1"]],
    ids=["dp4", "zero1", "fully-sharded", "tp2-zero1", "pp2-zero1"],
)
def test_trains_like_one_process(plugins, transport, monkeypatch):
    """Other tests use the default, shared memory; ranks of several hosts use gloo."""
    monkeypatch.setenv(SHARED_MEMORY_VARIABLE, str(transport == "shared memory"))
    training = Training(max_norm=0.5, accumulation=2)
    assert_parallel_equivalence(llama, token_batches(4, size=8), plugins, ranks=4, training=training)


def end_at_once() -> float:
    backend, group = connect()
    if backend.rank == 0:
        backend.start_all_gather(torch.ones(1 << 16), group)
        os._exit(3)
    time.sleep(1.0)
    return backend.all_gather(torch.ones(1 << 16), group).sum().item()


def test_what_a_rank_has_sent_is_read_after_it_has_ended():
    with pytest.raises(RanksError) as caught:
        run_ranks(end_at_once, 2)
    assert set(caught.value.errors) == {0}, "rank 1 has what rank 0 sent before it ended"


def fork_a_worker() -> float:
    backend, group = connect()
    backend.all_reduce(torch.ones(2), group)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return backend.all_reduce(torch.ones(2), group)[0].item()


def test_workers_that_a_rank_forks_do_not_matter():
    assert run_ranks(fork_a_worker, 2) == [2.0, 2.0]


def killed() -> None:
    import signal

    backend, group = connect()
    backend.all_reduce(torch.ones(1 << 18), group)
    pending = backend.start_all_reduce(torch.ones(1 << 18), group)
    if backend.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        pending.wait()
        pending = backend.start_all_reduce(torch.ones(1 << 18), group)


def test_a_killed_rank_is_noticed_and_leaves_nothing():
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    begin = time.monotonic()
    with pytest.raises(RanksError) as caught:
        run_ranks(killed, 3)
    assert time.monotonic() - begin < 15
    for rank in (0, 2):
        error = caught.value.errors[rank]
        assert isinstance(error, CommunicationError)
        assert "rank 1" in str(error)
    assert not Path("/dev/shm").is_dir() or set(os.listdir("/dev/shm")) <= before
