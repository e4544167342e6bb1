"""What is particular to shared memory; test_host_collectives.py has the results of collectives."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from host_support import needs_shared_memory, new_group
from neuron_accel_host import HostGroup, transport
from transformers import LlamaConfig, LlamaForCausalLM

from neuron_accel.testing import RanksError, Training, assert_parallel_equivalence, bytes_sent, run_ranks

pytestmark = needs_shared_memory

REST = 1000
"""Bytes that gloo may still send for a barrier that this rank has left."""
OFF = {"NEURON_ACCEL_SHARED_MEMORY": "0"}


def through_the_kernel() -> int:
    """Bytes that the kernel has sent."""
    group, rank = new_group(), dist.get_rank()
    dist.barrier(group=group)
    before = bytes_sent()
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor, group=group)
    assert tensor.eq(2).all()
    dist.send(torch.ones(1 << 20), 1 - rank, group=group)
    dist.recv(tensor, 1 - rank, group=group)
    assert tensor.eq(1).all()
    dist.barrier(group=group)
    return bytes_sent() - before


def test_nothing_is_sent_through_the_kernel():
    assert max(run_ranks(through_the_kernel, 2)) < REST


def of_an_accelerator() -> int:
    from neuron_accel import NeuronAccelerator

    run = NeuronAccelerator().run
    assert isinstance(run.world.handle, HostGroup) == (os.environ.get("NEURON_ACCEL_SHARED_MEMORY") != "0")
    run.backend.barrier()
    before = bytes_sent()
    run.backend.all_reduce(torch.ones(1 << 18), run.world)
    return bytes_sent() - before


def test_an_accelerator_uses_it_unless_a_variable_turns_it_off():
    assert max(run_ranks(of_an_accelerator, 2)) < REST
    assert min(run_ranks(of_an_accelerator, 2, env=OFF)) >= 1 << 20


def with_a_distant_rank() -> tuple[int, int]:
    here = transport.host_of_this_process()
    if dist.get_rank() == 2:
        transport.host_of_this_process = lambda: ["another boot", *here[1:]]
    group, pair = dist.new_group(backend="host"), dist.new_group([0, 1], backend="host")
    assert not isinstance(group, HostGroup)
    dist.barrier()
    before, total = bytes_sent(), torch.ones(1 << 18)
    if dist.get_rank() < 2:
        dist.all_reduce(total, group=pair)
    sent_in_pair = bytes_sent() - before
    dist.all_reduce(total, group=group)
    assert total.eq(5).all()
    return sent_in_pair, bytes_sent() - before


def test_groups_of_several_hosts_use_gloo():
    first, second, third = run_ranks(with_a_distant_rank, 3)
    assert max(first[0], second[0], third[0]) < REST  # the pair shares a host
    assert min(first[1], second[1], third[1]) > REST


def many_under_way() -> None:
    group = new_group()
    tensors = [torch.full((3,), float(i + dist.get_rank())) for i in range(transport.ENTRIES + 100)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for i, work in reversed(list(enumerate(works))):
        work.wait()
        assert tensors[i].tolist() == [2.0 * i + 1] * 3


def test_any_number_of_operations_may_be_under_way():
    run_ranks(many_under_way, 2)


def written(arenas: transport.Arenas | None) -> int:
    """Bytes of the memory that this rank has written to."""
    return sum(os.stat(arena.file).st_blocks * 512 for arena in ([] if arenas is None else arenas.memories))


def many_messages() -> int:
    """Rank 1 reads only after rank 0 has sent as many as can be under way; returns the bytes of memory of rank 0."""
    group, numbers = new_group(), range(2 * transport.ENTRIES)
    if dist.get_rank() == 0:
        for i in numbers:
            dist.isend(torch.full((256,), float(i)), 1, group=group)
            if i + 1 == transport.ENTRIES:
                dist.barrier(group=group)
    else:
        dist.barrier(group=group)
        tensors = [torch.empty(256) for _ in numbers]
        works = [dist.irecv(tensor, 0, group=group) for tensor in tensors]
        for i, work in reversed(list(enumerate(works))):
            work.wait()
            assert tensors[i].eq(i).all()
    return written(group._transport._pairs[1 - dist.get_rank()].arenas)


def test_memory_of_messages_is_used_again():
    first, _ = run_ranks(many_messages, 2)
    assert first <= 1024 * (transport.ENTRIES + 1)  # half of what was sent


def repeated() -> list[int]:
    group = new_group()
    sizes = []
    for step in range(60):
        tensors = [torch.ones(1 << 17) for _ in range(4)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        rows = [torch.zeros(1000 + step) for _ in range(group.size())]
        works.append(dist.all_gather(rows, torch.ones(1000 + step), group=group, async_op=True))
        for work in works:
            work.wait()
        assert all(tensor.min() >= 1 for tensor in (*tensors, *rows))
        sizes.append(written(group._transport._arenas))
    return sizes


def test_memory_is_used_again():
    for sizes in run_ranks(repeated, 3):
        assert sizes[-1] <= 24 << 20  # of 126 MiB that were sent


def scattered(numel: int) -> tuple[float, int]:
    """Sum of a row over the ranks, and bytes of the memory that this rank has written to."""
    group = new_group()
    rows, total = torch.arange(3.0).repeat_interleave(numel) + dist.get_rank(), torch.empty(numel)
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(total, rows, group=group)
    assert total.eq(total[0]).all()
    return total[0].item(), written(group._transport._arenas)


def test_a_reduce_scatter_copies_what_other_ranks_read():
    numel, page = 1 << 19, 4096
    for rank, (total, size) in enumerate(run_ranks(scattered, 3, numel)):
        assert total == 3 * rank + 0 + 1 + 2
        assert 2 * 4 * numel <= size <= 2 * 4 * numel + 2 * page


def odd_sums(numel: int) -> list[float]:
    group = new_group()
    everyone = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(group.size())]
    total = everyone[dist.get_rank()].clone()
    dist.all_reduce(total, group=group)
    torch.testing.assert_close(total, torch.stack(everyone).double().sum(0).float())
    return total.tolist()


@pytest.mark.parametrize("numel", [1, 5, 50_001])
def test_sums_are_equal_on_all_ranks_to_the_last_bit(numel):
    first, *others = run_ranks(odd_sums, 4, numel)
    assert all(other == first for other in others)


def different_calls() -> None:
    group = new_group()
    dist.all_reduce(torch.ones(4), group=group)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(8), group=group)
    else:
        dist.all_gather([torch.ones(8), torch.ones(8)], torch.ones(8), group=group)


def test_different_collectives_are_an_error_on_every_rank():
    with pytest.raises(RanksError) as caught:
        run_ranks(different_calls, 2)
    errors = caught.value.errors
    assert set(errors) == {0, 1}
    assert all("another collective" in str(error) for error in errors.values())


def different_messages() -> None:
    group = new_group()
    if dist.get_rank() == 0:
        dist.send(torch.ones(8), 1, group=group)
    else:
        dist.recv(torch.ones(2, 2), 0, group=group)


def test_a_message_of_another_shape_is_an_error():
    with pytest.raises(RanksError) as caught:
        run_ranks(different_messages, 2)
    message = "rank 0 sends another shape or dtype than 4 elements of torch.float32"
    assert message in str(caught.value.errors[1])


def both_at_once() -> None:
    """A thread receives before the main thread has sent what the other rank's thread waits for."""
    group, rank = new_group(), dist.get_rank()
    tensor = torch.zeros(3)
    waiting = threading.Thread(target=lambda: dist.recv(tensor, 1 - rank, group=group))
    waiting.start()
    time.sleep(0.3)
    dist.send(torch.full((3,), float(rank)), 1 - rank, group=group)
    waiting.join(20)
    assert tensor.eq(1 - rank).all()


def test_a_thread_can_receive_while_another_one_sends():
    run_ranks(both_at_once, 2)


def completed_by_another_thread() -> tuple[int, bool]:
    operations, reading, read = new_group()._transport, threading.Event(), []

    def consume(_: list[torch.Tensor]) -> None:
        reading.set()
        time.sleep(0.2)
        read.append(True)

    operation = operations._start("barrier", torch.empty(0), consume)
    thread = threading.Thread(target=operation.wait)
    thread.start()
    reading.wait()
    operation.wait()
    seen = len(read)
    thread.join()
    return seen, operation.test()


def test_nobody_goes_on_before_another_thread_has_read_what_was_sent():
    assert run_ranks(completed_by_another_thread, 2) == [(1, True), (1, True)]


def send_late(to_ended: bool) -> None:
    group = new_group(seconds=2)
    if dist.get_rank() == 1 and to_ended:
        os._exit(3)
    if dist.get_rank() == 0:
        time.sleep(3 if not to_ended else 1)
        dist.send(torch.ones(3), 1, group=group)
    else:
        dist.recv(torch.ones(3), 0, group=group)


@pytest.mark.parametrize(("to_ended", "rank", "why"), [(True, 0, "has ended"), (False, 1, "timed out after 2 s")])
def test_a_message_that_is_late_or_goes_to_an_ended_rank_is_an_error(to_ended, rank, why):
    with pytest.raises(RanksError) as caught:
        run_ranks(send_late, 2, to_ended)
    assert why in str(caught.value.errors[rank])


def end_first() -> float:
    group, rank = new_group(), dist.get_rank()
    rows = [torch.empty(1 << 16) for _ in range(2)]
    work = dist.all_gather(rows, torch.full((1 << 16,), float(rank)), group=group, async_op=True)
    if rank == 0:
        dist.send(torch.ones(3), 1, group=group)
    else:
        time.sleep(1.0)  # rank 0 has finished by now, and its memory was not mapped here yet
        dist.recv(tensor := torch.empty(3), 0, group=group)
        assert tensor.eq(1).all()
    work.wait()
    return torch.cat(rows).sum().item()


def test_a_rank_that_ends_first_is_still_read():
    assert run_ranks(end_first, 2, full_exit=True) == [1 << 16] * 2


def end_without_reading() -> None:
    from neuron_accel_host.transport import SharedMemory

    SharedMemory.close.__defaults__ = (1e6,)  # as long it would wait for a rank that might read the message
    group = new_group()
    dist.send(torch.ones(3), 1 - dist.get_rank(), group=group)
    dist.destroy_process_group(group)


def test_a_message_that_is_never_read_does_not_delay_the_end():
    run_ranks(end_without_reading, 2, full_exit=True)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, initializer_range=0.1, **sizes))


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(96, (8, 12), generator=generator) for _ in range(4)]
    return [{"input_ids": each, "labels": each} for each in ids]


PP2 = {"model_parallelism": {"pipeline_parallel_size": 2, "num_microbatches": 2}}


TP2 = {"tensor_parallel": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize(
    "plugins",
    [[], ["zero1"], ["fully_sharded"], [TP2, "zero1"], [PP2, "zero1"]],
    ids=["dp4", "zero1", "fully-sharded", "tp2-zero1", "pp2-zero1"],
)
def test_trains_like_one_process(plugins):
    training = Training(max_norm=0.5, accumulation=2)
    assert_parallel_equivalence(llama, batches(), plugins, ranks=4, training=training)


def end_at_once() -> float:
    group = new_group()
    rows = [torch.empty(1 << 16) for _ in range(2)]
    if dist.get_rank() == 0:
        dist.all_gather(rows, torch.ones(1 << 16), group=group, async_op=True)
        os._exit(3)
    time.sleep(1.0)
    dist.all_gather(rows, torch.ones(1 << 16), group=group)
    return torch.cat(rows).sum().item()


def test_what_a_rank_has_sent_is_read_after_it_has_ended():
    with pytest.raises(RanksError) as caught:
        run_ranks(end_at_once, 2)
    assert set(caught.value.errors) == {0}, "rank 1 has what rank 0 sent before it ended"


def fork_a_worker() -> float:
    group, tensor = new_group(), torch.ones(2)
    dist.all_reduce(tensor, group=group)
    child = os.fork()
    if child == 0:
        group.shutdown()  # as at the end of a process that was forked
        os._exit(0)
    os.waitpid(child, 0)
    dist.all_reduce(tensor, group=group)
    dist.send(tensor, 1 - dist.get_rank(), group=group)
    dist.recv(tensor, 1 - dist.get_rank(), group=group)
    return tensor[0].item()


def test_workers_that_a_rank_forks_do_not_matter():
    assert run_ranks(fork_a_worker, 2) == [4.0, 4.0]


def killed() -> None:
    import signal

    group = new_group()
    dist.all_reduce(torch.ones(1 << 18), group=group)
    work = dist.all_reduce(torch.ones(1 << 18), group=group, async_op=True)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        work.wait()
        work = dist.all_reduce(torch.ones(1 << 18), group=group, async_op=True)


def test_a_killed_rank_is_noticed_and_leaves_nothing():
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    with pytest.raises(RanksError) as caught:
        run_ranks(killed, 3)
    for rank in (0, 2):
        assert "rank 1" in str(caught.value.errors[rank])
    assert not Path("/dev/shm").is_dir() or set(os.listdir("/dev/shm")) <= before
