"""Whether a launch continues after a failure, and on how many ranks."""

from __future__ import annotations

import pytest

from neuron_accel.cli.restarts import Restarts, choose_machines
from neuron_accel.engine.plan.mesh import AxisKind, AxisSpec, Mesh
from neuron_accel.engine.plan.plan import Plan
from neuron_accel.engine.plan.planner import make_plan
from neuron_accel.engine.plan.registry import default_registry
from neuron_accel.engine.plan.restart import (
    FULL_SIZE,
    NOTES,
    Fit,
    KeptBatch,
    Notes,
    find_fits,
    find_restart,
    read_notes,
)
from neuron_accel.errors import ConfigurationError, PlanError
from neuron_accel.strategies.tensor_parallel.plugin import TensorParallelPlugin

FITS = tuple(Fit(ranks=2 * size, data_parallel=size, mesh=f"dp {size} x tp 2") for size in (4, 2, 1))
KNOWN = Notes(fits=FITS, accumulates=True)


def ranks_after(restarts, *culprits, notes=KNOWN):
    return [start and start.ranks for start in (restarts.after(culprit, notes) for culprit in culprits)]


def test_ranks_are_left_out_when_the_same_one_fails_repeatedly():
    assert ranks_after(Restarts(ranks=8, least=2, most_restarts=6), 3, 3, 1, 2, 2, 2, 2) == [8, 4, 4, 4, 2, 2, None]
    assert ranks_after(Restarts(ranks=8, least=8, most_restarts=3), 3, 3, 3, 3) == [8, 8, 8, None]
    assert ranks_after(Restarts(ranks=8, least=2, most_restarts=0), 3) == [None]


@pytest.mark.parametrize(
    ("notes", "least", "why"),
    [
        (Notes(), 2, "the script has not created a NeuronAccelerator yet"),
        (Notes(fits=FITS), 2, "the script does not train with accelerator.accumulate"),
        (KNOWN, 5, "no mesh with the same degrees but for data parallelism fits 5 to 7 ranks"),
    ],
)
def test_it_says_why_there_are_not_fewer(notes, least, why):
    restarts = Restarts(ranks=8, least=least, most_restarts=9)
    restarts.after(0, notes)
    again = restarts.after(0, notes)
    assert (again.ranks, again.full_size) == (8, None)
    assert "rank 0 has failed first 2 times in a row, but it continues with 8 ranks" in again.why
    assert why in again.why


def test_what_was_known_once_is_kept():
    """A start that ends before it has made its accelerator leaves no notes."""
    restarts = Restarts(ranks=8, least=1, most_restarts=9)
    restarts.after(0, KNOWN)
    again = restarts.after(0, Notes())
    assert (again.ranks, again.full_size) == (4, 4)
    assert "on 4 ranks instead of 8" in again.why
    assert "mesh: dp 2 x tp 2; a step has 2 times the micro-batches" in again.why


# ---- what the ranks tell ---------------------------------------------------------------------------------------------
def plan_for(ranks):
    owners = default_registry().default_owners()
    return make_plan([TensorParallelPlugin(tensor_parallel_size=2)], world_size=ranks, default_owners=owners)


def test_meshes_keep_all_degrees_but_that_of_data_parallelism(tmp_path):
    fits = find_fits(plan_for(12), plan_for)
    assert [(fit.ranks, fit.data_parallel) for fit in fits] == [
        (12, 6),
        (6, 3),
        (4, 2),
        (2, 1),
    ]
    kept = KeptBatch({NOTES: str(tmp_path)}, 6)  # which 5 and 4 do not divide
    assert read_notes(tmp_path) == Notes()
    kept.leave_fits(lambda: fits)
    assert read_notes(tmp_path) == Notes(fits=fits)
    kept.leave_accumulates()
    assert read_notes(tmp_path) == Notes(fits=fits, accumulates=True)


def test_a_mesh_of_other_degrees_is_not_chosen():
    def other(ranks):
        if ranks == 2:
            raise PlanError("not on 2 ranks")
        mesh = Mesh.build([AxisSpec(name="cp", degree=4 // ranks, kind=AxisKind.SEQUENCE)], ranks * (4 // ranks))
        return Plan(mesh=mesh, plugins=(), owners={}, capabilities=frozenset(), reasons={}, provenance={})

    assert [fit.ranks for fit in find_fits(other(4), other)] == [4]


def test_samples_of_a_step_are_kept():
    assert KeptBatch({}, 4).accumulation(3) == 3
    assert KeptBatch({FULL_SIZE: "4"}, 2).accumulation(3) == 6
    with pytest.raises(ConfigurationError, match="3 data-parallel ranks cannot continue a run of 4"):
        KeptBatch({FULL_SIZE: "4"}, 3)


def test_restarts_are_known_by_the_environment():
    assert find_restart({}) is None
    assert find_restart({"TORCHELASTIC_RESTART_COUNT": "1"}) is None  # torchrun does not say since when
    found = find_restart({"TORCHELASTIC_RESTART_COUNT": "1", "NEURON_ACCEL_LAUNCHED": "12.5"})
    assert found is not None
    assert found.since == 12.5
    requeued = find_restart({"SLURM_RESTART_COUNT": "2", "NEURON_ACCEL_LAUNCHED": "12.5"})
    assert requeued is not None
    assert requeued.since == 0.0  # the launch is a new one


# ---- several machines ------------------------------------------------------------------------------------------------
def chosen(*here, machines=4, ranks=2, least=1, notes=KNOWN):
    return choose_machines(here, machines=machines, ranks=ranks, least=least, notes=notes)


def test_all_machines_that_are_there_go_on():
    assert chosen(0, 1, 2, 3).machines == (0, 1, 2, 3)
    assert (chosen(0, 1, 2, 3).full_size, chosen(0, 1, 2, 3).why) == (None, "")


def test_without_a_machine_as_many_go_on_as_a_mesh_fits():
    choice = chosen(0, 2, 3)  # 6 of 8 ranks: the mesh fits 4
    assert (choice.machines, choice.full_size) == ((0, 2), 4)
    assert choice.why == (
        "machine 1 is lost; 2 of 4 continue, with 4 ranks; mesh: dp 2 x tp 2; a step has 2 times the micro-batches of "
        "the first start, and the same number of samples"
    )
    assert chosen(0, 2).machines == (0, 2)
    assert chosen(0).machines == (0,)
    assert chosen(0, machines=2, ranks=4).machines == (0,)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"least": 3}, "machines 2, 3 are lost, and 2 of 4 machines are left, fewer than --min-nnodes 3"),
        ({"notes": Notes()}, "the script has not created a NeuronAccelerator yet"),
        ({"notes": Notes(fits=FITS)}, "does not train with accelerator.accumulate(model)"),
        ({"ranks": 3}, "no mesh with the same degrees but for data parallelism fits 1 to 2 machines"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(arguments, why):
    choice = chosen(0, 1, **arguments)
    assert choice.machines == ()
    assert why in choice.why
