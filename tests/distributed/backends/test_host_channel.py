"""The exchange of Python objects between processes with an XLA device: the members of a group connect when they first
use it."""

from __future__ import annotations

import torch

from neuron_accel.testing import run_ranks

PAIRS, STRIDED = ((0, 1), (2, 3)), ((0, 2), (1, 3))


def group_of(channel, partition, rank):
    from neuron_accel.backends.group import Group

    ranks = next(ranks for ranks in partition if rank in ranks)
    return Group(ranks, ranks.index(rank), partition, "test", channel.new_group(partition))


def exchange():
    import torch.distributed as dist

    from neuron_accel.backends.xla_channel import ProcessChannel

    rank, said = dist.get_rank(), []
    for _ in range(2):  # a second channel, on the same store
        channel = ProcessChannel()
        world = group_of(channel, ((0, 1, 2, 3),), rank)
        for partition in (PAIRS, STRIDED, PAIRS):
            group = group_of(channel, partition, rank)
            said.append(channel.all_gather_object({"rank": rank, "data": "x" * 10**rank}, group))
            said.append(channel.broadcast_object(f"from {rank}", group, 1))
        said.append(channel.all_gather_object(rank, world))
        said.append(channel.broadcast_object([rank], world, 3))
        channel.barrier()
        channel.close()
    return said


def test_objects_travel_within_groups():
    for rank, said in enumerate(run_ranks(exchange, 4)):
        expected = []
        for partition in (PAIRS, STRIDED, PAIRS):
            members = next(ranks for ranks in partition if rank in ranks)
            expected += [[{"rank": r, "data": "x" * 10**r} for r in members], f"from {members[1]}"]
        assert said == 2 * [*expected, [0, 1, 2, 3], [3]]


def one_group_only():
    """Ranks 2 and 3 arrive once those of the other group are done, which therefore cannot wait for them."""
    import torch.distributed as dist

    from neuron_accel.backends.xla_channel import ProcessChannel

    rank = dist.get_rank()
    channel = ProcessChannel()
    if rank > 1:
        dist.recv(torch.empty(1), rank - 2)
    found = channel.all_gather_object(rank, group_of(channel, PAIRS, rank))
    if rank <= 1:
        dist.send(torch.empty(1), rank + 2)
    channel.barrier()
    return found


def test_a_group_does_not_wait_for_others():
    for rank, found in enumerate(run_ranks(one_group_only, 4)):
        assert found == list(PAIRS[rank // 2])
