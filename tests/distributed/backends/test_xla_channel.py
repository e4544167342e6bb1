"""The exchange of Python objects between XLA ranks that are processes. Does not need torch_xla."""

from __future__ import annotations

import pytest

from neuron_accel.backends.group import Group
from neuron_accel.backends.xla_channel import ProcessChannel
from neuron_accel.testing import run_ranks


def talk(partition):
    import torch.distributed as dist

    channel = ProcessChannel()
    rank = dist.get_rank()
    key = tuple(tuple(ranks) for ranks in partition)
    ranks = next(ranks for ranks in key if rank in ranks)
    group = Group(ranks=ranks, index=ranks.index(rank), partition=key, name="test", handle=channel.new_group(partition))
    gathered = channel.all_gather_object({"rank": rank}, group)
    sent = channel.broadcast_object(f"from {rank}", group, 1)
    channel.barrier()
    channel.close()
    return gathered, sent


@pytest.mark.parametrize("partition", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]])
def test_objects_travel_within_their_group(partition):
    for rank, (gathered, sent) in enumerate(run_ranks(talk, 4, partition)):
        members = next(ranks for ranks in partition if rank in ranks)
        assert gathered == [{"rank": member} for member in members]
        assert sent == f"from {members[1]}"
