"""The library finds an emulated machine as it would Trainium."""

from __future__ import annotations

import os

import pytest
from neuron_accel_emulation import emulated_instance


def found():
    from neuron_accel.backends.select import Machine, choose
    from neuron_accel.neuron.instances import detect_instance

    instance = detect_instance()
    return choose(None, os.environ, Machine()).backend, instance.name if instance else None


@pytest.mark.timeout(240)
def test_the_backend_and_the_instance():
    with emulated_instance("trn1.32xlarge") as machine:
        assert machine.run(found, 1, timeout=150) == [("xla", "trn1.32xlarge")]
