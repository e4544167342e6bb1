"""The time of creating groups on the host, with torch.distributed and with the XLA backend.

Usage: ``python -m benchmarks.host_groups [--processes 8,16,32] [--threads 64,256] [--calls 64,256]``. Ranks are first
processes with gloo groups: the tensor-parallel pairs and the data-parallel groups beside them. torch's way is
``new_subgroups_by_enumeration``, in which every rank makes every group; ours is
:class:`~neuron_accel.backends.xla_channel.ProcessChannel`, and an exchange in each group afterwards, since it connects
a group when it is first used. Then ranks are threads with a client of one key-value store each, which do nothing but
the store's part of torch's way: all of them wait for each other once for each group, members or not. Numbers are
seconds of the slowest rank.

Last, the cost of the groups that a rank is not in when torch.distributed connects the ranks: one process calls
``new_group`` for each group of the partitions, as one rank of thousands, with torch's process group that does nothing.
"""

from __future__ import annotations

import argparse
import threading
import time
from datetime import timedelta

import torch.distributed as dist

from neuron_accel.backends.group import Group
from neuron_accel.testing import run_ranks


def partitions(ranks: int) -> list[tuple[tuple[int, ...], ...]]:
    """Tensor-parallel pairs, and the data-parallel groups."""
    pairs = tuple((rank, rank + 1) for rank in range(0, ranks, 2))
    return [pairs, tuple(tuple(range(start, ranks, 2)) for start in range(2))]


def torchs_way() -> float:
    """Every rank creates every group."""
    dist.barrier()
    begin = time.perf_counter()
    for partition in partitions(dist.get_world_size()):
        own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in partition], backend="gloo")
        dist.all_gather_object([None] * own.size(), 0, group=own)
    return time.perf_counter() - begin


def members_alone() -> float:
    """Each group is created by its members only."""
    from neuron_accel.backends.xla_channel import ProcessChannel

    channel = ProcessChannel()
    dist.barrier()
    begin = time.perf_counter()
    for partition in partitions(dist.get_world_size()):
        ranks = next(ranks for ranks in partition if dist.get_rank() in ranks)
        group = Group(ranks, ranks.index(dist.get_rank()), partition, "measured", channel.new_group(partition))
        channel.all_gather_object(0, group)
    return time.perf_counter() - begin


def store_barriers(ranks: int, groups: list[int]) -> float:
    """Seconds that threads take for barriers over a store: one for each of ``groups``, of so many of them."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    took = [0.0] * ranks
    ready = threading.Barrier(ranks)

    def rank(index: int) -> None:
        store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(minutes=5), wait_for_workers=False)
        ready.wait()
        begin = time.perf_counter()
        for number, size in enumerate(groups):
            block = index // size
            if store.add(f"{number}/{block}", 1) == size:
                store.set(f"{number}/{block}/done", "1")
            store.wait([f"{number}/{block}/done"])
        took[index] = time.perf_counter() - begin

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(took)


def calls(ranks: int) -> float:
    """Seconds that one rank takes to call ``new_group`` for every group, of which it is in two."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    try:
        begin = time.perf_counter()
        for partition in partitions(ranks):
            for members in partition:
                dist.new_group(list(members))
        return time.perf_counter() - begin
    finally:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", default="8,16,32", help="numbers of ranks that are processes")
    parser.add_argument("--threads", default="64,256", help="numbers of ranks that are threads")
    parser.add_argument("--calls", default="64,256,1024,4096", help="numbers of ranks of which one makes the calls")
    args = parser.parse_args()
    print("ranks  groups  every rank makes every group  members alone")
    for ranks in map(int, filter(None, args.processes.split(","))):
        count = sum(map(len, partitions(ranks)))
        old, new = (max(run_ranks(way, ranks, timeout=300)) for way in (torchs_way, members_alone))
        print(f"{ranks:5}  {count:6}  {old:28.2f}  {new:13.2f}")
    print("\nstore barriers only, in threads")
    print("ranks  groups  over all ranks, for every group  over members, for own groups")
    for ranks in map(int, filter(None, args.threads.split(","))):
        every = [ranks] * sum(map(len, partitions(ranks)))
        old, new = store_barriers(ranks, every), store_barriers(ranks, [len(p[0]) for p in partitions(ranks)])
        print(f"{ranks:5}  {len(every):6}  {old:31.2f}  {new:28.2f}")
    print("\ncalls of new_group for every group, by one rank")
    print("ranks  groups  milliseconds")
    for ranks in map(int, filter(None, args.calls.split(","))):
        print(f"{ranks:5}  {sum(map(len, partitions(ranks))):6}  {calls(ranks) * 1e3:12.1f}")


if __name__ == "__main__":
    main()
