"""Every collective of the XLA backend against its definition, on real XLA ranks; compiled once for all of them."""

from __future__ import annotations

import pytest
import torch

from neuron_accel.testing import run_ranks

PAIRS = {2: [[0, 1]], 4: [[0, 1], [2, 3]]}
STRIDED = {2: [[0, 1]], 4: [[0, 2], [1, 3]]}


def collectives(partition):
    """What each collective gives on this rank, and how many graphs that took."""
    import torch_xla.debug.metrics as metrics

    from neuron_accel.backends.xla import XlaBackend

    backend = XlaBackend.connect()
    group = backend.new_group(partition, "test")
    before = metrics.counter_value("UncachedCompile") or 0
    results = {}
    for _ in range(2):
        x = data(backend.rank).to(backend.device)
        results = {
            "sum": backend.all_reduce(x.clone(), group),
            "max": backend.all_reduce(x.clone(), group, "max"),
            "min": backend.all_reduce(x.clone(), group, "min"),
            "any": backend.all_reduce(x > 10, group),
            "gather0": backend.all_gather(x, group),
            "gather1": backend.all_gather(x, group, 1),
            "gather-scalar": backend.all_gather(x[0, 0], group),
            "reduce-scatter": backend.reduce_scatter(x, group, 1),
            "all-to-all": backend.all_to_all(x, group, 1, 0),
            "permute": backend.permute(x, group),
            "permute-back": backend.permute(x, group, -1),
            "broadcast": backend.broadcast(x, group, 1),
            "broadcast-bool": backend.broadcast(x > 10, group, 1),
            "chunk": backend.chunk(x, group, 1),
            "number": backend.number(1.0),
        }
        together = backend.all_reduce_together([x.clone(), x[0].clone()], group, 0.5)
        results |= {"together, matrix": together[0], "together, vector": together[1]}
        backend.step_boundary()
    graphs = (metrics.counter_value("UncachedCompile") or 0) - before
    results = {name: value.cpu() for name, value in results.items()}
    results["host-sum"] = backend.all_reduce(data(backend.rank), group)
    results["host-broadcast"] = backend.broadcast(data(backend.rank), group, 1)
    results["objects"] = backend.all_gather_object(f"rank {backend.rank}", group)
    results["object"] = backend.broadcast_object(f"rank {backend.rank}", group, 1)
    backend.barrier()
    return results, graphs


def data(rank):
    return torch.arange(12.0).view(3, 4) + 5 * rank


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("partition", [PAIRS, STRIDED], ids=["neighbours", "strided"])
def test_definitions(ranks, partition):
    groups = partition[ranks]
    for rank, (found, graphs) in enumerate(run_ranks(collectives, ranks, groups, backend="xla")):
        members = next(g for g in groups if rank in g)
        index = members.index(rank)
        values = [data(member) for member in members]
        stacked = torch.stack(values)
        expected = {
            "sum": stacked.sum(0),
            "max": stacked.amax(0),
            "min": stacked.amin(0),
            "any": (stacked > 10).any(0),
            "gather0": torch.cat(values, 0),
            "gather1": torch.cat(values, 1),
            "gather-scalar": stacked[:, 0, 0],
            "reduce-scatter": stacked.sum(0).chunk(2, 1)[index],
            "all-to-all": torch.cat([v.chunk(2, 1)[index] for v in values], 0),
            "permute": values[index - 1],
            "permute-back": values[(index + 1) % 2],
            "broadcast": values[1],
            "broadcast-bool": values[1] > 10,
            "chunk": values[index].chunk(2, 1)[index],
            "number": torch.tensor(1.0),
            "together, matrix": stacked.sum(0) / 2,
            "together, vector": stacked.sum(0)[0] / 2,
            "host-sum": stacked.sum(0),
            "host-broadcast": values[1],
        }
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
        assert found["objects"] == [f"rank {member}" for member in members]
        assert found["object"] == f"rank {members[1]}"
        assert graphs == 1
