"""The graphs of good training have no findings."""

from __future__ import annotations

import pytest

from neuron_accel.testing import Training, train_on_rank
from neuron_accel.testing._cases import tiny_llama, token_batches
from neuron_accel.testing._compositions import COMPOSITIONS

emulation = pytest.importorskip("neuron_accel_emulation")

LAZY = [name for name, composition in COMPOSITIONS.items() if composition.lazy]


@pytest.mark.parametrize("name", LAZY)
def test_no_composition_has_a_finding_and_all_ranks_have_one_graph(name):
    """The compositions of the conformance kit: no integer is reduced, among the rest."""
    composition = COMPOSITIONS[name]
    plugins = composition.built_in()
    ranks = composition.ranks(plugins, None)
    report = emulation.check_graphs(
        train_on_rank,
        ranks,
        tiny_llama,
        token_batches(3),
        {"backend": "xla"},
        Training(max_norm=0.5),
        plugins,
        gradients=False,
        instance="trn1.2xlarge" if ranks == 2 else None,
    )
    assert [(f.code, f.what, f.source) for f in report.findings if f.code != "host-read"] == []
    steps = [graph for graph in report.graphs if graph.collectives]
    assert steps
    assert all(graph.ranks == tuple(range(ranks)) for graph in steps)
