"""Coordinates, groups and degrees of the mesh, as properties of random meshes and by example."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.errors import PlanError
from tests.unit.fake_plugins import KINDS


def spec(name: str, degree: int) -> AxisSpec:
    return AxisSpec(name=name, degree=degree, kind=KINDS[name])


def mesh_of(world_size: int, **degrees: int) -> Mesh:
    return Mesh.build([spec(name, degree) for name, degree in degrees.items()], world_size)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.lists(st.sampled_from(["pp", "cp", "tp"]), unique=True))
    degrees = {name: draw(st.integers(1, 4)) for name in names}
    rest = draw(st.integers(1, 4))
    if draw(st.booleans()):
        degrees["dp"] = rest
    return mesh_of(math.prod(degrees.values()) * (1 if "dp" in degrees else rest), **degrees)


@given(meshes(), st.permutations(["pp", "dp", "cp", "tp"]), st.integers(0, 4))
def test_groups_along_any_axes_partition_the_ranks(mesh, names, count):
    chosen = names[:count]
    groups = mesh.groups(*chosen)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.world_size))
    for group in groups:
        assert len(group) == math.prod(mesh.degree(name) for name in chosen)
        assert list(group) == sorted(group)
        rest = [{k: v for k, v in mesh.coordinates(rank).items() if k not in chosen} for rank in group]
        assert all(coordinates == rest[0] for coordinates in rest)


@given(meshes())
def test_coordinates_and_rank_are_inverse(mesh):
    seen = set()
    for rank in range(mesh.world_size):
        coordinates = mesh.coordinates(rank)
        assert mesh.rank(coordinates) == rank
        assert all(0 <= index < mesh.degree(name) for name, index in coordinates.items())
        seen.add(tuple(coordinates.items()))
    assert len(seen) == mesh.world_size


@given(meshes())
def test_tensor_parallel_ranks_are_neighbours(mesh):
    for group in mesh.groups("tp"):
        assert list(group) == list(range(group[0], group[0] + mesh.degree("tp")))
        assert group[0] % mesh.degree("tp") == 0


@given(meshes())
def test_axes_lie_in_canonical_order_and_multiply_to_the_ranks(mesh):
    order = [axis.name for axis in mesh.axes]
    assert order == [name for name in ("pp", "dp", "cp", "tp") if name in order]
    assert math.prod(axis.degree for axis in mesh.axes) == mesh.world_size
    assert "dp" in order


@given(meshes())
def test_views(mesh):
    assert set(mesh.data_axes) == {"dp"} - {a.name for a in mesh.axes if a.degree == 1}
    assert set(mesh.gradient_axes) - set(mesh.data_axes) <= {"cp"}
    assert not set(mesh.model_axes) & set(mesh.gradient_axes)
    assert {*mesh.model_axes, *mesh.gradient_axes} == {axis.name for axis in mesh.axes if axis.degree > 1}


def test_groups_of_eight_ranks_written_out():
    mesh = mesh_of(8, tp=2, pp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups("dp", "tp") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups() == tuple((rank,) for rank in range(8))
    assert mesh.coordinates(5) == {"pp": 1, "dp": 0, "tp": 1}
    assert (mesh.data_axes, mesh.model_axes) == (("dp",), ("pp", "tp"))
    assert str(mesh) == "pp 2 x dp 2 x tp 2"


def test_sequence_ranks_reduce_gradients_but_see_the_same_samples():
    mesh = mesh_of(8, cp=2, tp=2)
    assert mesh.data_axes == ("dp",)
    assert mesh.gradient_axes == ("dp", "cp")


def test_one_rank():
    mesh = Mesh.build([], 1)
    assert (mesh.world_size, mesh.data_axes, str(mesh)) == (1, (), "one rank")


def test_rank_and_coordinates_refuse_what_is_not_there():
    mesh = mesh_of(4, tp=2)
    assert mesh.rank({"tp": 1}) == 1
    assert mesh.rank({"tp": 1, "pp": 0}) == 1
    for wrong in ({"tp": 2}, {"tp": -1}, {"pp": 1}):
        with pytest.raises(ValueError, match="is not on axis"):
            mesh.rank(wrong)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match="is not in a mesh of 4"):
            mesh.coordinates(rank)


@pytest.mark.parametrize(
    ("world_size", "degrees", "nearest"),
    [
        (6, {"tp": 4}, 4),
        (7, {"tp": 4}, 8),
        (2, {"tp": 4}, 4),
        (10, {"tp": 2, "pp": 3}, 12),
        (1, {"tp": 10**12}, 10**12),
    ],
)
def test_ranks_that_cannot_be_divided(world_size, degrees, nearest):
    with pytest.raises(PlanError) as caught:
        mesh_of(world_size, **degrees)
    error = caught.value
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    assert error.what.startswith(f"{ranks} cannot be divided into groups of {math.prod(degrees.values())}")
    assert all(f"{name} {degree}" in error.what for name, degree in degrees.items())
    assert error.where == ranks
    assert "multiple of the product" in error.why
    assert f"start {nearest} ranks" in error.fix


@pytest.mark.parametrize("degree", [0, -2, True, 1.0, "2"])
def test_impossible_degree(degree):
    with pytest.raises(PlanError) as caught:
        mesh_of(4, tp=degree)
    assert f"Axis 'tp' has degree {degree!r}" in caught.value.what
    assert "at least 1" in caught.value.fix


@pytest.mark.parametrize("world_size", [0, -1, 2.0])
def test_impossible_number_of_ranks(world_size):
    with pytest.raises(PlanError, match="at least one rank"):
        Mesh.build([], world_size)


def test_a_duplicate_axis_is_refused():
    with pytest.raises(PlanError, match="'tp' is added more than once"):
        Mesh.build([spec("tp", 2), spec("tp", 2)], 4)


def test_a_data_degree_that_does_not_use_every_rank_is_refused():
    with pytest.raises(PlanError) as caught:
        mesh_of(8, dp=2, tp=2)
    assert "multiply to 4, but there are 8 ranks" in caught.value.what
    assert "leave the degree of axis 'dp' out" in caught.value.fix


def test_mesh_order_does_not_depend_on_the_order_of_axes():
    axes = [spec("pp", 2), spec("cp", 2), spec("tp", 2), AxisSpec(name="ep", degree=2, kind=AxisKind.MODEL)]
    assert len({Mesh.build(order, 16) for order in itertools.permutations(axes)}) == 1


def test_replicas_see_other_samples_and_keep_their_gradients():
    mesh = mesh_of(16, pp=2, island=2, tp=2)
    assert str(mesh) == "pp 2 x island 2 x dp 2 x tp 2"
    assert mesh.data_axes == ("island", "dp")
    assert mesh.gradient_axes == ("dp",)
    assert mesh.model_axes == ("pp", "tp")
    assert (mesh.replica_axes, mesh.replicas) == (("island",), 2)
    assert [rank for rank in range(16) if mesh.replica(rank)] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert mesh_of(4, tp=2).replicas == 1
    assert mesh_of(4, tp=2).replica(3) == 0
