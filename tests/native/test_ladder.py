"""``neuron-accel test`` on the stand-in for the native device."""

from __future__ import annotations

import pytest

from neuron_accel.cli import smoke
from neuron_accel.cli.smoke_test import RUNGS
from neuron_accel.testing import run_ranks


@pytest.mark.timeout(240)
def test_the_ladder_is_climbed_to_its_end():
    found = run_ranks(smoke.climb, 2, list(RUNGS), backend="native", timeout=100)[0]
    cannot = {"pp": "skipped"}  # this device cannot send
    assert {one["name"]: one["status"] for one in found} == {name: cannot.get(name, "passed") for name in RUNGS}
    assert "does not implement send" in next(one for one in found if one["name"] == "pp")["problems"][0]
    trained = next(one for one in found if one["name"] == "zero1")["measured"]
    assert trained["loss"]["allowed"] == smoke.TOLERANCES["neuron"].loss
