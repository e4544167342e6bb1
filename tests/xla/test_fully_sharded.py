"""On a device that compiles whole steps fully sharded parameters are refused, in words."""

from __future__ import annotations

import pytest

from neuron_accel.errors import PlanError
from neuron_accel.testing import RanksError, run_ranks


def plans():
    from neuron_accel import NeuronAccelerator

    NeuronAccelerator(config={"plugins": ["fully_sharded"], "backend": "xla"})


def test_it_is_refused():
    with pytest.raises(RanksError) as raised:
        run_ranks(plans, 2, backend="xla")
    for error in raised.value.errors.values():
        assert isinstance(error, PlanError)
        assert "not available on this device" in error.what
        assert "Zero1Plugin" in error.fix
