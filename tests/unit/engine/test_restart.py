"""What ranks know of the restarts of their run."""

from __future__ import annotations

from neuron_accel.engine.plan.restart import find_restart


def test_restarts_are_known_by_the_environment():
    assert find_restart({}) is None
    assert find_restart({"TORCHELASTIC_RESTART_COUNT": "1"}) is None  # torchrun does not say of which run
    found = find_restart({"TORCHELASTIC_RESTART_COUNT": "1", "NEURON_ACCEL_RUN": "a"})
    assert found is not None
    assert found.run == "a"
    requeued = find_restart({"SLURM_RESTART_COUNT": "2", "NEURON_ACCEL_RUN": "b"})
    assert requeued is not None
    assert requeued.run is None  # the launch is a new one
