"""Groups within the data-parallel ranks, over which parameters are sharded: axes of the mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neuron_accel import FullyShardedPlugin
from neuron_accel.contract import AxisKind, AxisSpec, Mesh
from neuron_accel.errors import PlanError
from neuron_accel.neuron.instances import find_instance

TP2 = AxisSpec(name="tp", degree=2, kind=AxisKind.MODEL)


def mesh(ranks, *axes, **options):
    return Mesh.build([*axes, *FullyShardedPlugin(**options).axes()], ranks)


def test_they_are_consecutive_data_parallel_ranks():
    both = mesh(16, TP2, hybrid_shard_size=4, reshard_after_forward=2)
    assert str(both) == "dp 2 x shard 2 x shard_near 2 x tp 2"
    assert both.groups("shard", "shard_near")[0] == (0, 2, 4, 6)
    assert both.groups("shard_near")[0] == (0, 2)
    assert both.groups("dp")[0] == (0, 8)
    assert both.data_axes == both.gradient_axes == ("dp", "shard", "shard_near")


def test_without_groups_the_mesh_is_that_of_the_ranks():
    assert str(mesh(4, hybrid_shard_size=2)) == "dp 2 x shard 2"
    assert str(mesh(4, reshard_after_forward=2)) == "dp 2 x shard_near 2"
    for reshard in (True, False, None):
        assert str(mesh(4, reshard_after_forward=reshard)) == "dp 4"


def test_an_instance_that_cannot_form_them_refuses():
    trn1 = find_instance("trn1.32xlarge").hardware()
    trn1.check_mesh(mesh(32, hybrid_shard_size=8))
    trn1.check_mesh(mesh(64, TP2, hybrid_shard_size=16, reshard_after_forward=4))
    with pytest.raises(PlanError, match="Groups of 4 data-parallel ranks"):
        replace(trn1, model_groups=(8, 32)).check_mesh(mesh(32, hybrid_shard_size=4))
    with pytest.raises(PlanError, match="unevenly"):
        trn1.check_mesh(mesh(96, hybrid_shard_size=48))
