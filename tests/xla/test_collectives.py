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


INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
BEYOND_FLOAT32 = 2**24 + 1


def integers(dtype, rank):
    """[4, 4]: limits of the dtype, zero, one, what float32 rounds, and negative numbers; others on each rank."""
    limits = torch.iinfo(dtype)
    chosen = [limits.min, limits.max, 0, 1, BEYOND_FLOAT32, -BEYOND_FLOAT32, limits.max - 1, limits.min + 1]
    chosen = [number if limits.min <= number <= limits.max else number % 100 for number in chosen]
    return torch.tensor([chosen[(i * (1 + rank // 2) + 3 * rank) % 8] for i in range(16)]).to(dtype).view(4, 4)


def flags(rank):
    return torch.tensor([[rank == 0, rank == 1, True, False]]).expand(4, 4)


def collectives_of_integers(partition):
    from neuron_accel.backends.xla import XlaBackend

    backend = XlaBackend.connect()
    group = backend.new_group(partition, "test")
    results = {}
    for dtype in (*INTEGERS, torch.bool):
        x = (flags(backend.rank) if dtype == torch.bool else integers(dtype, backend.rank)).to(backend.device)
        of_dtype = {
            "sum": backend.all_reduce(x, group),
            "max": backend.all_reduce(x, group, "max"),
            "min": backend.all_reduce(x, group, "min"),
            "scatter0": backend.reduce_scatter(x, group, 0),
            "scatter1": backend.reduce_scatter(x, group, 1),
            "gather": backend.all_gather(x, group),
            "broadcast": backend.broadcast(x, group, 1),
            "scalar": backend.all_reduce(x[1, 1], group),
            "exchange": backend.all_to_all(x, group),
            "permute": backend.permute(x, group),
        }
        if dtype != torch.bool:
            of_dtype["together"] = backend.all_reduce_together([x, x[0]], group)[1]
        results |= {(dtype, name): value for name, value in of_dtype.items()}
    backend.step_boundary()
    return {name: value.cpu() for name, value in results.items()}


@pytest.mark.parametrize("ranks", [2, 4])
def test_integers_and_flags_are_exact(ranks):
    groups = STRIDED[ranks]
    for rank, found in enumerate(run_ranks(collectives_of_integers, ranks, groups, backend="xla")):
        members = next(g for g in groups if rank in g)
        index = members.index(rank)
        for dtype in (*INTEGERS, torch.bool):
            values = [flags(member) if dtype == torch.bool else integers(dtype, member) for member in members]
            stacked = torch.stack(values)
            total = stacked.any(0) if dtype == torch.bool else stacked.sum(0, dtype=dtype)  # which wraps around
            expected = {
                "sum": total,
                "max": stacked.amax(0),
                "min": stacked.amin(0),
                "scatter0": total.chunk(2, 0)[index],
                "scatter1": total.chunk(2, 1)[index],
                "gather": torch.cat(values),
                "broadcast": values[1],
                "scalar": total[1, 1],
                "exchange": torch.cat([v.chunk(2, 0)[index] for v in values]),
                "permute": values[index - 1],
                **({} if dtype == torch.bool else {"together": total[0]}),
            }
            for name, value in expected.items():
                assert found[dtype, name].dtype == dtype, (dtype, name)
                assert torch.equal(found[dtype, name], value), (dtype, name, found[dtype, name], value)


def permutations_without_rings():
    """What neighbours in rings of four hold, and how it came, on a machine that only links ranks 0 and 1, 2 and 3."""
    from neuron_accel.backends.xla import XlaBackend

    backend = XlaBackend.connect()
    asked = []

    def problem(pairs):
        asked.append(pairs)
        return "no link" if any(abs(a - b) > 1 for a, b in pairs) else None

    backend.limit_rings(problem)
    wide, narrow = backend.new_group([range(4)], "wide"), backend.new_group([[0, 1], [2, 3]], "narrow")
    x = data(backend.rank).to(backend.device)
    with backend.record() as traffic:
        found = [backend.permute(x, wide), backend.permute(x, wide, -1), backend.permute(x, narrow)]
    backend.step_boundary()
    return [value.cpu() for value in found], [(t.op, t.group) for t in traffic.transfers], asked[0]


def test_where_there_is_no_ring_a_permutation_gathers():
    for rank, (found, ops, pairs) in enumerate(run_ranks(permutations_without_rings, 4, backend="xla")):
        for value, source in zip(found, [(rank - 1) % 4, (rank + 1) % 4, rank ^ 1], strict=True):
            assert torch.equal(value, data(source))
        assert ops == [("all_gather", "wide"), ("all_gather", "wide"), ("permute", "narrow")]
        assert pairs == [(0, 1), (1, 2), (2, 3), (3, 0)]
