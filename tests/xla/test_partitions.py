"""Groups that plugins make themselves count towards what one graph may have on Neuron, on real XLA ranks."""

from __future__ import annotations

import torch

from neuron_accel.testing import run_ranks


def fourteen_ways():
    """Partitions of 8 ranks, into 4 pairs and into 2 groups of four, seven of each."""
    ranks = range(8)
    pairs = [{frozenset({r, r ^ a}) for r in ranks} for a in range(1, 8)]
    planes = {frozenset({0, a, b, a ^ b}) for a in range(1, 8) for b in range(1, 8) if a != b}
    fours = [{frozenset(r ^ s for s in plane) for r in ranks} for plane in sorted(planes, key=sorted)]
    return [sorted(sorted(group) for group in way) for way in (*pairs, *fours)]


def use_groups():
    """Executions of a graph with twelve partitions, the error of the thirteenth, and the sum over all ranks after."""
    from neuron_accel import NeuronAccelerator
    from neuron_accel.errors import PlanError

    accelerator = NeuronAccelerator(backend="xla")
    backend = accelerator.run.backend
    groups = [backend.new_group(way, f"way {number}") for number, way in enumerate(fourteen_ways())]

    def total(group):
        return backend.all_reduce(torch.ones(1).to(backend.device), group)

    backend.step_boundary()
    graphs = 0
    for chosen in (groups[:12], groups[2:], groups[2:]):
        sums = [total(group) for group in chosen for _ in range(2)]
        backend.step_boundary()
        graphs += [int(backend.to_host(s)) for s in sums] == [group.size for group in chosen for _ in range(2)]
    said = None
    for group in groups[:12]:
        total(group)
    try:
        total(groups[12])
    except PlanError as error:
        said = str(error)
    backend.all_gather_object("objects travel beside the graph", groups[13])
    backend.step_boundary()
    return graphs, said, int(backend.to_host(total(accelerator.run.world)))


def test_a_thirteenth_way_in_one_graph_is_refused_on_every_rank_and_the_twelve_are_named():
    for graphs, said, total in run_ranks(
        use_groups, 8, backend="xla", timeout=110, env={"NEURON_ACCEL_INSTANCE": "trn1.32xlarge"}
    ):
        assert (graphs, total) == (3, 8)
        assert (
            "more than 12 ways, all that trn1.32xlarge allows: 'way 12' (all_reduce in xla/test_partitions.py:" in said
        )
        for number in range(12):
            assert f"'way {number}' (all_reduce in xla/test_partitions.py:" in said


def test_without_neuron_and_without_an_instance_to_plan_for_nothing_is_counted():
    for graphs, said, total in run_ranks(use_groups, 8, backend="xla", timeout=110):
        assert (graphs, said, total) == (3, None, 8)
